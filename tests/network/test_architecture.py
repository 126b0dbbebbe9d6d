"""What a network is: defaults that follow from other fields, and bad descriptions in one line."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from strategies import architectures


def small(**changes: Any) -> Architecture:
    return Architecture(**{"n_layers": 2, "d_model": 64, **changes})


def test_defaults_follow_from_what_is_given() -> None:
    a = small(d_model=256, dropout=0.1, bias=False)
    assert (a.n_heads, a.n_kv_heads, a.d_head, a.d_ff) == (4, 4, 64, 1024)
    assert (a.attention_dropout, a.embedding_dropout, a.qkv_bias) == (0.1, 0.1, False)
    assert a.score_scale == 1 / 8
    assert small(d_model=100).n_heads == 1
    assert small(d_model=1).d_head == 1


def test_an_encoder_decoder_has_two_stacks() -> None:
    a = small(kind="encoder-decoder", seq_len=7)
    assert (a.n_decoder_layers, a.target_len, a.n_layers_total) == (2, 7, 4)
    assert small(kind="encoder-decoder", n_decoder_layers=3, target_len=5).n_layers_total == 5


@pytest.mark.parametrize(
    ("placement", "final"), [("pre", True), ("post", False), (("pre", "post"), False), (("post", "pre"), True)]
)
def test_the_final_norm_follows_from_the_last_layer(placement: Any, final: bool) -> None:
    assert small(norm_placement=placement).has_final_norm is final
    assert small(norm_placement=placement, final_norm=not final).has_final_norm is not final


@given(architectures())
def test_json_and_pickle_give_the_same_architecture(a: Architecture) -> None:
    for dump in (a.model_dump(mode="json"), a.model_dump(mode="json", exclude_defaults=True)):
        again = Architecture(**json.loads(json.dumps(dump)))
        assert again == a and hash(again) == hash(a)
    assert pickle.loads(pickle.dumps(a)) == a
    assert a.replace() == a


def test_what_reads_frames() -> None:
    a = small(kind="encoder-decoder", input="frames", conv_kernels=(5, 3), conv_strides=(2, 3), seq_len=7)
    assert a.n_frames == 42 and a.has_token_table and a.has_tied_head
    assert [a.convolution(i) for i in (0, 1)] == [(80, 64, 5), (64, 64, 3)]
    gated = a.replace(conv_activation="glu", conv_channels=10, d_model=32)
    assert [gated.convolution(i) for i in (0, 1)] == [(80, 20, 5), (10, 64, 3)]
    alone = small(input="frames", kind="encoder")
    assert not alone.has_token_table and not alone.has_tied_head


class TestReplace:
    def test_what_followed_follows_again(self) -> None:
        a = small(d_model=256, n_heads=4, d_ff=512, dropout=0.1)
        wide = a.replace(d_model=512)
        assert (wide.n_heads, wide.d_head, wide.d_ff) == (8, 64, 1024)
        assert a.replace(dropout=0.3).attention_dropout == 0.3
        assert a.replace(bias=False).qkv_bias is False
        assert (a.replace(n_heads=8).d_head, a.replace(n_heads=8).n_kv_heads) == (32, 8)

    def test_what_was_given_stays(self) -> None:
        a = small(d_model=256, n_heads=4, dropout=0.1, attention_dropout=0.2, qkv_bias=False)
        assert a.replace(dropout=0.0).attention_dropout == 0.2
        assert a.replace(bias=True).qkv_bias is False
        assert a.replace(d_model=512, d_ff=100).d_ff == 100
        assert a.replace(d_model=512, n_heads=2).d_head == 256
        assert a.replace(d_model=512, d_head=64).n_heads == 4

    def test_stacks(self) -> None:
        a = small(kind="encoder-decoder", seq_len=8)
        deep = a.replace(n_layers=5, seq_len=16)
        assert (deep.n_decoder_layers, deep.target_len) == (5, 16)
        assert small(kind="encoder-decoder", n_decoder_layers=3).replace(n_layers=5).n_decoder_layers == 3
        assert a.replace(kind="encoder").n_decoder_layers is None
        assert a.replace(kind="encoder").replace(kind="encoder-decoder") == a


BAD: list[tuple[dict[str, Any], str]] = [
    ({"d_model": "64"}, "d_model"),
    ({"d_model": 64.0}, "d_model"),
    ({"d_model": 0}, "d_model"),
    ({"d_model": 10**400}, "d_model"),
    ({"d_model": None}, "d_model: Field required"),
    ({"n_layers": True}, "n_layers"),
    ({"n_layers": 10**9}, "n_layers"),
    ({"n_heads": 5}, "not divisible by n_heads 5"),
    ({"n_heads": 0}, "n_heads"),
    ({"n_heads": "x"}, "n_heads"),
    ({"n_heads": 8, "n_kv_heads": 3}, "not a multiple of n_kv_heads 3"),
    ({"dropout": 1}, "dropout: Input should be less than 1"),
    ({"dropout": -0.1}, "dropout"),
    ({"dropout": float("nan")}, "dropout"),
    ({"dropout": "0.1"}, "dropout"),
    ({"attention_dropout": 1.0}, "attention_dropout"),
    ({"gated": 1}, "gated"),
    ({"activation": "rleu"}, "unknown activation"),
    ({"activation": ["relu"]}, "activation"),
    ({"norm_placement": "top"}, "norm_placement"),
    ({"norm_placement": ("pre", "top")}, "norm_placement"),
    ({"norm_placement": ("pre",)}, "names 1 layers, the model has 2"),
    ({"norm_placement": 3}, "norm_placement"),
    ({"kind": "both"}, "kind"),
    ({"kind": "decoder", "target_len": 3}, "target_len"),
    ({"kind": "encoder-decoder", "parallel": True}, "parallel"),
    ({"parallel": True, "norm_placement": "post"}, "parallel"),
    ({"input": "patches", "kind": "decoder"}, "patches"),
    ({"input": "frames", "kind": "decoder"}, "frames"),
    ({"input": "frames", "conv_kernels": (3, 4)}, "one odd kernel"),
    ({"input": "frames", "conv_kernels": ()}, "one odd kernel"),
    ({"input": "frames", "conv_strides": (1,)}, "one odd kernel"),
    ({"input": "frames", "conv_strides": (1, 0)}, "conv_strides"),
    ({"input": "frames", "conv_activation": "glue"}, "unknown activation"),
    ({"input": "frames", "frame_dim": 0}, "frame_dim"),
    ({"decoder_positions": "learned"}, "decoder_positions"),
    (
        {"kind": "encoder-decoder", "positions": "rotary", "decoder_positions": "learned"},
        "may differ only among learned, sinusoidal and none",
    ),
    ({"shared_norm": True}, "shared_norm needs parallel"),
    ({"distillation_token": True}, "distillation_token needs class_token"),
    ({"input": "patches", "class_token": True, "seq_len": 1}, "seq_len 1: expected more than the 1 class token"),
    ({"qk_norm": "all"}, "qk_norm"),
    ({"seq_len": 0}, "seq_len"),
    ({"vocab_size": 1}, "vocab_size"),
    ({"norm_eps": -1e-5}, "norm_eps"),
    ({"attention_scale": 0.0}, "attention_scale"),
    ({"attention_scale": 1e200}, "attention_scale"),
    ({"colour": "red"}, "colour: there is no such field"),
]


@pytest.mark.parametrize(("changes", "part"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_description_gets_one_line(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as caught:
        small(**changes)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("Architecture: ")
