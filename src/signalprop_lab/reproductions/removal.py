"""COD figure 2: what a trained model loses without one of its layers."""

from __future__ import annotations

import math

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import FloatArray
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings, fitted_line

_LENGTH = 64  # tokens of a sequence
_TOKENS = (512, 16_384)  # by scale


def figure_2(settings: Settings) -> Findings:
    """The loss without every single layer of the checkpoint."""
    from signalprop.attachment.anatomy import attach
    from signalprop.diagnosis.loading import load
    from signalprop.diagnosis.removal import removal
    from signalprop.diagnosis.stream import loss, token_batches

    if settings.checkpoint is None:
        raise InputError("COD figure 2 needs a trained checkpoint: --checkpoint DIR or FILE.gguf")
    loaded = load(settings.checkpoint)
    loaded.model.to(settings.device)
    attached = attach(loaded.model)
    a = attached.mapping.architecture
    n = len(attached.mapping.layers)
    if a.kind == "encoder-decoder" or n < 6:
        raise InputError(
            f"COD figure 2 is of single stacks of six layers or more; {loaded.name} has {n}, kind {a.kind}"
        )
    length = min(_LENGTH, a.seq_len)
    n_sequences = settings.pick(*_TOKENS) // length
    batches = list(token_batches(None, loaded.tokenizer, length, 4, n_sequences, architecture=a, seed=settings.seed))
    whole = loss(attached, batches)
    found = removal(attached, batches, whole, progress=settings.progress).single
    layers = np.array([item.layers[0] for item in found], np.float64)
    cost = np.array([math.nan if item.increase.value is None else item.increase.value for item in found])
    error = np.array([item.increase.standard_error or 0.0 for item in found])
    post = "post" in (a.placements[0], a.placements[-1])
    return Findings(
        checks=removal_checks(layers / n, cost, error, post=post),
        reduced=(
            f"{loaded.name}, {n} layers ({'post' if post else 'pre'}-norm); loss in nats on {n_sequences * length:,} "
            "tokens of "
            "the State of the Union addresses in place of MMLU accuracy of models of 7 and 13 billion weights"
        ),
        panels=(
            Panel(
                f"Loss without one layer, {loaded.name}",
                "layer removed",
                "increase, nats per token",
                (Curve("measured", layers, cost, "measured", error),),
                log_y=bool((cost > 0).all()),
            ),
        ),
        notes=(
            f"Whole model: {float(whole.mean):.3f} nats per token. Cheapest layers: "
            + ", ".join(f"{int(layers[i])} (+{cost[i]:.3f})" for i in np.argsort(cost)[:4])
            + "; dearest: "
            + ", ".join(f"{int(layers[i])} (+{cost[i]:.2f})" for i in np.argsort(-cost)[:3])
            + ".",
            *loaded.notes,
        ),
        details={"loss": float(whole.mean), "checkpoint": loaded.name},
    )


def removal_checks(depth: FloatArray, cost: FloatArray, error: FloatArray, *, post: bool) -> tuple[Check, ...]:
    """What the figure says of the costs of single layers.

    Args:
        depth: of the layers, as shares of the stack (0: the first). cost, error: of their removal. post: Post-LN.
    """
    first, last, late = depth < 0.1, depth >= 2 / 3, depth >= 0.5
    trend = fitted_line(_ranks(depth), _ranks(cost))[0]

    def mean(rows: np.ndarray) -> tuple[float, float]:
        return float(cost[rows].mean()), float(np.sqrt((error[rows] ** 2).sum()) / rows.sum())

    def ratio(over: np.ndarray, under: np.ndarray) -> tuple[float, float]:
        (x, dx), (y, dy) = mean(over), mean(under)
        return x / y, abs(x / y) * math.hypot(dx / x, dy / y)

    if post:
        value, noise = ratio(late, ~late)
        return (
            Check(
                "mean cost, later half over earlier half",
                "early layers cost little",
                value,
                low=3.0,
                standard_error=noise,
            ),
            Check("rank correlation of cost and depth", '"the opposite trend"', trend, low=0.3),
        )
    value, noise = ratio(first, last)
    median = float(np.median(cost[last]) / np.median(cost[~last]))
    return (
        Check("mean cost, first tenth of the layers over the last third", "the first layers cost most", value, low=3.0,
              standard_error=noise),
        Check("rank correlation of cost and depth", "deeper layers cost less", trend, high=-0.3),
        Check("median cost, last third over all before", "deep layers cost less", median, high=0.67),
    )  # fmt: skip


def _ranks(values: FloatArray) -> FloatArray:
    return np.argsort(np.argsort(values)).astype(np.float64)
