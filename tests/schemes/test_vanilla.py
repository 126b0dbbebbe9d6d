"""Plain initialisations against numbers worked out by hand, and against torch and transformers themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from signalprop import read_parametrization
from signalprop.errors import InputError
from signalprop.families import find
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import zipf
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme
from signalprop.theory.embedding import embed

GROUPED = Architecture(
    kind="encoder-decoder", n_layers=2, d_model=12, n_heads=4, n_kv_heads=2, d_head=5, d_ff=20, gated=True, dropout=0.1
)


def stds(table: Parametrization) -> dict[str, float]:
    """The one standard deviation of each role."""
    out = {}
    for role, column in table.weights.items():
        if not role_mask(table.architecture, role).any():
            continue
        values = set(column[column > 0].tolist())
        assert len(values) <= 1
        out[role] = values.pop() if values else 0.0
    return out


class TestXavier:
    @pytest.mark.parametrize(("name", "distribution"), [("xavier", "normal"), ("xavier-uniform", "uniform")])
    def test_two_over_fan_in_plus_fan_out(self, name: str, distribution: str) -> None:
        table = scheme(name)(GROUPED)
        fans = {"query": 32, "key": 22, "value": 22, "output": 32, "gate": 32, "up": 32, "down": 32}
        assert stds(table) == pytest.approx({role: math.sqrt(2 / total) for role, total in fans.items()})
        assert set(table.distribution.values()) == {distribution}
        assert (table.skip == 1).all() and (table.branch == 1).all()

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"n_segments": 2},
            {"positions": "rotary", "embedding_scale": 4.0},
            {"positions": "sinusoidal"},
            {"embedding_dropout": 0.5},
        ],
        ids=str,
    )
    def test_the_models_input_has_second_moment_1(self, changes: dict[str, Any]) -> None:
        a = Architecture(n_layers=1, d_model=16, dropout=0.1, **changes)
        assert float(embed(a, scheme("xavier")(a).embedding, zipf(100)).second_moment) == pytest.approx(1.0)

    def test_logits_start_small(self) -> None:
        head = scheme("xavier")(Architecture(n_layers=1, d_model=64, head_transform=True)).head
        assert (head.scale, head.transform) == (1 / 8, 1 / 8)
        assert 64 * (head.weight * head.scale) ** 2 == pytest.approx(0.5)  # two tables: sigma_e^2 = 1/2


class TestFixed:
    def test_gpt2_scales_what_writes_to_the_stream(self) -> None:
        a = Architecture.preset("gpt2", n_layers=8)
        assert stds(scheme("gpt2")(a)) == {
            **dict.fromkeys(("query", "key", "value", "up"), 0.02),
            **dict.fromkeys(("output", "down"), 0.005),  # 0.02 / sqrt(16)
        }


class TestPyTorch:
    def test_formulas(self) -> None:
        table = scheme("pytorch")(GROUPED.replace(head_transform=True, tied_embeddings=False))
        packed = math.sqrt(2 / (12 + (4 + 2 * 2) * 5))
        expected = {"query": packed, "key": packed, "value": packed, "output": 1 / math.sqrt(60)}
        expected |= {"gate": 1 / 6, "up": 1 / 6, "down": 1 / math.sqrt(60)}
        assert stds(table) == pytest.approx(expected)
        assert table.biases["up"].max() == pytest.approx(1 / 6) and not table.biases["query"].any()
        assert (table.head.weight, table.head.transform) == pytest.approx((1 / 6, 1 / 6))
        assert not scheme("pytorch")(GROUPED.replace(bias=False)).biases["up"].any()

    def test_torchs_own_layer(self) -> None:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(96, 4, dim_feedforward=160)
        table = scheme("pytorch")(Architecture(n_layers=1, d_model=96, n_heads=4, d_ff=160))
        wanted = stds(table)
        packed = layer.self_attn.in_proj_weight
        for tensor, std in (
            (packed[:96], wanted["query"]),
            (packed[192:], wanted["value"]),
            (layer.self_attn.out_proj.weight, wanted["output"]),
            (layer.linear1.weight, wanted["up"]),
            (layer.linear2.weight, wanted["down"]),
            (layer.linear1.bias, table.biases["up"].max()),
            (layer.linear2.bias, table.biases["down"].max()),
        ):
            close(tensor, std)
        assert not layer.self_attn.in_proj_bias.any() and not layer.self_attn.out_proj.bias.any()


def close(tensor: Any, std: float) -> None:
    """The root mean square of a random tensor is `std`, within four standard errors (of a normal one at most)."""
    values = tensor.detach().double().numpy().ravel()
    assert abs(np.sqrt(np.mean(values**2)) / std - 1) < 4 / math.sqrt(2 * values.size)


SMALL = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 200, "vocab_size": 300,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
FAIRSEQ = {
    "d_model": 96, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 200, "decoder_ffn_dim": 200, "vocab_size": 300,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"d_model": 96, "d_kv": 16, "num_heads": 4, "num_layers": 3, "d_ff": 200, "vocab_size": 300}
HF: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", SMALL, "BertForMaskedLM"),
    "gpt2": ("GPT2Config", {"n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 300}, "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", SMALL | {"num_key_value_heads": 2}, "LlamaForCausalLM"),
    "vit": ("ViTConfig", SMALL | {"image_size": 32, "patch_size": 8}, "ViTForImageClassification"),
    "t5": ("T5Config", T5, "T5ForConditionalGeneration"),
    "t5 gated": ("T5Config", T5 | {"feed_forward_proj": "gated-gelu"}, "T5ForConditionalGeneration"),
    "gpt_neox": ("GPTNeoXConfig", SMALL, "GPTNeoXForCausalLM"),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 200}, "OPTForCausalLM"),
    "olmo2": ("Olmo2Config", SMALL, "Olmo2ForCausalLM"),
    "phi": ("PhiConfig", SMALL, "PhiForCausalLM"),
    "falcon": ("FalconConfig", SMALL | {"ffn_hidden_size": 200}, "FalconForCausalLM"),
    "deit": ("DeiTConfig", SMALL | {"image_size": 32, "patch_size": 8}, "DeiTForImageClassification"),
    "bart": ("BartConfig", FAIRSEQ, "BartForConditionalGeneration"),
    "whisper": ("WhisperConfig", FAIRSEQ, "WhisperForConditionalGeneration"),
    "speech_to_text": ("Speech2TextConfig", FAIRSEQ, "Speech2TextForConditionalGeneration"),
    "gemma3_text": ("Gemma3TextConfig", SMALL | {"num_key_value_heads": 2, "head_dim": 24}, "Gemma3ForCausalLM"),
    "mpnet": ("MPNetConfig", SMALL, "MPNetForMaskedLM"),
}


# Of the others, that the draws are the table's is checked in tests/repair/test_checking.py, at the usual setting.
FAST = ("bert", "gpt2", "t5", "whisper", "olmo2", "mpnet")


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in HF])
def test_transformers_draws_what_the_table_says(case: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, fields, model_class = HF[case]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields)
    drawn_by = find(config.model_type).initialisation  # type: ignore[union-attr]
    assert getattr(config, drawn_by.setting) == drawn_by.usual
    setattr(config, drawn_by.setting, 3 * drawn_by.usual)
    model = getattr(transformers, model_class)(config)
    wanted = scheme("huggingface")(Architecture.from_hf(model))
    found = read_parametrization(model)
    sizes = {role: column.size for role, column in found.weights.items()}
    assert sizes == {role: column.size for role, column in wanted.weights.items()}
    a = wanted.architecture
    entries = {"gate": 200 * 96, "up": 200 * 96, "down": 200 * 96}
    entries |= dict.fromkeys(("query", "output"), a.n_heads * a.d_head * 96)
    entries |= dict.fromkeys(("key", "value"), a.n_kv_heads * a.d_head * 96)
    for role, n in entries.items():
        present = wanted.weights[role] > 0
        assert (present == (found.weights[role] > 0)).all()
        ratio = found.weights[role][present] / wanted.weights[role][present]
        assert (np.abs(ratio - 1) < 4.5 / math.sqrt(2 * n)).all()
        assert not found.biases[role].any()
    assert found.norm_gain == pytest.approx(wanted.norm_gain)
    assert found.head.final_norm_gain == pytest.approx(wanted.head.final_norm_gain)
    for name, n in (("token", 300 * 96), ("position", 16 * 96), ("segment", 96)):
        std, drawn = getattr(wanted.embedding, name), getattr(found.embedding, name)
        assert (drawn == std == 0) or abs(drawn / std - 1) < 4.5 / math.sqrt(2 * n)
    if wanted.embedding.decoder_position is not None:
        assert abs(found.embedding.decoder_position / wanted.embedding.decoder_position - 1) < 4.5 / math.sqrt(2 * 9600)
    for drawn, std in zip(found.embedding.convolutions, wanted.embedding.convolutions, strict=True):
        assert abs(drawn / std - 1) < 4.5 / math.sqrt(2 * 3 * 80 * 96)
    assert not any(found.embedding.convolution_biases)
    assert abs(found.head.weight / wanted.head.weight - 1) < 4.5 / math.sqrt(2 * 2 * 96)
    assert (found.head.transform > 0) == (wanted.head.transform > 0)
    assert found.head.scale == pytest.approx(wanted.head.scale)


@pytest.mark.parametrize("value", ["wide", True, -0.02, float("inf")])
def test_a_standard_deviation_that_is_none(value: Any) -> None:
    with pytest.raises(InputError, match=r"initializer_range is .*; expected a positive number, as 0.02"):
        Architecture.from_hf({"model_type": "llama", "initializer_range": value})
    assert Architecture.from_hf({"model_type": "llama", "initializer_range": 0}).init_scale == 1  # as transformers does


def test_a_family_that_is_not_known() -> None:
    for family in (None, "mamba"):
        with pytest.raises(InputError, match="not known here; give the architecture a family") as caught:
            scheme("huggingface")(GROUPED.replace(family=family))
        assert "\n" not in str(caught.value)
