"""The early edge: where it is found, what is counted as near, and what halves the correlation that is left."""

from __future__ import annotations

import pytest
import torch
from benchmarks.early_edge import crossing, section, share, unlike


@pytest.mark.parametrize("start", [1e-3, 0.7, 100.0])
def test_the_smallest_rate_is_found_from_both_sides(start: float) -> None:
    assert crossing(lambda rate: rate > 0.5, start, 1.01) == pytest.approx(0.5, rel=0.01)
    assert crossing(lambda rate: False, start) is None
    assert crossing(lambda rate: True, start) is None


def test_unlike_tokens() -> None:
    x = torch.randn(3, 5, 4000, generator=torch.Generator().manual_seed(0))
    assert unlike(x) == pytest.approx(1, abs=0.02)
    assert unlike(x + x[:, :1] * 0 + 1) == pytest.approx(0.5, abs=0.02)  # as much in common as apart
    assert unlike(x[:, :1].expand(-1, 5, -1)) == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_predicted_is_outside() -> None:
    cells = [{"edges": {"linear": edge}, "measured": 1.0} for edge in (1.4, 1.6, None)]
    assert share(cells, "linear", 1.5) == pytest.approx(1 / 3)


def test_the_claim_fails_on_the_stored_rows() -> None:
    assert "It **fails**" in section()
