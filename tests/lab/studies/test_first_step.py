"""The first step of an optimizer: by hand where multipliers alone move, and against real steps."""

from __future__ import annotations

import numpy as np
import pytest

import signalprop as sp
from signalprop.errors import InputError
from signalprop_lab.studies.first_step import FirstStep, step_of
from stepping import LENGTH, SEQUENCES, batch_of, change_by_adam, network


def _step(scheme: str, optimizer: str, **options: float) -> tuple[sp.Parametrization, FirstStep]:
    a = network(3, 64, "pre")
    inputs = batch_of(a, 99, 64).statistics(a)
    table = sp.scheme(scheme, **options)(a, inputs)
    return table, step_of(table, inputs, sp.predict(table, inputs), optimizer, SEQUENCES * LENGTH)


def test_multipliers_of_zero_move_by_the_branches_alone() -> None:
    table, step = _step("rezero", "adam")
    assert step.aligned.max() == 0
    inputs = batch_of(table.architecture, 99, 64).statistics(table.architecture)
    forward = sp.predict(table, inputs).forward
    by_hand = np.sqrt(forward["branch"].variance.sum() / forward["stream_out"].variance[-1])
    assert step.change == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(("scheme", "low", "high"), [("xavier", 1.0, 1.6), ("rezero", 0.85, 1.15)])
def test_a_real_step_of_adam(scheme: str, low: float, high: float) -> None:
    table, step = _step(scheme, "adam")
    found = change_by_adam(table, batch_of(table.architecture, 3), 3)
    assert low < found / step.change < high


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="unknown optimizer 'lamb'"):
        _step("xavier", "lamb")
    with pytest.raises(InputError, match="expected optimizer adam"):
        _step("depth-mup", "sgd")
