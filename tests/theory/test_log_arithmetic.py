"""Arithmetic on logarithms: plain floats, which take a path of their own, against arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from signalprop.theory.log_arithmetic import correlation, safe_exp, within


@given(x=st.floats(), total=st.floats(min_value=0.0, allow_infinity=False))
@example(x=float("nan"), total=1.0)
@example(x=-2.0, total=1.0)
@example(x=0.0, total=0.0)
def test_numbers_and_arrays_give_the_same(x: float, total: float) -> None:
    """Also beyond every bound, and for what is not a number, which stays so."""
    with np.errstate(all="ignore"):
        pairs = [
            (within(x, 3.0), within(np.array([x]), 3.0)),
            (safe_exp(x), safe_exp(np.array([x]))),
            (correlation(x, total), correlation(np.array([x]), np.array([total]))),
        ]
    for number, array in pairs:
        assert isinstance(number, float)
        assert number == pytest.approx(float(np.asarray(array)[0]), rel=1e-12, nan_ok=True)
