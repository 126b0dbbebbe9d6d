"""How near layers are to doing nothing: cosines, angular distances of stretches of layers, and |J - I|."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import Positions, Progress, layer_modules, run, sequences, stacks_of
from signalprop.diagnosis.result import Estimate, Identity, Number, number
from signalprop.errors import InputError
from signalprop.hooks import Hooks, first_tensor, read_by
from signalprop.measurement.measuring import arguments_of


class _Streams:
    """Keeps the stream before and after every layer, of one sequence; runs each layer again for its Jacobian.

    Attributes:
        before, behind: (tokens, features) by layer, positions that count. squares: estimates of the mean square of the
            entries' Jacobian minus 1, by layer.
    """

    def __init__(
        self, layers: list[nn.Module], stacks: list[int], positions: Positions, probes: int, generator: torch.Generator
    ) -> None:
        self.before: dict[int, Tensor] = {}
        self.behind: dict[int, Tensor] = {}
        self.squares: dict[int, list[float]] = {}
        self._layers, self._stacks, self._positions = layers, stacks, positions
        self._probes, self._generator = probes, generator
        self._inside = False

    def watch(self, hooks: Hooks) -> None:
        """See every layer of a pass."""
        for k, layer in enumerate(self._layers):
            hooks.after(layer, partial(self._leaves, k))

    def _leaves(self, k: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._inside:
            return
        x, y = read_by(args, kwargs), first_tensor(output)
        if x is None or y is None or x.shape != y.shape:
            raise InputError(f"layer {k}: its module does not make a stream of a stream; fix Mapping.layers")
        keep = self._positions.keep(self._stacks[k], x)
        self.before[k], self.behind[k] = x.detach()[keep].float(), y.detach()[keep].float()
        if self._probes and bool(torch.isfinite(x).all()):
            self._inside = True
            try:
                self.squares[k] = self._jacobian(layer, x, keep, args, kwargs)
            finally:
                self._inside = False

    def _jacobian(
        self, layer: nn.Module, x: Tensor, keep: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[float]:
        """|J^T z - z|^2 over |z|^2 for normal z on the rows that count: its mean is |J - I|_F^2 over their number."""
        found = []
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            if args:
                output = layer(leaf, *args[1:], **kwargs)
            else:
                name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
                output = layer(**{**kwargs, name: leaf})
            out = first_tensor(output)
            assert out is not None
            for probe in range(self._probes):
                z = torch.randn(out.shape, generator=self._generator, dtype=torch.float32).to(out)
                z *= keep[..., None]
                (back,) = torch.autograd.grad(out, leaf, z, retain_graph=probe + 1 < self._probes)
                found.append(float((back.float() - z.float()).square().sum() / z.float().square().sum()))
        return [value for value in found if math.isfinite(value)]


def identity(
    attached: Attached,
    batches: Iterable[Batch],
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

    Raises:
        InputError: the mapping does not name the layers, or there is no data.
    """
    model, mapping = attached.model, attached.mapping
    modules, stacks = layer_modules(attached), stacks_of(mapping)
    n = len(modules)
    generator = torch.Generator().manual_seed(seed)
    angles, cosines = torch.full((n, n), math.nan, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    members = [[k for k in range(n) if stacks[k] == stack] for stack in dict.fromkeys(stacks)]
    for group in members:
        for span in range(len(group)):
            angles[span, group[0] : group[-1] + 1 - span] = 0.0
    squares: list[list[float]] = [[] for _ in modules]
    count = 0
    with torch.no_grad():
        for one in islice((one for batch in batches for one in sequences(batch)), limit):
            arguments = arguments_of(model, mapping, one)
            seen = _Streams(modules, stacks, Positions(mapping, arguments, skip_first), probes, generator)
            hooks = Hooks(model)
            seen.watch(hooks)
            with hooks:
                run(model, arguments)
            for group in members:
                cosine = _cosines(seen, group)
                angle = (torch.arccos(cosine) / math.pi).mean(-1)
                for span in range(len(group)):
                    angles[span, group[0] : group[-1] + 1 - span] += torch.diagonal(angle, span + 1)
                cosines[group[0] : group[-1] + 1] += torch.diagonal(cosine.mean(-1), 1)
            for k, values in seen.squares.items():
                squares[k] += values
            count += 1
            if progress is not None:
                progress(count, limit)
    if not count:
        raise InputError("there is no data to run the model on: not one sequence of the asked length")
    return Identity(
        cosine=tuple(number(value) for value in (cosines / count).tolist()),
        angular=tuple(tuple(number(value) for value in row) for row in (angles / count).tolist()),
        jacobian=tuple(_estimate(values) for values in squares) if probes else (),
    )


def _cosines(seen: _Streams, group: Sequence[int]) -> Tensor:
    """Cosines between the streams before every layer and after the last, (layers + 1, layers + 1, tokens)."""
    streams = torch.stack([*(seen.before[k] for k in group), seen.behind[group[-1]]])
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
