"""What `signalprop verify` simulates: for each component, configurations, one random draw, and the formula's answer.

The answers are those of the functions that `predict` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, segment_correlation, zipf_token_correlation
from signalprop.network.moments import Array, Moments
from signalprop.network.parametrization import Embedding
from signalprop.theory import branch_inputs as reading
from signalprop.theory import embedding
from signalprop.theory import signals as elements
from signalprop.theory.log_arithmetic import exp, log
from signalprop_lab.verification.softmax import softmax, softmax_backward

if TYPE_CHECKING:
    from torch import Generator, Tensor

Case = dict[str, Any]
FORWARD = ("mean", "variance", "covariance")
GRADIENT = ("gradient variance", "gradient covariance")
SECOND_GRADIENT = ("key/value gradient variance", "key/value gradient covariance")
ALL = FORWARD + GRADIENT
LAYOUT = ALL + SECOND_GRADIENT


class Sample(NamedTuple):
    """One draw of weights and inputs.

    Attributes:
        raw: mean, mean square and mean product over token pairs of the output, then mean square and mean product of
            each gradient.
        controls: quantities whose expectation is exactly 0 and that vary with `raw`.
    """

    raw: list[float]
    controls: list[float]


class Component(NamedTuple):
    """One row of the report: `quantities` of LAYOUT are reported, `sample` and `predict` cover output and gradients.

    `exact` in % is what the formula may be off on average over configurations, beyond the simulation's noise.
    """

    quantities: tuple[str, ...]
    draw: Callable[[np.random.Generator], Case]
    sample: Callable[[Case, Generator], Sample]
    predict: Callable[[Case], list[Moments]]
    exact: float = 0.3


def raw_moments(x: Tensor, *, mean: bool = False) -> list[float]:
    """(Mean,) mean square and mean product over pairs of rows (tokens) of a matrix (tokens, features)."""
    n, d = x.shape
    square, total = float(x.double().square().sum()), x.double().sum(0)
    product = (float(total.square().sum()) - square) / (n * (n - 1) * d)
    moments = [square / (n * d), product]
    return [float(total.sum()) / (n * d), *moments] if mean else moments


def tokens(
    case: Case, length: int, width: int, generator: Generator, prefix: str = "", *, rescale: bool = False
) -> tuple[Tensor, Tensor]:
    """Inputs of the standing form, and their common vector ε.

    With `rescale`, ε has exactly its expected length: without effect on the expectation of what is quadratic in it.
    """
    import torch

    r = case[prefix + "r"]
    common = torch.randn(width, generator=generator)
    if rescale:
        common *= math.sqrt(width) / common.norm()
    own = torch.randn(length, width, generator=generator)
    std = math.sqrt(case.get(prefix + "variance", 1.0))
    return case.get(prefix + "mean", 0.0) + std * (math.sqrt(r) * common + math.sqrt(1 - r) * own), common


def variance_of_mean(r: float, n: int) -> float:
    """Variance of the mean of n tokens of variance 1 and correlation r."""
    return r + (1.0 - r) / n


def _input_controls(case: Case, x: Tensor, prefix: str = "") -> list[float]:
    """The raw moments of the input less their expectations."""
    mean, variance = case.get(prefix + "mean", 0.0), case.get(prefix + "variance", 1.0)
    known = [mean, mean**2 + variance, mean**2 + case[prefix + "r"] * variance]
    return [found - expected for found, expected in zip(raw_moments(x, mean=True), known, strict=True)]


def _moments(case: Case, prefix: str = "") -> Moments:
    return Moments(case.get(prefix + "mean", 0.0), case.get(prefix + "variance", 1.0), case[prefix + "r"])


# --- components ----------------------------------------------------------------------------------------------------


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def _correlation(rng: np.random.Generator) -> float:
    return float(rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99]))


def _base(rng: np.random.Generator, *, mean: bool) -> Case:
    return {
        "length": int(rng.choice([100, 300, 1000])),
        "mean": float(rng.uniform(-10, 10)) if mean else 0.0,
        "variance": log_uniform(rng, 0.1, 10),
        "r": _correlation(rng),
        "g_variance": log_uniform(rng, 0.1, 10),
        "g_r": _correlation(rng),
    }


def _features(case: Case) -> Case:
    """Element-wise functions see features only as samples: about the same number of entries for every length."""
    return case | {"width": min(1000, 200_000 // case["length"])}


def _draw_norm(rng: np.random.Generator) -> Case:
    return _base(rng, mean=True) | {"width": int(rng.choice([1000, 2000]))}  # `predict` takes norms at infinite width


def _draw_linear(rng: np.random.Generator) -> Case:
    fan_in, fan_out = (int(rng.choice([10, 30, 100, 300, 1000])) for _ in range(2))
    shape = {"fan_in": fan_in, "fan_out": fan_out, "length": int(rng.choice([100, 300]))}
    return _base(rng, mean=True) | shape | {"weight_variance": log_uniform(rng, 0.01, 100) / fan_in}


def _draw_softmax(rng: np.random.Generator) -> Case:
    return {
        "length": int(rng.choice([300, 1000, 3000, 10_000])),
        "variance": log_uniform(rng, 1e-4, 1.0),
        "g_variance": log_uniform(rng, 0.1, 10),
        "g_r": float(rng.choice([0.0, 0.0, 0.5, 0.9])),
    }


def _through(case: Case, generator: Generator, function: Callable[[Tensor], Tensor]) -> Sample:
    """Forward, and backward by autograd, through a function of one (tokens, features) tensor."""
    x, e = tokens(case, case["length"], case["width"], generator)
    g, _ = tokens(case, case["length"], case["width"], generator, "g_")
    x.requires_grad_()
    y = function(x)
    y.backward(g)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    raw = [*raw_moments(y.detach(), mean=True), *raw_moments(x.grad)]
    # Hermite polynomials of the common vector, alone and times the mean gradient's square
    square, energy = e.square(), g.mean(0).square()
    hermite = [e, square - 1.0, e * (square - 3.0), square * (square - 6.0) + 3.0]
    shared = [float(part.mean()) for h in hermite for part in (h, energy * h)]
    shared.append(float(energy.mean()) - case["g_variance"] * variance_of_mean(case["g_r"], len(g)))
    return Sample(raw, _input_controls(case, x.detach()) + _input_controls(case, g, "g_") + shared)


def _sample_linear(case: Case, generator: Generator) -> Sample:
    """Several weight matrices on one input: narrow layers scatter much."""
    import torch

    n_in, n_out, variance = case["fan_in"], case["fan_out"], case["weight_variance"]
    repeats = max(1, min(2000 // min(n_in, n_out), 1_200_000 // (case["length"] * max(n_in, n_out))))
    weight = torch.randn(repeats, n_in, n_out, generator=generator) * math.sqrt(variance)
    x, _ = tokens(case, case["length"], n_in, generator, rescale=True)
    g, _ = tokens(case, case["length"], n_out, generator, "g_", rescale=True)
    x = x.expand(repeats, -1, -1).clone().requires_grad_()
    y = x @ weight
    y.backward(g.expand(repeats, -1, -1))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    pairs = zip(y.detach(), x.grad, strict=True)
    raw = np.mean([[*raw_moments(one, mean=True), *raw_moments(back)] for one, back in pairs], axis=0)
    controls = _input_controls(case, x.detach()[0]) + _input_controls(case, g, "g_")
    return Sample(raw.tolist(), [*controls, float(weight.square().mean()) / variance - 1.0])


def _sample_softmax(case: Case, generator: Generator) -> Sample:
    import torch

    rows, length = 64, case["length"]
    x = math.sqrt(case["variance"]) * torch.randn(rows, length, generator=generator)
    common = torch.randn(rows, 1, generator=generator)
    common *= math.sqrt(rows) / common.norm()
    own = torch.randn(rows, length, generator=generator)
    g = math.sqrt(case["g_variance"]) * (math.sqrt(case["g_r"]) * common + math.sqrt(1 - case["g_r"]) * own)
    x.requires_grad_()
    y = torch.softmax(x, dim=-1)
    y.backward(g)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    # the variance is what fluctuates about the exact mean 1/L: subtracting that first keeps its digits
    y = (y.detach().double() - 1.0 / length) * length
    square = float(x.detach().square().mean()) / case["variance"] - 1.0
    forward = [float(y.mean()), float(y.square().mean())]
    return Sample([*forward, 0.0, float(x.grad.double().square().mean()), 0.0], [square])


def _predict_softmax(case: Case) -> list[Moments]:
    length = case["length"]
    x, g = Moments(variance=case["variance"]), Moments(variance=case["g_variance"], feature_correlation=case["g_r"])
    y = softmax(x, length)
    # in units of 1/length, about its mean, as simulated
    return [Moments(0.0, y.variance * length**2), softmax_backward(g, x, length)]


# --- embeddings ----------------------------------------------------------------------------------------------------


def _draw_embedding(rng: np.random.Generator) -> Case:
    return {
        "length": int(rng.choice([100, 300, 1000])),
        "vocabulary": int(rng.choice([1000, 8000, 32_000, 128_000])),
        "tables": int(rng.choice([1, 2, 3])),  # tokens; and positions; and segments
        "p": float(rng.choice([0.0, 0.1, 0.3])),
    }


def _sample_embedding(case: Case, generator: Generator) -> Sample:
    import torch

    length, width = case["length"], 32
    draws = torch.rand(8, length, generator=generator, dtype=torch.float64)
    cumulative = torch.cumsum(1.0 / torch.arange(1, case["vocabulary"] + 1, dtype=torch.float64), 0)
    found = []
    for row in draws:
        ids = torch.searchsorted(cumulative, row * cumulative[-1])
        unique, place = torch.unique(ids, return_inverse=True)
        x = torch.randn(len(unique), width, generator=generator)[place]
        if case["tables"] >= 2:
            x = x + torch.randn(length, width, generator=generator)
        if case["tables"] == 3:
            boundary = int(torch.randint(length + 1, (1,), generator=generator))
            segment = (torch.arange(length) >= boundary).long()
            x = x + torch.randn(2, width, generator=generator)[segment]
        keep = torch.rand(x.shape, generator=generator) >= case["p"]
        found.append(raw_moments(x * keep / (1 - case["p"]), mean=True))
    return Sample(np.mean(found, axis=0).tolist(), [])


def _predict_embedding(case: Case) -> list[Moments]:
    tables, position, segment = case["tables"], float(case["tables"] >= 2), float(case["tables"] == 3)
    fields: dict[str, Any] = {
        "n_layers": 1, "d_model": 32, "vocab_size": case["vocabulary"], "seq_len": case["length"],
        "n_segments": 2 * (tables == 3), "positions": "learned" if tables >= 2 else "none",
        "embedding_dropout": case["p"],
    }  # fmt: skip
    a = Architecture(**fields)
    inputs = InputStatistics(
        token_correlation=zipf_token_correlation(case["vocabulary"]), segment_correlation=segment_correlation()
    )
    return [embedding.embed(a, Embedding(token=1.0, position=position, segment=segment), inputs)]


# --- the table -----------------------------------------------------------------------------------------------------


def _elementwise(name: str) -> Component:
    def function(x: Tensor) -> Tensor:
        import torch

        found: Tensor = getattr(torch.nn.functional, name)(x)
        return found

    def predict(case: Case) -> list[Moments]:
        x, g = _raw(_moments(case)), _raw(_moments(case, "g_"))
        mean, *_ = embedding.activated(name, case["variance"], case["r"])
        return [_centred(mean, elements.activated(x, name)), _centred(0.0, elements.activated_back(g, x, name))]

    return Component(
        ALL,
        lambda rng: _features(_base(rng, mean=False)),
        lambda case, generator: _through(case, generator, function),
        predict,
    )


def _sample_rms_norm(case: Case, generator: Generator) -> Sample:
    """Raw second moments, which is what branches and `predict` take of it: a mean of the output is part of them."""
    sample = _through(case, generator, lambda x: x / x.square().mean(-1, keepdim=True).sqrt())
    return sample._replace(raw=[0.0, *sample.raw[1:]])


def _raw(x: Moments) -> elements.Pair:
    """Mean square and mean product of two tokens."""
    return x.second_moment, x.covariance + x.mean**2


def _centred(mean: Array, raw: elements.Pair) -> Moments:
    variance = raw[0] - mean**2
    return Moments(mean, variance, (raw[1] - mean**2) / variance)


def _predict_linear(case: Case) -> list[Moments]:
    x, g, weight = _raw(_moments(case)), _raw(_moments(case, "g_")), case["weight_variance"]
    forward, backward = (
        elements.linear(*pair) for pair in ((x, case["fan_in"] * weight), (g, case["fan_out"] * weight))
    )
    return [_centred(0.0, forward), _centred(0.0, backward)]


def _predict_norm(case: Case, *, norm: Literal["layernorm", "rmsnorm"]) -> list[Moments]:
    fields: dict[str, Any] = {"n_layers": 1, "d_model": case["width"], "n_heads": 1, "norm": norm, "norm_eps": 0.0}
    a = Architecture(**fields)
    read, r, divisor = reading.read_normed(
        a, 1.0, log(float(a.norm_eps)), log(case["variance"]), case["r"], case["mean"]
    )
    return [Moments(0.0, read, r), Moments(0.0, case["g_variance"] * exp(-divisor), case["g_r"])]


def _dropout() -> Component:
    def sample(case: Case, generator: Generator) -> Sample:
        import torch

        p = case["p"]
        return _through(case, generator, lambda x: x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p))

    def predict(case: Case) -> list[Moments]:
        x, g, p = _raw(_moments(case)), _raw(_moments(case, "g_")), case["p"]
        return [_centred(case["mean"], elements.dropped(x, p)), _centred(0.0, elements.dropped(g, p))]

    return Component(
        ALL, lambda rng: _features(_base(rng, mean=True)) | {"p": float(rng.uniform(0.0, 0.8))}, sample, predict
    )


def _layer_norm(case: Case, generator: Generator) -> Sample:
    import torch

    return _through(case, generator, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=0.0))


ELEMENTARY: dict[str, Component] = {
    "embedding": Component(FORWARD, _draw_embedding, _sample_embedding, _predict_embedding),
    "linear": Component(ALL, _draw_linear, _sample_linear, _predict_linear),
    "dropout": _dropout(),
    **{name: _elementwise(name) for name in ("relu", "gelu", "silu")},
    "layer norm": Component(ALL, _draw_norm, _layer_norm, partial(_predict_norm, norm="layernorm")),
    "rms norm": Component(
        ALL[1:],
        lambda rng: _draw_norm(rng) | {"mean": float(rng.choice([0.0, 0.0, 0.3, 1.0]))},
        _sample_rms_norm,
        partial(_predict_norm, norm="rmsnorm"),
    ),
    "softmax": Component(("mean", "variance", "gradient variance"), _draw_softmax, _sample_softmax, _predict_softmax),
}
