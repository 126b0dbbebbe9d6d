"""The verification engine: what it reports, that it repeats, and that it can fail."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from signalprop.kernels.causal_attention import TokenAttention
from signalprop.network.kinds import KINDS, kind_named
from signalprop.network.moments import Moments
from signalprop.sublayers.attention.signal import SelfAttention
from signalprop.sublayers.cross_attention.signal import CrossAttention
from signalprop.sublayers.feed_forward.signal import FeedForward
from signalprop.theory import attention, duals_of_nodes, embedding, softmax
from signalprop.theory import branch_inputs as reading
from signalprop.theory import loss_gradient as head
from signalprop.theory import scalar_recursion as passes
from signalprop.theory import signals as elements
from signalprop.theory.signals import Sent, Signal
from signalprop.theory.softmax import SoftmaxMoments
from signalprop_lab.verification.verify import (
    COMPONENTS,
    EFFORTS,
    Simulated,
    judged,
    simulated,
    verify,
)


@pytest.mark.parametrize(
    "name", ["relu", pytest.param("softmax", marks=pytest.mark.slow), pytest.param("attention", marks=pytest.mark.slow)]
)
def test_quick_run_is_no_worse_than_the_papers_table(name: str) -> None:
    report = verify([name], effort="quick", seed=1)
    assert {row.quantity for row in report.rows} == set(COMPONENTS[name].quantities)
    for row in report.rows:
        assert row.configurations == (
            EFFORTS["quick"].attention_configurations if name == "attention" else EFFORTS["quick"].configurations
        )
        assert row.percentiles[0] <= row.percentiles[1] <= row.percentiles[2]
        # the table is rounded to 0.1, and a perfect formula shows the simulation's own noise
        assert row.percentiles[1] <= row.paper[1] + 0.05 + 3 * row.standard_error, row
    json.dumps(report.as_json())


SLOW = (
    "sublayer",
    "step",
    "token kernels",
    "mixed with values",
    "over frames",
    "at the top",
    "attention",
    "rms norm",
    "layer norm",
    "linear",
    "feed-forward",
)  # heads: tests/theory/test_attention.py


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith(SLOW) else ())
        for name in COMPONENTS
        if name not in ("softmax", "relu")
    ],
)
def test_every_component_agrees_with_its_formula(name: str) -> None:
    """A few configurations each: the 50th percentile within 1 % plus the noise."""
    effort = EFFORTS["quick"]._replace(configurations=4, attention_configurations=4, longest=300)
    EFFORTS["smoke"] = effort
    try:
        report = verify([name], effort="smoke", seed=2)
    finally:
        del EFFORTS["smoke"]
    for row in report.rows:
        assert row.percentiles[0] < 1.0 + 2 * row.standard_error, row


# --- every component that `predict` uses turns its row red -----------------------------------------------------------


def larger(found: Any) -> Any:
    """1.01 times what a component answers: the variance (or mean square) of its result."""
    if isinstance(found, Sent):
        return Sent(*(None if g is None else larger(g) for g in found))
    if isinstance(found, Moments):
        return replace(found, variance=1.01 * found.variance)
    if isinstance(found, SoftmaxMoments):
        return SoftmaxMoments(*(1.01 * part for part in found))
    values = [tuple(1.01 * part for part in x) if isinstance(x, tuple) else 1.01 * x for x in found[:2]]
    return Signal(*values) if isinstance(found, Signal) else (*values, *found[2:])


def larger_log(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """1.01 times a variance that is told as its logarithm."""
    return (found[0] + math.log(1.01), *found[1:])


def larger_second(found: tuple[float, float, float]) -> tuple[float, ...]:
    """1.01 times a variance and a covariance that come after a mean."""
    return (found[0], 1.01 * found[1], 1.01 * found[2])


def scaled(found: Any) -> Any:
    """1.01 times what a component answers, all of it."""
    return 1.01 * found


QUICK = {"softmax: softmax_moments"}
# all of them: `make test-slow`
MUTATIONS: list[tuple[Any, str, Callable[[Any], Any], str]] = [
    (elements, "linear", larger, "linear"),
    (elements, "dropped", larger, "dropout"),
    (elements, "activated", larger, "relu"),
    (elements, "activated_back", larger, "gelu"),
    (elements, "normed", larger_log, "layer norm"),
    (reading, "read_normed", larger, "rms norm"),
    (embedding, "embed", larger, "embedding"),
    (embedding, "activated", larger, "relu"),
    (softmax, "softmax_moments", larger, "softmax"),
    (attention, "forward", larger, "attention sublayer"),
    (attention, "backward", larger, "attention sublayer"),
    (attention, "forward", larger, "cross-attention sublayer"),
    (attention, "backward_apart", larger, "cross-attention sublayer"),
    (SelfAttention, "forward", larger, "attention sublayer"),
    (SelfAttention, "backward", larger, "attention sublayer"),
    (CrossAttention, "forward", larger, "cross-attention sublayer"),
    (CrossAttention, "backward", larger, "cross-attention sublayer"),
    (FeedForward, "forward", larger, "feed-forward sublayer"),
    (FeedForward, "backward", larger, "feed-forward sublayer"),
    (passes.Ahead, "plus", larger_log, "pre-norm step"),
    (passes.Ahead, "norm_sum", larger_log, "post-norm step"),
    (passes.Back, "whole", larger_log, "pre-norm step"),
    (attention, "mixture", larger, "attention mixed with values"),
    (embedding, "front_end", larger_second, "convolutions over frames"),
    (head.TopGradient, "variance", scaled, "gradient at the top"),
    (head.TopGradient, "covariance", scaled, "gradient at the top"),
    (TokenAttention, "forward", scaled, "attention step, token kernels"),
    (TokenAttention, "backward", scaled, "attention step, token kernels"),
    (SelfAttention, "forward", larger, "attention step, token kernels"),
    (SelfAttention, "backward", larger, "attention step, token kernels"),
    (duals_of_nodes, "entry_by_entry", scaled, "feed-forward step, token kernels"),
    (FeedForward, "forward", larger, "feed-forward step, token kernels"),
    (FeedForward, "backward", larger, "feed-forward step, token kernels"),
]


@cache
def sampled(name: str) -> list[Simulated]:
    """Simulated once for all mutations of one component: what is sampled does not ask the formulas."""
    return simulated(name, EFFORTS["quick"]._replace(longest=300), 1)


def is_red(name: str) -> bool:
    return any(row.standing == "wrong" for row in judged(name, sampled(name)))


@pytest.mark.parametrize(
    ("owner", "name", "change", "row"),
    [
        pytest.param(*mutation, id=label, marks=() if label in QUICK else pytest.mark.slow)
        for mutation in MUTATIONS
        for label in [f"{mutation[3]}: {mutation[1]}"]
    ],
)
def test_one_percent_in_what_predict_runs_is_red(
    owner: Any, name: str, change: Callable[[Any], Any], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_red(row)
    right = getattr(owner, name)
    changed = lambda *given, **named: change(right(*given, **named))  # noqa: E731
    for module in [owner, *(m for m in list(sys.modules.values()) if getattr(m, name, None) is right)]:
        monkeypatch.setattr(module, name, changed)  # wherever it was imported by name
    assert is_red(row)


def test_every_closed_kind_has_a_row() -> None:
    assert {f"{kind_named(name).words} sublayer" for name in KINDS if kind_named(name).closed} <= COMPONENTS.keys()
