"""What the benchmarks of measurement stand on: models that compute the same, monitors that find the same, memory."""

from __future__ import annotations

import pytest
import torch
from benchmarks import monitors, probe_overhead


@pytest.fixture
def steps() -> monitors.Steps:
    return monitors.Steps(2, 16, 2, 3, 8)


def test_hooks_by_hand_see_what_the_probe_sees(steps: monitors.Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_overhead.check_same_numbers(steps)
    monkeypatch.setattr(monitors, "sums", lambda x: (1.01 * (x * x).sum(), x.sum(1)))
    with pytest.raises(ValueError, match="do not find the same numbers"):
        probe_overhead.check_same_numbers(steps)


def test_moments_by_hand() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)) + 0.5
    mean, variance, correlation = monitors.moments(x).tolist()
    other = torch.stack([x.roll(k, 1) for k in range(1, 5)])  # all pairs of different tokens
    assert mean == pytest.approx(float(x.mean()), rel=1e-5)
    assert variance == pytest.approx(float(x.var(correction=0)), rel=1e-5)
    expected = float((x * other).mean() - x.mean() ** 2) / variance
    assert correlation == pytest.approx(expected, abs=1e-5)


def test_watched_steps_train_the_same_weights(steps: monitors.Steps) -> None:
    """Every variant of a step does the whole step; no hook stays."""
    plain = monitors.Steps(2, 16, 2, 3, 8)
    for step in (steps.bare, lambda: steps.probed(0), lambda: steps.probed(1), steps.by_hand, steps.read_once):
        step()
        plain.bare()
    for own, other in zip(steps.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, other)
    assert steps.probed(0) is not None
    assert steps.probed(1) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in steps.model.modules())
