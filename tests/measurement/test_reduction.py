"""The two-pass reduction against the NumPy definition, including where single precision would fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from signalprop.network.inputs import tensor_moments
from signalprop.watching.reduction import Padding, collect, exact, moments


def reduced(x: torch.Tensor, padding: Padding | None = None) -> list[float]:
    """Mean, variance and token correlation of one tensor."""
    values: list[float] = collect([moments(x, padding)])[0].tolist()
    return values


def check(x: torch.Tensor, mask: torch.Tensor | None = None, rel: float = 1e-5) -> None:
    padding = None if mask is None else Padding.of(mask)
    expected = tensor_moments(x.double().numpy(), None if mask is None else mask.numpy())
    for got in collect([moments(x, padding), exact(x, padding)]):
        mean, variance, correlation = got
        assert mean == pytest.approx(expected.mean, abs=rel * np.sqrt(expected.second_moment))
        assert variance == pytest.approx(expected.variance, rel=rel)
        assert correlation == pytest.approx(expected.token_correlation, abs=rel)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 17)),
    seed=st.integers(0, 2**31),
    mean=st.sampled_from([0.0, 1.0, -30.0]),
    log_scale=st.integers(-12, 12),
    shared=st.floats(0, 1),
    padded=st.booleans(),
)
def test_moments_of_random_tensors(
    shape: tuple[int, int, int], seed: int, mean: float, log_scale: int, shared: float, padded: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(shape[0], 1, shape[2], generator=generator)
    x = shared**0.5 * common + (1 - shared) ** 0.5 * torch.randn(shape, generator=generator) + mean
    x = x * 10.0**log_scale
    mask = None
    if padded:
        mask = torch.rand(shape[:2], generator=generator) < 0.6
        mask[0, -1] = True
    assume(
        tensor_moments(x.double().numpy(), None if mask is None else mask.numpy()).variance
        > 1e-9 * float((x * x).mean())
    )
    check(x, mask, rel=3e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_the_whole_range_of_float32(scale: float) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(scale).float()
    check(x)


def test_large_tensors_do_not_drift() -> None:
    """A single float32 sum over 4 million squares is off by 5e-5 or more."""
    check(torch.randn(4, 1024, 1024, generator=torch.Generator().manual_seed(0)) + 1, rel=5e-7)


def test_padding_may_hold_anything() -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1]])
    clean = reduced(torch.where(mask[..., None] != 0, x, 0.0), Padding.of(mask))
    dirty = torch.where(mask[..., None] != 0, x, float("nan"))
    assert reduced(dirty, Padding.of(mask)) == clean
    assert torch.isfinite(exact(dirty, Padding.of(mask)).values).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_shows(bad: float) -> None:
    x = torch.zeros(2, 3, 4)
    x[1, 2, 3] = bad
    assert not np.isfinite(reduced(x)[1])


def test_chunks_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0)) + 3
    mask = torch.rand(7, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = exact(x, Padding.of(mask)).values
    monkeypatch.setattr("signalprop.watching.reduction._CHUNK", 60)
    torch.testing.assert_close(exact(x, Padding.of(mask)).values, whole, rtol=1e-12, atol=1e-12)
