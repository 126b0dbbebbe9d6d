"""How near layers are to doing nothing: cosines, angular distances of stretches of layers, and |J - I|."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from signalprop.attachment.anatomy import Anatomy
from signalprop.diagnosis.layers import Call, Progress, first_sequences, layer_calls, layer_modules, run, stacks_of
from signalprop.diagnosis.result import Estimate, Identity, Number, number
from signalprop.measurement.measuring import arguments_of


def identity(
    attached: Anatomy,
    batches: Iterable[Any],
    *,
    skip_first: int = 4,
    probes: int = 4,
    limit: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Identity:
    """How near every layer, and every stretch of layers of a stack, is to the identity, on some sequences.

    Angular distances are arccos of the cosine of a token's stream before and after, over pi (Gromov et al. 2024), mean
    over all tokens but the first `skip_first`. |J - I|: the Jacobian of the layer over the whole sequence, rows of the
    first positions left out, by `probes` random projections per sequence (0: none); its standard error is over them.
    Streams are those that the model carries (gauged multipliers scale them, not their angles).

    Args:
        limit: how many sequences are taken, one at a time; memory holds the streams of all layers of one.
    """
    model, stacks = attached.model, stacks_of(attached.mapping)
    layer_modules(attached)
    n = len(stacks)
    generator = torch.Generator().manual_seed(seed)
    angles, cosines = torch.full((n, n), math.nan, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    members = [[k for k in range(n) if stacks[k] == stack] for stack in dict.fromkeys(stacks)]
    for group in members:
        for span in range(len(group)):
            angles[span, group[0] : group[-1] + 1 - span] = 0.0
    squares: list[list[float]] = [[] for _ in stacks]
    taken = first_sequences(batches, limit)
    for done, one in enumerate(taken):
        arguments = arguments_of(attached, one)
        with torch.no_grad(), layer_calls(attached, arguments, skip_first) as calls:
            run(model, arguments)
        for group in members:
            cosine = _cosines([calls[k] for k in group])
            angle = (torch.arccos(cosine) / math.pi).mean(-1)
            for span in range(len(group)):
                angles[span, group[0] : group[-1] + 1 - span] += torch.diagonal(angle, span + 1)
            cosines[group[0] : group[-1] + 1] += torch.diagonal(cosine.mean(-1), 1)
        for k in range(n):
            squares[k] += _jacobian(calls[k], probes, generator)
        if progress is not None:
            progress(done + 1, limit)
    return Identity(
        cosine=tuple(number(value) for value in (cosines / len(taken)).tolist()),
        angular=tuple(tuple(number(value) for value in row) for row in (angles / len(taken)).tolist()),
        jacobian=tuple(_estimate(values) for values in squares) if probes else (),
    )


def _jacobian(call: Call, probes: int, generator: torch.Generator) -> list[float]:
    """|J^T z - z|^2 over |z|^2 for normal z on the rows that count: its mean is |J - I|_F^2 over their number."""
    if not probes or not bool(torch.isfinite(call.stream).all()):
        return []
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = call.stream.detach().clone().requires_grad_()
        out = call.again(leaf)
        for probe in range(probes):
            z = torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out)
            z *= call.keep[..., None]
            (back,) = torch.autograd.grad(out, leaf, z, retain_graph=probe + 1 < probes)
            found.append(float((back.float() - z.float()).square().sum() / z.float().square().sum()))
    return [value for value in found if math.isfinite(value)]


def _cosines(calls: Sequence[Call]) -> Tensor:
    """Cosines between the streams before every layer and after the last, (layers + 1, layers + 1, tokens)."""
    streams = torch.stack([*(call.kept(call.stream) for call in calls), calls[-1].kept(calls[-1].output)])
    unit = torch.nn.functional.normalize(streams, dim=-1)
    return torch.einsum("atd,btd->abt", unit, unit).double().clamp(-1, 1).cpu()


def _estimate(values: list[float]) -> Estimate:
    """Root of the mean square, and its standard error to first order."""
    if not values:
        return Estimate(value=None)
    squares = torch.tensor(values, dtype=torch.float64)
    root = math.sqrt(float(squares.mean()))
    error: Number = None
    if len(values) > 1:
        error = float(squares.std() / math.sqrt(len(values)) / (2 * root)) if root > 0 else 0.0
    return Estimate(value=number(root), standard_error=error)
