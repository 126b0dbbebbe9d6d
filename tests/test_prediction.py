"""What `predict` says beside its numbers."""

from __future__ import annotations

import pytest

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme

SMALL = Architecture.preset("tgs", n_layers=2, d_model=64, n_heads=4)


def warned(p: Parametrization) -> bool:
    return any("nearly one-hot" in note for note in predict(p).notes)


@pytest.mark.parametrize(("name", "options"), [("noci", {}), ("xavier", {"qk_gain": 2.0})])
def test_large_scores_are_pointed_at(name: str, options: dict[str, float]) -> None:
    assert warned(scheme(name, **options)(SMALL))


@pytest.mark.parametrize("name", ["xavier", "deepscalelm", "fixed", "t-fixup"])
def test_ordinary_scores_are_not(name: str) -> None:
    assert not warned(scheme(name)(SMALL))


def test_a_sweep_has_no_such_note() -> None:
    table = scheme("noci")(SMALL)
    assert not warned(Parametrization.sweep([table, table]))


def test_scores_that_nothing_reads_do_not_count() -> None:
    assert not warned(scheme("noci")(SMALL).with_columns(attention_gain=0.0, value_skip=1.0))
