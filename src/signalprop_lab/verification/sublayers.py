"""What `signalprop verify` simulates of whole sublayers: every closed kind's PyTorch branch, against its moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.kernels.predicting import predict_token_kernels
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import KINDS, Kind, kind_named, never
from signalprop.network.moments import Moments
from signalprop.network.parametrization import Parametrization, blank
from signalprop.results.profile import Profile
from signalprop.theory.branches import branches_of
from signalprop.theory.network import predict_moments
from signalprop_lab.verification.components import ALL, LAYOUT, Case, Component, Sample, log_uniform, raw_moments

if TYPE_CHECKING:
    from torch import Generator, Tensor

Predict = Callable[[Parametrization, InputStatistics], Profile]
_SEQUENCES = 48  # that pass one draw of weights, so that its directions average out
# What an architecture says of kinds that have settings: one of these by chance.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "experts": [
        {"n_experts": 16, "top_k": 4, "width": 128, "up_shift": 1.0},
        {"n_experts": 16, "top_k": 2, "width": 128, "normalised": False, "shared_width": 256, "shared_gated": True},
        {"n_experts": 16, "top_k": 3, "width": 128, "scores": "sigmoid", "scale": 2.5, "n_groups": 4, "top_groups": 2,
         "shared_width": 128},
    ],
    "latent_attention": [{"rank": 512}, {"rank": 64}, {"rank": 128, "query_rank": 96}],
}  # fmt: skip


def _draw_branch(rng: np.random.Generator) -> Case:
    return {
        "length": int(rng.choice([8, 16])),
        "width": 256,
        "gated": bool(rng.integers(2)),
        "activation": str(rng.choice(["relu", "gelu", "silu"])),
        "p": float(rng.choice([0.0, 0.1])),
        "s0": log_uniform(rng, 0.003, 0.03),  # small: the formulas are exact there
        "r": float(rng.uniform(0.1, 0.8)),
        "m_r": float(rng.uniform(0.1, 0.8)),
        "g_r": float(rng.uniform(0.1, 0.8)),
        "bias": float(rng.choice([0.0, 0.3])),
        "settings": int(rng.integers(1000)),
    }


def _table(case: Case, kind: Kind, placement: Placement = "none", **columns: float) -> tuple[Parametrization, int]:
    """A network that holds a sublayer of the kind, and its row."""
    across = kind.reads_memory
    fields: dict[str, Any] = {
        "kind": "encoder-decoder" if across else "encoder",
        "n_layers": 1,
        "branches": (("attention",), (kind.name,)) if across else (kind.name,),
        "d_model": case["width"],
        "d_ff": case["width"],
        "n_heads": 4,
        "seq_len": case["length"],
        "gated": case["gated"],
        "activation": case["activation"],
        "dropout": case["p"],
        "attention_dropout": 0.0,
        "norm_placement": placement,
        "norm_eps": 0.0,
        "positions": "none",
        "head": "none",
    }
    if several := _SETTINGS.get(kind.name):
        fields["settings"] = {kind.name: several[case["settings"] % len(several)]}
    a = Architecture(**fields)
    p = blank(a, "verify")
    std = {role.name: role.fan(a)[0] ** -0.5 for role in kind.roles}
    asks = [name for name in ("query", "latent_query") if name in std]
    std |= {name: std[name] * math.sqrt(case["s0"]) for name in asks}
    if asks:
        p = p.with_columns(score_scale=a.d_head**-0.5)
    elif kind.attends:  # queries of one size
        p = p.with_columns(score_scale=math.sqrt(case["s0"] / a.d_head))
    weights = {f"weight__{role}": value for role, value in std.items()}
    can_have = [role.name for role in kind.roles if role.biased is not never and role.name not in ("query", "key")]
    biases = {f"bias__{role}": case["bias"] for role in can_have}
    return p.with_columns(**weights, **biases, **columns), int(across)


def _tokens(r: float, shape: tuple[int, int, int], generator: Generator, *, exactly: bool) -> Tensor:
    """Sequences of tokens of correlation r, each of mean square 1 exactly.

    Args:
        exactly: the correlation too, of every two tokens. Of random ones it scatters by 1 / sqrt(width), which products
            of several maps of a token turn into a bias.
    """
    import torch

    n, length, width = shape
    if exactly and length < width:
        rows = torch.linalg.qr(torch.randn(n, width, length + 1, generator=generator))[0].mT * math.sqrt(width)
        alike: Tensor = math.sqrt(r) * rows[:, :1] + math.sqrt(1 - r) * rows[:, 1:]
        return alike
    x = math.sqrt(r) * torch.randn(n, 1, width, generator=generator)
    x = x + math.sqrt(1 - r) * torch.randn(shape, generator=generator)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def _mean_raw(x: Tensor, *, mean: bool = False) -> list[float]:
    found: list[float] = np.mean([raw_moments(one, mean=mean) for one in x], axis=0).tolist()
    return found


def _sample_branch(
    case: Case,
    generator: Generator,
    *,
    kind: Kind,
    placement: Placement = "none",
    whole: bool = False,
    **columns: float,
) -> Sample:
    """One draw of a sublayer's weights, on sequences of random tokens; gradients by autograd.

    Args:
        whole: the stream after the sublayer; else its branch.
    """
    import torch

    from signalprop.models.sublayers import make_sublayer
    from signalprop.models.surroundings import Surroundings

    p, row = _table(case, kind, placement, **columns)
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    row += seed % p.architecture.n_layers
    shape = (_SEQUENCES, case["length"], case["width"])
    # formulas of attention count on the scatter of keys, those of networks on that of all tokens
    exactly = not kind.attends and not whole
    x, memory, g = (_tokens(case[name], shape, generator, exactly=exactly) for name in ("r", "m_r", "g_r"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of the dropout
        sublayer = make_sublayer(p, row, seed, torch.float32, None).requires_grad_(False)
        leaves = [x.requires_grad_(), *([memory.requires_grad_()] if kind.reads_memory else [])]
        branch, out = sublayer.parts(x, Surroundings(memory=memory))
    y = out if whole else branch
    gradients = torch.autograd.grad(y, leaves, g)
    raw = _mean_raw(y.detach(), mean=True)
    seen = [] if exactly and shape[1] < shape[2] else [(x, "r"), (memory, "m_r"), (g, "g_r")]
    controls = [_mean_raw(t.detach())[1] - case[name] for t, name in seen]
    raw[0] = 0.0
    return Sample([*raw, *(value for gradient in gradients for value in _mean_raw(gradient))], controls)


def _predict_branch(case: Case, *, kind: Kind, **columns: float) -> list[Moments]:
    p, row = _table(case, kind, "none", **columns)
    made = branches_of(p)[row]
    read, memory = (1.0, case["r"]), (1.0, case["m_r"])
    forward = made.forward(row, read, memory)
    ones = np.ones(1)
    sent = made.backward(np.array([row]), (ones, ones * read[1]), (ones, ones * memory[1]))
    found = [Moments(0.0, forward.per_token, forward.shared / forward.per_token)]
    for maps in (sent.stream, sent.memory):
        if maps is not None:
            vv, vc, cv, cc = (float(column[0]) for column in maps)
            variance, covariance = vv + vc * case["g_r"], cv + cc * case["g_r"]
            found.append(Moments(0.0, variance, covariance / variance))
    return found


def _predict_sublayer(case: Case, *, kind: Kind, placement: Placement, by: Predict, **columns: float) -> list[Moments]:
    """The stream after one sublayer, and the gradient before it, by a fidelity of `predict`."""
    p, _ = _table(case, kind, placement, **columns)
    inputs = InputStatistics(
        kind="stream", token_correlation=case["r"], target_correlation=case["g_r"], loss_fraction=1.0
    )
    profile = by(p, inputs)
    assert profile.gradient is not None
    out, back = profile.forward["stream_out"], profile.gradient["stream_in"]
    return [Moments(0.0, float(series.variance[0]), float(series.token_correlation[0])) for series in (out, back)]


def _of_kind(name: str, **columns: float) -> Component:
    kind = kind_named(name)
    quantities = (LAYOUT if kind.reads_memory else ALL)[1:]
    given: dict[str, Any] = {"kind": kind, **columns}
    return Component(quantities, _draw_branch, partial(_sample_branch, **given), partial(_predict_branch, **given))


def _whole(
    placement: Placement,
    name: str = "feed_forward",
    by: Predict = predict_moments,
    exact: float = 0.8,
    skip: float = 0.8,
) -> Component:
    given: dict[str, Any] = {"kind": kind_named(name), "placement": placement, "skip": skip, "branch": 0.7}
    sample = partial(_sample_branch, whole=True, **given)
    predict = partial(_predict_sublayer, by=by, **given)
    # norms at this width take out 1/width of a gradient, which `predict` leaves in
    return Component(ALL[1:], _draw_branch, sample, predict, exact)


_PLACEMENTS: tuple[Placement, ...] = ("pre", "post", "sandwich")
SUBLAYERS: dict[str, Component] = {
    **{f"{kind_named(name).words} sublayer": _of_kind(name) for name in KINDS if kind_named(name).closed},
    "attention mixed with values": _of_kind("attention", value_skip=0.6, attention_gain=0.7),
    **{f"{placement}-norm step": _whole(placement) for placement in _PLACEMENTS},
    "attention step, token kernels": _whole("none", "attention", predict_token_kernels, 0.3, 0.1),
    "feed-forward step, token kernels": _whole("none", "feed_forward", predict_token_kernels, 0.3, 0.1),
}
