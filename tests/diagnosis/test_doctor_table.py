"""A fast part of the table of planted faults: each is named first, with its place; healthy models are left in peace."""

from __future__ import annotations

import pytest
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.healthy import HEALTHY
from benchmarks.doctor.table import Row, judged, judged_healthy

FAST = (
    "no 1/sqrt(d_head)", "a skip forgotten, attention", "a doubled skip",
    "the skip carries the norm's output", "no causal mask", "tied weights that are not",
    "top-1 with renormalised weights", "biases of 1",
)  # fmt: skip
FINE = ("fresh gpt2", "fresh qwen3", "fresh gemma2", "fresh opt", "a decoder in plain PyTorch")


def row(name: str) -> Row:
    (fault,) = [one for one in FAULTS if one.name == name]
    return judged(fault)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.slow
def test_a_fault_is_named_first(name: str) -> None:
    found = row(name)
    assert found.verdict == "named", found


@pytest.mark.parametrize("name", FINE)
def test_a_healthy_model_is_left_in_peace(name: str) -> None:
    (one,) = [each for each in HEALTHY if each.name == name]
    assert judged_healthy(one).verdict == "nothing"


@pytest.mark.slow
def test_the_whole_table() -> None:
    rows = [judged(fault) for fault in FAULTS]
    assert len(rows) >= 90
    assert sum(one.verdict == "named" for one in rows) >= 0.9 * len(rows)
    assert not [one for one in rows if one.verdict == "wrong"]
    good = [judged_healthy(one) for one in HEALTHY]
    assert len(good) >= 30
    assert not [one for one in good if one.verdict == "false alarm"]
