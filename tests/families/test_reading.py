"""Hugging Face configurations of every family: as objects, models, dictionaries, directories and files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signalprop.errors import InputError
from signalprop.families import find, names
from signalprop.network.architecture import Architecture

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

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
    "opt-125m": ("opt", {}),
    "olmo2-7b": (
        "olmo2",
        {
            "vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "phi-1.5": ("phi", {}),
    "falcon-7b": ("falcon", {}),
    "deit-base": ("deit", {"num_labels": 1000}),
    "bart-large": ("bart", {"attention_dropout": 0.1}),
    "whisper-tiny": ("whisper", {}),
    "s2t-small": ("speech_to_text", {"attention_dropout": 0.1}),
    "mixtral-8x7b": ("mixtral", {"max_position_embeddings": 4096}),
    "olmoe-1b-7b": ("olmoe", {"max_position_embeddings": 4096, "intermediate_size": 1024}),
    "qwen3-8b": (
        "qwen3",
        {
            "num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288,
            "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gemma2-9b": (
        "gemma2",
        {
            "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
            "intermediate_size": 14336, "max_position_embeddings": 4096,
        },
    ),
    "lfm2-1.2b": (
        "lfm2",
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip


def config(family: str, **options: Any) -> Any:
    return transformers.AutoConfig.for_model(family, **options)


def readable(family: str) -> Any:
    """What a configuration of the family has to say, where its defaults are refused."""
    found = find(family)
    return {} if found is None else found.readable


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_configs_give_the_presets(name: str) -> None:
    family, options = PRESETS[name]
    assert Architecture.from_hf(config(family, **options)) == Architecture.preset(name)


@pytest.mark.parametrize("family", names())
def test_all_sources_agree(family: str, tmp_path: Path) -> None:
    """A config object, its dictionary, and what save_pretrained leaves on disk (which may omit defaults)."""
    source = config(family, **readable(family))
    source.save_pretrained(tmp_path)
    expected = Architecture.from_hf(source)
    assert expected.family == family
    assert Architecture.from_hf(source.to_dict()) == expected
    assert Architecture.from_hf(tmp_path) == expected
    assert Architecture.from_hf(str(tmp_path / "config.json")) == expected
    assert Architecture.from_hf({"model_type": family, **readable(family)}) == expected  # the classes' own defaults


FEW = names()[::9]


def test_directories_are_read_without_transformers(tmp_path: Path) -> None:
    for family in FEW:
        config(family, **readable(family)).save_pretrained(tmp_path / family)
    code = (
        "import sys; from pathlib import Path; from signalprop.network.architecture import Architecture; "
        f"print(*sorted(Architecture.from_hf(folder).family for folder in Path({str(tmp_path)!r}).iterdir())); "
        "print(sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [" ".join(FEW), "[]"]


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
        ("deit", "DeiTForImageClassification"): ("classes", False),
        ("opt", "OPTForCausalLM"): ("lm", False),
        ("bart", "BartForConditionalGeneration"): ("lm", False),
        ("bart", "BartModel"): ("none", False),
        ("whisper", "WhisperForConditionalGeneration"): ("lm", False),
    }
    for (family, name), expected in cases.items():
        a = Architecture.from_hf(config(family, architectures=[name]))
        assert (a.head, a.head_transform) == expected, name
    assert Architecture.from_hf(config("vit", num_labels=7)).n_classes == 7
    encoder = Architecture.from_hf(config("t5", architectures=["T5EncoderModel"]))
    assert (encoder.kind, encoder.head, encoder.target_len) == ("encoder", "none", None)


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
    mpnet = Architecture.from_hf(config("mpnet", max_position_embeddings=514, architectures=["MPNetForMaskedLM"]))
    assert (mpnet.seq_len, mpnet.n_segments, mpnet.placements[0], mpnet.head_transform) == (512, 0, "post", True)
    assert Architecture.from_hf(config("bert", is_decoder=True)).kind == "decoder"


def test_details_of_gemma4() -> None:
    own = {"num_hidden_layers": 7, "hidden_size_per_layer_input": 0, "global_head_dim": 384}
    made = config("gemma4_text", **own, attention_k_eq_v=True, num_global_key_value_heads=2)
    gemma = Architecture.from_hf(made)
    released = {"model_type": "gemma4_text", **own, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    assert Architecture.from_hf(released) == gemma
    assert [kinds[0] for kinds in gemma.layer_branches] == ["attention"] * 5 + ["global_attention"] * 2
    assert (gemma.d_head, gemma.n_kv_heads, gemma.score_scale, gemma.seq_len, gemma.rotary_base) == (
        256, 4, 1.0, 512, 1e4,
    )  # fmt: skip
    assert gemma.settings["attention"].model_dump(exclude_defaults=True) == {"window": 512, "value_norm": True}
    assert gemma.settings["global_attention"].model_dump() == {
        "d_head": 384, "n_kv_heads": 2, "rotary_base": 1e6, "rotary_fraction": 0.25, "proportional": True,
        "value_norm": True, "shared": True,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 5e5}
    rotary = {"sliding_attention": plain, "full_attention": plain}
    apart = Architecture.from_hf({"model_type": "gemma4_text", **own, "rope_parameters": rotary})
    found = apart.settings["global_attention"].model_dump()
    assert (found["n_kv_heads"], found["shared"], found["proportional"], found["rotary_fraction"]) == (
        4,
        False,
        False,
        1,
    )
    everywhere = Architecture.from_hf(released | {"layer_types": ["full_attention"] * 7})
    assert everywhere.seq_len == 131072 and list(everywhere.settings) == ["global_attention"]


def test_details_of_speech() -> None:
    whisper = Architecture.from_hf(config("whisper", num_mel_bins=128))
    assert (whisper.frame_dim, whisper.n_frames, whisper.positions_of(decoder=True)) == (128, 3000, "learned")
    assert [whisper.convolution(i) for i in (0, 1)] == [(128, 384, 3), (384, 384, 3)]
    speech = Architecture.from_hf(config("speech_to_text", num_conv_layers=3, conv_kernel_sizes=[5, 3, 3]))
    assert [speech.convolution(i) for i in (0, 1, 2)] == [(80, 1024, 5), (512, 1024, 3), (512, 512, 3)]
    assert (speech.n_frames, speech.seq_len, speech.conv_strides) == (6000, 750, (2, 2, 2))
    assert Architecture.from_hf(config("speech_to_text", scale_embedding=False)).embedding_scale == 1.0
    longer = Architecture.from_hf(config("whisper"), seq_len=750)
    assert (longer.seq_len, longer.target_len) == (750, 448)


_GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


class TestBadInput:
    def test_an_unknown_family_begins_with_the_remedy(self) -> None:
        with pytest.raises(
            InputError,
            match=r"give an Architecture, or the model itself.*'bloom' is not one of the \d\d whose",
        ):
            Architecture.from_hf({"model_type": "bloom"})
        with pytest.raises(InputError, match="family None is not one of"):
            Architecture.from_hf({})

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "deberta-v2"}, "'deberta-v2' is not supported: its disentangled attention"),
            ({"model_type": "phimoe"}, r"'phimoe' is not supported: its router \(SparseMixer\)"),
            ({"model_type": "gemma3"}, "'gemma3' is not supported: it also reads images.*gemma3_text"),
            ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional attention"),
            ({"model_type": "gemma4_text"}, "per_layer_input 256 has branches that read inputs per layer"),
            ({**_GEMMA4, "num_kv_shared_layers": 2}, "has layers that attend to the keys of earlier ones"),
            ({**_GEMMA4, "enable_moe_block": True}, "has experts beside the feed-forward, which is not derived"),
            ({**_GEMMA4, "use_bidirectional_attention": "all"}, "Gemma 4 with bidirectional attention"),
            ({**_GEMMA4, "per_layer_config": {"0": {"head_dim": 64}}}, "more than its full layers' heads"),
            ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "bounds on its logits"),
            ({"model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 1024}, "word_embed_proj_dim 512"),
            ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
            ({"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn"}}, "yarn have no factor"),
            ({"model_type": "falcon", "alibi": True}, "alibi"),
            ({"model_type": "falcon", "parallel_attn": False, "attention_dropout": 0.1}, "set hidden_dropout"),
            ({"model_type": "bart", "scale_embedding": True}, "multiplies tokens and not positions"),
            ({"model_type": "bart", "decoder_ffn_dim": 64}, "encoder_ffn_dim is 4096 and decoder_ffn_dim 64"),
            ({"model_type": "whisper", "decoder_attention_heads": 2}, "one number for both stacks"),
            (
                {"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]},
                "single stack of an",
            ),
            ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "single stack of an encoder-decoder"),
            ({"model_type": "speech_to_text", "conv_kernel_sizes": [4, 5]}, "expected one odd kernel"),
        ],
    )
    def test_what_an_architecture_cannot_say(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            Architecture.from_hf(fields)
        assert "\n" not in str(caught.value)

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
