"""Hugging Face configurations of every family: as objects, models, dictionaries, directories and files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.hf_configs import DEFAULTS, READERS

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

CONFIGS = {
    "bert": "BertConfig", "roberta": "RobertaConfig", "gpt2": "GPT2Config", "llama": "LlamaConfig",
    "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "gemma": "GemmaConfig",
    "vit": "ViTConfig", "t5": "T5Config", "gpt_neox": "GPTNeoXConfig",
}  # fmt: skip
PRESETS = {
    "bert-base": ("bert", {}),
    "roberta-base": ("roberta", {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "llama-7b": ("llama", {}),
    "llama3-8b": (
        "llama",
        {
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "mistral-7b": ("mistral", {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}),
    "qwen2-0.5b": (
        "qwen2",
        {
            "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24,
            "intermediate_size": 4864, "max_position_embeddings": 2048, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-neox": ("gpt_neox", {}),
    "vit-base": ("vit", {"num_labels": 1000}),
    "t5-small": ("t5", {}),
}  # fmt: skip


def config(family: str, **options: Any) -> Any:
    return getattr(transformers, CONFIGS[family])(**options)


def test_every_reader_is_tested() -> None:
    assert set(CONFIGS) == set(READERS) == set(DEFAULTS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_configs_give_the_presets(name: str) -> None:
    family, options = PRESETS[name]
    assert Architecture.from_hf(config(family, **options)) == Architecture.preset(name)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_all_sources_agree(family: str, tmp_path: Path) -> None:
    """A config object, its dictionary, and what save_pretrained leaves on disk (which may omit defaults)."""
    source = config(family)
    source.save_pretrained(tmp_path)
    expected = Architecture.from_hf(source)
    assert expected.family == family
    assert Architecture.from_hf(source.to_dict()) == expected
    assert Architecture.from_hf(tmp_path) == expected
    assert Architecture.from_hf(str(tmp_path / "config.json")) == expected
    assert Architecture.from_hf({"model_type": family}) == expected  # the classes' own defaults


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_directory_is_read_without_transformers(family: str, tmp_path: Path) -> None:
    config(family).save_pretrained(tmp_path)
    code = (
        f"import sys; from signalprop.architecture import Architecture; Architecture.from_hf({str(tmp_path)!r}); "
        "print(sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_head_follows_the_class() -> None:
    cases = {
        ("bert", "BertForMaskedLM"): ("lm", True),
        ("bert", "BertForPreTraining"): ("lm", True),
        ("bert", "BertModel"): ("none", False),
        ("bert", "BertForSequenceClassification"): ("classes", False),
        ("roberta", "RobertaForMaskedLM"): ("lm", True),
        ("gpt2", "GPT2LMHeadModel"): ("lm", False),
        ("gpt2", "GPT2Model"): ("none", False),
        ("llama", "LlamaForCausalLM"): ("lm", False),
        ("vit", "ViTForImageClassification"): ("classes", False),
        ("vit", "ViTModel"): ("none", False),
        ("t5", "T5ForConditionalGeneration"): ("lm", False),
    }
    for (family, name), expected in cases.items():
        a = Architecture.from_hf(config(family, architectures=[name]))
        assert (a.head, a.head_transform) == expected, name
    assert Architecture.from_hf(config("vit", num_labels=7)).n_classes == 7
    encoder = Architecture.from_hf(config("t5", architectures=["T5EncoderModel"]))
    assert (encoder.kind, encoder.head, encoder.target_len) == ("encoder", "none", None)


def test_a_model_says_its_class() -> None:
    model = transformers.BertModel(
        config("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    )
    a = Architecture.from_hf(model)
    assert (a.head, a.d_model, a.n_layers, a.n_heads) == ("none", 16, 1, 2)


def test_details() -> None:
    gated = Architecture.from_hf(config("t5", feed_forward_proj="gated-gelu", num_decoder_layers=3))
    assert (gated.gated, gated.activation, gated.n_decoder_layers, gated.score_scale) == (True, "gelu_tanh", 3, 1.0)
    assert Architecture.from_hf(config("t5", feed_forward_proj="gated-silu")).activation == "silu"
    gpt2 = Architecture.from_hf(config("gpt2", n_inner=100, scale_attn_weights=False, resid_pdrop=0.2))
    assert (gpt2.d_ff, gpt2.score_scale, gpt2.dropout, gpt2.attention_dropout) == (100, 1.0, 0.2, 0.1)
    vit = Architecture.from_hf(config("vit", image_size=[32, 64], patch_size=8, num_channels=1))
    assert (vit.seq_len, vit.patch_dim) == (4 * 8 + 1, 64)
    neox = Architecture.from_hf(config("gpt_neox", use_parallel_residual=False, rotary_pct=0.5, rotary_emb_base=500))
    assert (neox.parallel, neox.rotary_fraction, neox.rotary_base) == (False, 0.5, 500.0)
    old = {"model_type": "gpt_neox", "rotary_pct": 1.0, "rotary_emb_base": 20000}  # a config.json of transformers 4
    assert (Architecture.from_hf(old).rotary_fraction, Architecture.from_hf(old).rotary_base) == (1.0, 20000.0)
    assert Architecture.from_hf({"model_type": "llama", "rope_theta": 5e5}).rotary_base == 5e5
    assert Architecture.from_hf(config("mistral")).seq_len == 4096  # the width of the sliding window
    assert Architecture.from_hf(config("mistral", sliding_window=None)).seq_len == 131072
    assert Architecture.from_hf(config("qwen2")).qkv_bias and not Architecture.from_hf(config("qwen2")).bias
    assert Architecture.from_hf(config("llama", attention_bias=True)).qkv_bias
    assert Architecture.from_hf(config("gemma")).embedding_scale == 3072**0.5
    assert Architecture.from_hf(config("qwen3")).qk_norm
    assert Architecture.from_hf(config("bert", is_decoder=True)).kind == "decoder"


def test_changes() -> None:
    a = Architecture.from_hf(config("gpt2"), seq_len=64, dropout=0.0, n_heads=None)
    assert (a.seq_len, a.dropout, a.attention_dropout, a.embedding_dropout, a.n_heads) == (64, 0.0, 0.0, 0.0, 12)
    t5 = Architecture.from_hf(config("t5"), seq_len=64)
    assert (t5.seq_len, t5.target_len) == (64, 64)


class TestBadInput:
    def test_an_unknown_family_lists_the_known_ones(self) -> None:
        with pytest.raises(
            InputError, match=r"family 'opt' is not known; known: bert, .*vit\. For a model of your own.*Mapping"
        ):
            Architecture.from_hf({"model_type": "opt"})
        with pytest.raises(InputError, match="family None is not known"):
            Architecture.from_hf({})

    def test_sources_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"holds no config\.json"):
            Architecture.from_hf(tmp_path)
        with pytest.raises(InputError, match=r"cannot read .*nothing"):
            Architecture.from_hf(tmp_path / "nothing")
        (tmp_path / "config.json").write_text("[1, 2]", encoding="utf-8")
        with pytest.raises(InputError, match="expected a JSON object"):
            Architecture.from_hf(tmp_path)
        (tmp_path / "config.json").write_text("{", encoding="utf-8")
        with pytest.raises(InputError, match="is not JSON"):
            Architecture.from_hf(tmp_path)
        with pytest.raises(InputError, match="cannot read an architecture from a int"):
            Architecture.from_hf(3)

    def test_values_that_make_no_sense(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="not divisible by n_heads"):
            Architecture.from_hf({"model_type": "gpt2", "n_embd": 30, "n_head": 4})
        with pytest.raises(InputError, match=r"unknown activation 'gelu_3'"):
            Architecture.from_hf({"model_type": "bert", "hidden_act": "gelu_3"})
        with pytest.raises(InputError, match="this vit config cannot be read: ZeroDivisionError"):
            Architecture.from_hf({"model_type": "vit", "patch_size": 0})
        with pytest.raises(InputError, match="this gemma config cannot be read: TypeError"):
            Architecture.from_hf({"model_type": "gemma", "hidden_size": None})
        with pytest.raises(InputError, match="this t5 config cannot be read: AttributeError"):
            Architecture.from_hf({"model_type": "t5", "feed_forward_proj": 3})
        with pytest.raises(InputError, match="d_model: Input should be a valid integer"):
            Architecture.from_hf({"model_type": "gpt2", "n_embd": "wide"})
        with pytest.raises(InputError, match="cross-attention"):
            Architecture.from_hf({"model_type": "gpt2", "add_cross_attention": True})
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "num_hidden_layers": 0}), encoding="utf-8"
        )
        with pytest.raises(InputError, match="n_layers"):
            Architecture.from_hf(tmp_path)
