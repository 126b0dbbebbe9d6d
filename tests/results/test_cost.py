"""Parameters: parts and published sizes; FLOPs against the papers' Table 24 and against first principles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from signalprop.network.architecture import Architecture
from signalprop.results.cost import count_parameters, train_flops
from signalprop.schemes import scheme


def test_parts_add_up_and_published_sizes_come_out() -> None:
    counted = count_parameters(Architecture.preset("gpt2"))
    assert counted["total"] == sum(count for part, count in counted.items() if part != "total") == 124_439_808
    assert counted["head"] == 0  # tied
    assert count_parameters(Architecture.preset("llama-7b"))["total"] == 6_738_415_616
    assert count_parameters(Architecture.preset("mistral-7b"))["total"] == 7_241_732_096
    assert count_parameters(Architecture.preset("bert-large"))["total"] == 335_174_458


def test_a_second_norm_in_a_sandwich_and_none_at_all() -> None:
    pre = Architecture.preset("gpt2", n_layers=5)
    norms = {
        place: count_parameters(pre.replace(norm_placement=place, final_norm=True))["norms"]
        for place in ("none", "pre", "post", "sandwich")
    }
    per_norm = 2 * pre.d_model
    assert norms == {
        "none": per_norm, "pre": 11 * per_norm, "post": 11 * per_norm, "sandwich": 21 * per_norm
    }  # fmt: skip


# v1 Table 24. Its 784 layers of width 128 are 768 (Table 4; 784 would give 1.41e20, +33.3 %), and its 384 layers of
# width 128 are 384 of width 256 (Table 4; width 128 would give 0.70e20, -63.4 %). The absolute numbers are those of
# ELECTRA's default of a million steps of 256 sequences of 512 tokens (not of the 6.6 billion tokens trained on).
TABLE_24 = [
    (12, 1024, 1.06, None, None),
    (48, 512, 1.03, 12, -2.5),
    (192, 256, 1.12, 12, 6.3),
    (768, 128, 1.38, 12, 30.6),
    (24, 1024, 1.92, None, None),
    (96, 512, 1.96, 24, 2.3),
    (384, 256, 2.19, 24, 14.5),
]


def bert_flops(n_layers: int, d_model: int) -> float:
    return train_flops(Architecture.preset("bert-base", n_layers=n_layers, d_model=d_model), 256, 1_000_000)["total"]


@pytest.mark.parametrize(("n_layers", "d_model", "flops", "base_layers", "extra"), TABLE_24)
def test_table_24(n_layers: int, d_model: int, flops: float, base_layers: int | None, extra: float | None) -> None:
    ours = bert_flops(n_layers, d_model)
    assert ours / 1e20 == pytest.approx(flops, abs=0.0051)  # the table's last digit
    if base_layers is not None and extra is not None:
        assert 100 * (ours / bert_flops(base_layers, 1024) - 1) == pytest.approx(extra, abs=0.06)


def test_table_24_as_printed_does_not_hold() -> None:
    assert 100 * (bert_flops(784, 128) / bert_flops(12, 1024) - 1) == pytest.approx(33.3, abs=0.05)
    assert 100 * (bert_flops(384, 128) / bert_flops(24, 1024) - 1) == pytest.approx(-63.4, abs=0.05)


def test_bert_layer_term_by_term() -> None:
    """One layer written out from ELECTRA's list of terms, against the difference of two depths."""
    s, h, i, heads = 512, 768, 3072, 12
    attention = 3 * 2 * h * h + 3 * h + 2 * h * s + 5 * s * heads + 4 * s * heads + s * heads + 2 * h * s
    attention += 2 * h * h + h + 4 * h + h + 5
    feed_forward = 2 * h * i + 8 * i + i + 2 * h * i + h + 4 * h + h + 5 * h
    deep, shallow = (Architecture.preset("bert-base", n_layers=n) for n in (5, 4))
    difference = train_flops(deep, 1, 1)["total"] - train_flops(shallow, 1, 1)["total"]
    assert difference == pytest.approx(2 * s * (attention + feed_forward), rel=1e-12)


# --- what a scheme adds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"norm_placement": "res-post"}, {"kind": "decoder", "parallel": True}, {"kind": "encoder-decoder"}]
)
def test_trainable_multipliers_are_counted_as_the_built_model_has_them(fields: dict[str, Any]) -> None:
    from signalprop.models import build

    a = Architecture(n_layers=2, d_model=16, n_heads=2, vocab_size=30, seq_len=8, **fields)
    p = replace(scheme("xavier")(a), branch_trainable="channel", skip_trainable="scalar", attention_trainable=True)
    parts = count_parameters(p)
    assert parts["total"] == sum(x.numel() for x in build(p, seed=0).parameters())
    assert parts["multipliers"] == parts["total"] - count_parameters(a)["total"] > 0
    assert count_parameters(scheme("xavier")(a))["multipliers"] == 0
