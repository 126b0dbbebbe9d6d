"""Averages of routing over random logits: sums by hand, simulation, and the PyTorch router's own Jacobian."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from signalprop.sublayers.experts.module import choose
from signalprop.sublayers.experts.roles import Settings
from signalprop.theory.routing import Router, chosen, load_variation, weights

ROUTERS = [
    Router(8, 2),
    Router(32, 4, "softmax", False),
    Router(32, 4, "sigmoid", True, 8, 3),
    Router(12, 3, "sigmoid", False),
    Router(12, 3, "sqrtsoftplus"),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_by_simulation(router: Router) -> None:
    rng, v = np.random.default_rng(3), 0.6
    z = rng.standard_normal((2, 40_000, router.n_experts)) * v**0.5
    for r in (0.0, 0.8):
        x, y = z[0], r * z[0] + (1 - r**2) ** 0.5 * z[1]
        w, w1 = chosen(router, x)[0], chosen(router, y)[0]
        found = weights(router, v, r)
        assert found.product == pytest.approx((w * w1).sum(-1).mean(), rel=0.03)
        assert found.shared == pytest.approx(((w > 0) & (w1 > 0)).sum(-1).mean(), rel=0.03)
    one = weights(router, v, 1.0)
    assert one.product == pytest.approx(np.square(w).sum(-1).mean(), rel=0.015)
    assert one.shared == pytest.approx(router.top_k, rel=1e-3)


def test_independent_tokens_share_experts_by_chance() -> None:
    found = weights(Router(10, 3), 0.5, 0.0)
    assert found.shared == pytest.approx(3 * 3 / 10, rel=0.02)
    assert found.product == pytest.approx(1 / 10, rel=0.02)
    assert weights(Router(10, 3), 0.0, 1.0).product == pytest.approx(1 / 3, rel=0.01)  # equal weights
    many = weights(Router(10, 3), np.full((2, 3), 0.5), np.array([0.0, 0.5, 1.0]))
    assert np.asarray(many.product).shape == (2, 3)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_module_routes_alike_and_has_that_jacobian(router: Router) -> None:
    s = Settings(
        n_experts=router.n_experts, top_k=router.top_k, scores=router.scores, normalised=router.normalised,
        n_groups=router.n_groups, top_groups=router.top_groups,
    )  # fmt: skip
    logits = torch.randn(2, router.n_experts, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def all_weights(one: torch.Tensor) -> torch.Tensor:
        weight, index = choose(one, s)
        return torch.zeros_like(one).scatter(-1, index, weight)

    w, a, b = chosen(router, logits.numpy())
    np.testing.assert_allclose(all_weights(logits).numpy(), w, rtol=1e-12)
    x, y = (torch.autograd.functional.jacobian(all_weights, one).numpy() for one in logits)
    by_formula = (a[0] * a[1] * (1 - b[0] - b[1] + b[0] @ b[1])).sum()
    assert (x * y).sum() == pytest.approx(by_formula, rel=1e-10, abs=1e-16)


def test_remembered_averages_are_those_of_the_first_call_and_cannot_be_changed() -> None:
    """A caller that wrote to them would change what the way back is given."""
    correlations = np.linspace(0.1, 0.9, 5)
    first = weights(Router(8, 2), 0.5, correlations)
    assert weights(Router(8, 2), 0.5, correlations.copy()) is first
    assert weights(Router(8, 2), 0.6, correlations) is not first
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(first.product)[0] = 0.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_beyond_a_correlation_of_1_counts_as_1(sign: float) -> None:
    router = Router(8, 2, "softmax", True)
    one, beyond = (weights(router, 1.0, sign * r) for r in (1.0, 1 + 1e-9))
    np.testing.assert_allclose(np.array(beyond), np.array(one))


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_loads_of_independent_tokens_and_of_equal_ones(tokens: int) -> None:
    """A token is one of n / k shares: loads vary as binomial ones, or as those of one token."""
    router = Router(8, 2)
    assert load_variation(router, 2 * 2 / 8, tokens) == pytest.approx((3 / tokens) ** 0.5)
    assert load_variation(router, 2.0, tokens) == pytest.approx(3**0.5)
