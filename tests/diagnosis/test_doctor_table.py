"""The table of planted faults: each is named first, with its place; healthy models are left in peace."""

from __future__ import annotations

import pytest
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.healthy import HEALTHY
from benchmarks.doctor.table import judged, judged_healthy

FINE = ("fresh qwen3", "fresh gemma2", "a decoder in plain PyTorch")


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
