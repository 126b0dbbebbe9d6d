"""Known architectures by name."""

from __future__ import annotations

import pytest

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.presets import PRESETS


def layer_weights(a: Architecture) -> int:
    """Entries of the weight matrices of all layers."""
    attention = 2 * (a.n_heads + a.n_kv_heads) * a.d_head * a.d_model
    feed_forward = (2 + a.gated) * a.d_model * a.d_ff
    return a.n_layers_total * (attention + feed_forward) + (a.n_decoder_layers or 0) * attention


# Published sizes (model cards and papers), in millions, of everything but norms and biases.
@pytest.mark.parametrize(
    ("name", "millions", "tables"),
    [
        ("bert-base", 109.5, 1),
        ("bert-large", 335, 1),
        ("roberta-base", 125, 1),
        ("gpt2", 124, 1),
        ("gpt2-medium", 355, 1),
        ("gpt2-large", 774, 1),
        ("gpt2-xl", 1558, 1),
        ("llama-7b", 6738, 2),
        ("llama3-8b", 8030, 2),
        ("mistral-7b", 7242, 2),
        ("qwen2-0.5b", 494, 1),
        ("gpt-neox", 20_550, 2),
        ("vit-base", 86.6, 0),
        ("vit-small", 22.05, 0),
        ("t5-small", 60.5, 1),
        ("t5-base", 223, 1),
        ("llama-130m", 134, 2),
        ("llama-1b", 1339, 2),
    ],
)
def test_sizes_are_the_published_ones(name: str, millions: float, tables: int) -> None:
    a = Architecture.preset(name)
    positions = a.seq_len * a.d_model if a.positions == "learned" else 0
    ends = (a.patch_dim + a.n_classes) if a.input == "patches" else tables * a.vocab_size
    total = layer_weights(a) + positions + ends * a.d_model
    assert total / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_small_ones_follow(name: str) -> None:
    a = Architecture.preset(name)
    tiny = Architecture.preset(name, n_layers=2, d_model=128, seq_len=17 if a.class_token else 16)
    assert tiny.n_layers == 2 and tiny.d_ff >= 64
    assert tiny.n_heads * tiny.d_head in (128, 128 * a.n_heads * a.d_head // a.d_model)
    assert tiny.family == a.family and tiny.n_heads % tiny.n_kv_heads == 0
    if a.kind == "encoder-decoder":
        assert tiny.n_decoder_layers == (2 if a.n_decoder_layers == a.n_layers else a.n_decoder_layers)
        assert tiny.target_len == (16 if a.target_len == a.seq_len else a.target_len)


@pytest.mark.parametrize(
    ("name", "said"),
    [("brt-base", r"did you mean bert-base\? \d+ presets are known"), ("", "known presets: tgs, bert-base")],
)
def test_an_unknown_preset_names_the_nearest_or_all(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Architecture.preset(name)
