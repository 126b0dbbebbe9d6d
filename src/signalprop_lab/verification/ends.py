"""What `signalprop verify` simulates of a network's two ends: frames that are read, a loss that is sent back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Head
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import FloatArray, Moments
from signalprop.network.parametrization import Embedding, blank
from signalprop.theory import embedding
from signalprop.theory import loss_gradient as head
from signalprop_lab.verification.components import ALL, FORWARD, Case, Component, Sample, log_uniform, raw_moments

if TYPE_CHECKING:
    from torch import Generator, Tensor


# --- frames --------------------------------------------------------------------------------------------------------


def _draw_frames(rng: np.random.Generator) -> Case:
    return {
        "tokens": 32,
        "activation": str(rng.choice(["relu", "gelu", "glu"])),
        "kernel": int(rng.choice([1, 3])),
        "variance": log_uniform(rng, 0.3, 3.0),
        "r": float(rng.choice([0.1, 0.3, 0.5, 0.7])),
    }


def _front(case: Case) -> tuple[Architecture, Embedding]:
    fields: dict[str, Any] = {
        "n_layers": 1, "d_model": 256, "input": "frames", "frame_dim": 256, "conv_channels": 256,
        "conv_kernels": (case["kernel"],) * 2, "conv_strides": (case["kernel"],) * 2,
        "conv_activation": case["activation"], "seq_len": case["tokens"], "positions": "none", "head": "none",
    }  # fmt: skip
    a = Architecture(**fields)
    inputs = (a.convolution(i) for i in range(2))
    return a, Embedding(token=0.0, convolutions=tuple((kernel * channels) ** -0.5 for channels, _, kernel in inputs))


def _sample_frames(case: Case, generator: Generator) -> Sample:
    """Draws of the built network's front end, each on one long recording, without its ends, where zeros are read."""
    import torch

    from signalprop.models.ends import FrontEnd

    a, e = _front(case)  # windows that do not overlap: two tokens read different frames
    p = replace(blank(a, "verify"), embedding=e)

    def fill(tensor: Tensor, std: float, role: str) -> None:
        torch.nn.init.normal_(tensor, 0.0, std, generator=generator)

    found, controls = [], []
    for _ in range(8):
        made = FrontEnd(p, fill, torch.float32).requires_grad_(False)
        common = torch.randn(1, a.frame_dim, generator=generator)
        common *= math.sqrt(a.frame_dim) / common.norm()
        own = torch.randn(a.n_frames, a.frame_dim, generator=generator)
        x = math.sqrt(case["variance"]) * (math.sqrt(case["r"]) * common + math.sqrt(1 - case["r"]) * own)
        found.append(raw_moments(made(x[None])[0][1:-1], mean=True))
        controls.append(raw_moments(x)[0] - case["variance"])
    return Sample(np.mean(found, axis=0).tolist(), [float(np.mean(controls))])


def _predict_frames(case: Case) -> list[Moments]:
    a, e = _front(case)
    inputs = InputStatistics(kind="frames", variance=case["variance"], token_correlation=case["r"])
    return [embedding.embed(a, e, inputs)]


# --- the loss ------------------------------------------------------------------------------------------------------


def _draw_loss(rng: np.random.Generator) -> Case:
    return {
        "length": 200,
        "width": 400,
        "classes": int(rng.choice([4, 8, 30])),  # few, so that targets coincide
        "r": float(rng.choice([0.1, 0.3, 0.6])),
        "logits": log_uniform(rng, 0.01, 0.3),  # their variance: the overlap of two softmaxes is exact for small ones
        "share": float(rng.choice([0.8, 1.0])),
    }


def _frequencies(classes: int) -> FloatArray:
    """Of targets: uneven, so that many coincide."""
    found = np.arange(1.0, classes + 1) ** -2
    return np.asarray(found / found.sum())


def _sample_loss(case: Case, generator: Generator) -> Sample:
    """The gradient of the mean cross-entropy, in units of a head's weight, on a stream of mean square 1."""
    import torch
    import torch.nn.functional as F

    n, d, classes = case["length"], case["width"], case["classes"]
    common = torch.randn(1, d, generator=generator)
    common *= math.sqrt(d) / common.norm()
    x = math.sqrt(case["r"]) * common + math.sqrt(1 - case["r"]) * torch.randn(n, d, generator=generator)
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True))).requires_grad_()
    weight = torch.randn(classes, d, generator=generator) * math.sqrt(case["logits"] / d)
    frequent = torch.tensor(_frequencies(classes))
    targets = torch.multinomial(frequent, n, replacement=True, generator=generator)
    carries = (torch.rand(n, generator=generator) < case["share"]).float()
    (F.cross_entropy(x @ weight.T, targets, reduction="none") * carries).sum().backward()
    assert x.grad is not None
    unit = math.sqrt(d / case["logits"])
    # what is sent back where all logits are equal: its expectation is known, and nearly all of the noise is in it
    level = (weight.mean(0) - weight[targets]) * carries[:, None] * unit
    c = float((frequent**2).sum())
    expected = case["share"] * (1 - 1 / classes), case["share"] ** 2 * (c - 1 / classes)
    known = [float(found) - right for found, right in zip(raw_moments(level), expected, strict=True)]
    return Sample([0.0, 1.0, 0.0, *raw_moments(x.grad * unit)], known)


def _predict_loss(case: Case) -> list[Moments]:
    fields: dict[str, Any] = {
        "kind": "decoder", "n_layers": 1, "d_model": case["width"], "n_heads": 1, "vocab_size": case["classes"],
        "norm_placement": "none", "final_norm": False, "tied_embeddings": False, "seq_len": case["length"],
    }  # fmt: skip
    a = Architecture(**fields)
    p = replace(blank(a, "verify"), head=Head(weight=math.sqrt(case["logits"] / case["width"])))
    c = float((_frequencies(case["classes"]) ** 2).sum())
    inputs = InputStatistics(token_correlation=c, target_correlation=c, loss_fraction=case["share"])
    top = head.top_gradient(p, 0.0, case["r"], 0.0)
    variance = case["share"] * float(top.variance(c, normed=False))
    found = head.gradient_at_top(p, inputs, 0.0, case["r"], 0.0)
    return [Moments(0.0, 1.0, 0.0), Moments(0.0, variance, float(found.correlation))]


ENDS: dict[str, Component] = {
    "convolutions over frames": Component(FORWARD, _draw_frames, _sample_frames, _predict_frames),
    "gradient at the top": Component(ALL[3:], _draw_loss, _sample_loss, _predict_loss),
}
