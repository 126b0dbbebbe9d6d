"""How near layers are to doing nothing: cosines, angular distances of stretches of layers, and |J - I|."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.data import Batch
from signalprop.diagnose.result import Estimate, Identity, Number, Numbers, number
from signalprop.diagnose.signal import Progress, positions
from signalprop.errors import InputError
from signalprop.probes.mapping import Mapping, find
from signalprop.probes.measuring import arguments_of
from signalprop.probes.recording import first_tensor, uncompiled


class _Streams:
    """Keeps the stream before and behind every layer of one stack, for one sequence, and each layer's arguments."""

    def __init__(self, layers: list[nn.Module], probes: int, skip_first: int, generator: torch.Generator) -> None:
        self.layers, self.probes, self.skip_first = layers, probes, skip_first
        self.generator = generator
        self.before: dict[int, Tensor] = {}
        self.behind: dict[int, Tensor] = {}
        self.distances: list[list[float]] = [[] for _ in layers]
        self._inside = False
        self._arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Streams:
        for k, layer in enumerate(self.layers):
            self._handles.append(layer.register_forward_pre_hook(self._enters(k), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._leaves(k)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enters(self, k: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._inside:
                x = first_tensor(args) if args else first_tensor(kwargs.values())
                if x is not None:
                    self.before[k] = x.detach()
                self._arguments[k] = (args, kwargs)

        return hook

    def _leaves(self, k: int) -> Any:
        def hook(layer: nn.Module, _: Any, output: Any) -> None:
            if self._inside:
                return
            x = output if isinstance(output, Tensor) else first_tensor(output)
            if x is not None:
                self.behind[k] = x.detach()
            args, kwargs = self._arguments.pop(k)
            if self.probes and k in self.before:
                self._inside = True
                try:
                    self._jacobian(k, layer, args, kwargs)
                finally:
                    self._inside = False

        return hook

    def _jacobian(self, k: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """|J^T z - z|^2 over |z|^2 for random z: an unbiased estimate of |J - I|_F^2 over the number of entries."""
        stream = self.before[k]
        if not bool(torch.isfinite(stream).all()):
            return
        with torch.inference_mode(False), torch.enable_grad():
            leaf = stream.detach().clone().requires_grad_()
            if args:
                output = layer(leaf, *args[1:], **kwargs)
            else:
                name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
                output = layer(**{**kwargs, name: leaf})
            out = output if isinstance(output, Tensor) else first_tensor(output)
            assert out is not None
            for probe in range(self.probes):
                z = torch.randn(out.shape, generator=self.generator, dtype=torch.float32).to(out)
                z[:, : self.skip_first] = 0
                (back,) = torch.autograd.grad(out, leaf, z, retain_graph=probe + 1 < self.probes)
                value = float((back.float() - z.float()).square().sum() / z.float().square().sum())
                if math.isfinite(value):
                    self.distances[k].append(value)


def layer_modules(model: nn.Module, mapping: Mapping) -> list[nn.Module]:
    """The module of every layer.

    Raises:
        InputError: the mapping does not say where the layers are, or a layer is no module of its own.
    """
    if not mapping.layers or any(isinstance(item, tuple) for item in mapping.layers):
        raise InputError(
            "the mapping does not name one module per layer; give Mapping.layers, the path of every layer's module"
        )
    return [find(model, item, "layer") for item in mapping.layers]  # type: ignore[arg-type]


def identity(
    model: nn.Module,
    batches: Iterable[Batch],
    mapping: Mapping,
    *,
    skip_first: int = 4,
    probes: int = 4,
    sequences: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Identity:
    """How near every layer, and every stretch of layers of a stack, is to the identity, on some sequences.

    Angular distances are arccos of the cosine of a token's stream before and behind, over pi (Gromov et al. 2024), mean
    over all tokens but the first `skip_first`. |J - I|: the Jacobian of the layer over the whole sequence, rows of the
    first positions left out, by `probes` random projections per sequence (0: none); its standard error is over them.
    Streams are those that the model carries (gauged multipliers scale them, not their angles).

    Args:
        sequences: how many sequences are taken, one at a time; memory holds the streams of all layers of one.

    Raises:
        InputError: the mapping does not name the layers, or there is no data.
    """
    modules = layer_modules(model, mapping)
    generator = torch.Generator().manual_seed(seed)
    n = len(modules)
    sums, count = torch.zeros(n + 1, n + 1, dtype=torch.float64), 0
    stacks = _stack_of(mapping, n)
    cosines, done = torch.zeros(n, dtype=torch.float64), 0
    distances: list[list[float]] = [[] for _ in modules]
    with uncompiled(model), torch.no_grad():
        for batch in batches:
            for arguments in _single(arguments_of(model, mapping, batch)):
                if done == sequences:
                    break
                with _Streams(modules, probes, skip_first, generator) as seen:
                    model(**arguments, **_without_cache(model))
                keep = _kept(mapping, arguments, seen, skip_first)
                for k in range(n):
                    distances[k] += seen.distances[k]
                for stack in sorted(set(stacks)):
                    members = [k for k in range(n) if stacks[k] == stack]
                    angles, cosine = _angles(seen, members, keep)
                    sums[members[0] : members[-1] + 2, members[0] : members[-1] + 2] += angles
                    cosines[members[0] : members[-1] + 1] += cosine
                done += 1
                count += 1
                if progress is not None:
                    progress(done, sequences)
    if not count:
        raise InputError("there is no data to run the model on: not one sequence of the asked length")
    mean = sums / count
    return Identity(
        cosine=tuple(number(float(value) / count) for value in cosines),
        angular=tuple(
            tuple(
                number(float(mean[k, k + span])) if k + span <= n and _same(stacks, k, span) else None for k in range(n)
            )
            for span in range(1, n + 1)
        ),
        jacobian=tuple(_estimate(values) for values in distances) if probes else (),
    )


def _same(stacks: list[int], k: int, span: int) -> bool:
    return stacks[k] == stacks[k + span - 1]


def _stack_of(mapping: Mapping, n: int) -> list[int]:
    first = mapping.architecture.n_layers
    return [0 if k < first else 1 for k in range(n)]


def _estimate(values: list[float]) -> Estimate:
    """Root of the mean square, and its standard error to first order."""
    if not values:
        return Estimate(value=None)
    squares = torch.tensor(values, dtype=torch.float64)
    root = math.sqrt(float(squares.mean()))
    error: Number = None
    if len(values) > 1 and root > 0:
        error = float(squares.std() / math.sqrt(len(values)) / (2 * root))
    return Estimate(value=number(root), standard_error=error)


def _angles(seen: _Streams, members: list[int], keep: Tensor) -> tuple[Tensor, Tensor]:
    """(angles over pi between the streams before every layer and behind the last, (m + 1, m + 1); cosines, (m,))."""
    streams = [seen.before[k] for k in members] + [seen.behind[members[-1]]]
    unit = torch.stack([torch.nn.functional.normalize(x[0][keep].float(), dim=-1) for x in streams])
    cosine = torch.einsum("atd,btd->abt", unit, unit).clamp(-1, 1).double()
    angle = (torch.arccos(cosine) / math.pi).mean(-1).cpu()
    one = cosine.mean(-1).cpu()
    return angle, torch.diagonal(one, 1)


def _kept(mapping: Mapping, arguments: dict[str, Any], seen: _Streams, skip_first: int) -> Tensor:
    x = seen.before[0]
    mask = arguments.get(mapping.padding)
    fits = isinstance(mask, Tensor) and mask.shape == x.shape[:2]
    return positions(mask if fits else None, (x.shape[0], x.shape[1]), skip_first, x.device)[0]


def _single(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a batch, one sequence at a time."""
    size = next(value.shape[0] for value in arguments.values() if isinstance(value, Tensor) and value.ndim > 0)

    def part(value: Any, b: int) -> Any:
        return value[b : b + 1] if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size else value

    return [{name: part(value, b) for name, value in arguments.items()} for b in range(size)]


def _without_cache(model: nn.Module) -> dict[str, Any]:
    """Layers are run a second time, which a cache would take for later tokens."""
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


def angular_profile(found: Identity, span: int) -> tuple[int, Numbers]:
    """(first layer of the stretch of `span` layers with the smallest angular distance, all distances)."""
    row = found.angular[span - 1]
    known = [(value, k) for k, value in enumerate(row) if value is not None]
    return min(known)[1], row
