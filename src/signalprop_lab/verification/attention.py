"""What `signalprop verify` simulates of attention: single heads, forward, and backward by autograd."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.network.moments import Moments
from signalprop.theory import attention, attention_scores
from signalprop_lab.verification.components import (
    ALL,
    LAYOUT,
    Case,
    Component,
    Sample,
    log_uniform,
    raw_moments,
    tokens,
    variance_of_mean,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

_BLOCK = 1 << 21  # scores held in memory at a time


def _draw_attention(rng: np.random.Generator, *, lengths: list[int], cross: bool = False) -> Case:
    width = int(rng.choice([100, 300, 1000]))
    case = {
        "length": int(rng.choice(lengths)),
        "width": width,
        "head": int(rng.choice([d for d in (32, 64, 128, 256) if d <= width])),
        "p": float(rng.choice([0.0, 0.1, 0.3, 0.5, 0.8])),
        "s0": log_uniform(rng, 0.01, 1.0),
        "r": float(rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])),
        "g_r": float(rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])),
    }
    if cross:
        case["queries"] = int(rng.choice(lengths))
        case["q_r"] = float(rng.choice([0.0, 0.1, 0.3, 0.5, 0.9]))
    return case


def _rotate(x: Tensor, base: float = 1e4) -> Tensor:
    import torch

    half = x.shape[1] // 2
    angle = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, p: float, causal: bool, generator: Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and the gradients of q, k, v, by autograd over blocks of queries."""
    import torch

    out, grad_q = torch.empty(len(q), v.shape[1]), torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, _BLOCK // len(k))
    for start in range(0, len(q), step):
        stop = min(start + step, len(q))
        seen = stop if causal else len(k)
        part = [t.detach().requires_grad_() for t in (q[start:stop], k[:seen], v[:seen])]
        scores = part[0] @ part[1].T / math.sqrt(q.shape[1])
        if causal:
            later = torch.arange(seen) > torch.arange(start, stop)[:, None]
            scores = scores.masked_fill(later, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        if p:
            weights = weights * (torch.rand(weights.shape, generator=generator) >= p) / (1 - p)
        y = weights @ part[2]
        gradient = torch.autograd.grad(y, part, g[start:stop])
        out[start:stop], grad_q[start:stop] = y.detach(), gradient[0]
        grad_k[:seen] += gradient[1]
        grad_v[:seen] += gradient[2]
    return out, grad_q, grad_k, grad_v


def _sample_attention(case: Case, generator: Generator, *, causal: bool = False, rotary: bool = False) -> Sample:
    """One head on inputs of second moment 1, in the units of `theory.attention`; cross-attention if `queries` is set.

    Softmax weights are computed for all pairs of tokens; gradients come from autograd.
    """
    import torch

    d, head, s0 = case["width"], case["head"], case["s0"]
    y, y_common = tokens(case, case["length"], d, generator, rescale=True)
    x, x_common = y, y_common
    if "queries" in case:
        x, x_common = tokens(case, case["queries"], d, generator, "q_", rescale=True)
    g, _ = tokens(case, len(x), head, generator, "g_", rescale=True)
    wq, wk = (torch.randn(d, head, generator=generator) * (s0**0.25 / math.sqrt(d)) for _ in range(2))
    wv = torch.randn(d, head, generator=generator) / math.sqrt(d)
    asks, v = ((x @ wq).requires_grad_(), (y @ wk).requires_grad_()), y @ wv
    q, k = (_rotate(t) if rotary else t for t in asks)
    out, grad_q, grad_k, grad_v = _attend(q, k, v, g, case["p"], causal, generator)
    grad_q, grad_k = torch.autograd.grad((q, k), asks, (grad_q, grad_k))
    unit = math.sqrt(d / head)  # gradients are in units of d_v σ_v² = head/d
    at_query, at_key = grad_q @ wq.T * unit, (grad_k @ wk.T + grad_v @ wv.T) * unit
    # energy of the mean token and of the mean gradient after W_V, less their expectations
    value_energy = float((y.mean(0) @ wv).square().sum()) / head - variance_of_mean(case["r"], len(y))
    gradient_energy = float((wv @ g.mean(0)).square().sum()) / head - variance_of_mean(case["g_r"], len(x))
    # what is linear in the query: its gradient is (1 - r) times this (without rotations)
    linear = np.array(raw_moments(g @ wv.T @ wk @ wq.T * unit / math.sqrt(head)))
    linear -= s0 / d * np.array([1.0, case["g_r"]])
    shared_scores = float((wk @ (x_common @ wq)).square().sum()) / (head * s0) - 1.0
    controls = [
        float((y_common @ wv).mean()),
        value_energy,
        gradient_energy,
        float(wv.square().sum()) / head - 1.0,
        *linear.tolist(),
        shared_scores,
        float(y.square().mean()) - 1.0,
        float(g.square().mean()) - 1.0,
    ]
    # Where too few samples are affordable to fit slopes, the dominant ones are known to leading order: the part of the
    # output that all values share, and of the gradient that all queries share, of which keys get e^c (1 + c), and the
    # part that is linear in the query.
    raw = np.array(raw_moments(out, mean=True))
    raw -= np.array([math.sqrt(case["r"]) * controls[0], value_energy, value_energy])
    linear *= (1.0 - case["r"]) ** 2
    if "queries" not in case:
        c = case["r"] * (1.0 - case["r"]) * s0
        growth = c * (2.0 + c) * math.exp(c)
        gradient = np.array(raw_moments(at_query + at_key)) - gradient_energy * np.array([1.0 + growth, 1.0]) - linear
        gradient[0] -= growth * case["g_r"] * shared_scores
        return Sample([*raw.tolist(), *gradient.tolist()], controls)
    return Sample([*raw.tolist(), *(np.array(raw_moments(at_query)) - linear).tolist(), *raw_moments(at_key)], controls)


def _pair(variance: Any, covariance: Any) -> Moments:
    return Moments(0.0, float(variance), float(covariance / variance))


def _predict_attention(case: Case, *, causal: bool = False, rotary: bool = False) -> list[Moments]:
    length, head = case["length"], case["head"]
    options: dict[str, Any] = {"causal": causal}
    if rotary:
        options["omega"] = attention_scores.rotary_coherence(length, head, causal="pairs" if causal else None)
        options["omega_rows"] = attention_scores.rotary_coherence(length, head, causal="rows" if causal else None)
    sizes = attention.Sizes(length, length, case["width"], case["p"], **options)
    x = sizes.on_itself(case["r"], case["s0"], r_g=case["g_r"])
    return [_pair(*attention.forward(x)), _pair(*attention.backward(x))]


def _predict_cross(case: Case) -> list[Moments]:
    sizes = attention.Sizes(case["queries"], case["length"], case["width"], case["p"])
    x = sizes.across(case["q_r"], case["r"], case["s0"], r_g=case["g_r"])
    return [_pair(*moments) for moments in (attention.forward(x), *attention.backward_apart(x))]


_SHA_LENGTHS = 9 * [300] + 7 * [1000] + 3 * [3000] + [10_000]


def _attention(*, causal: bool = False, rotary: bool = False) -> Component:
    lengths = [300, 1000] if causal or rotary else _SHA_LENGTHS
    return Component(
        ALL,
        partial(_draw_attention, lengths=lengths),
        partial(_sample_attention, causal=causal, rotary=rotary),
        partial(_predict_attention, causal=causal, rotary=rotary),
        exact=1.0,  # scores of a variance up to 1: docs/theory/attention.md
    )


ATTENTION: dict[str, Component] = {
    "attention": _attention(),
    "causal attention": _attention(causal=True),
    "rotary attention": _attention(rotary=True),
    "causal rotary attention": _attention(causal=True, rotary=True),
    "cross attention": Component(
        LAYOUT,
        partial(_draw_attention, lengths=[100, 300, 1000], cross=True),
        _sample_attention,
        _predict_cross,
        exact=1.0,
    ),
}
