"""What the sections of a diagnosis share: layers as sublayers and as modules, positions that count, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.hooks import Hooks, first_tensor, read_by, replaced
from signalprop.measurement.passes import refusing_inputs
from signalprop.network.layout import Layout, layer_starts, layout
from signalprop.streams.calls import first_sequence
from signalprop.watching.first_positions import Positions

Progress = Callable[[int, int], None]


def groups(rows: Layout) -> list[list[int]]:
    """The sublayers of every layer, the encoder's layers first."""
    starts = layer_starts(rows).tolist()
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(rows.kind)], strict=True)]


def stacks_of(mapping: Mapping) -> list[int]:
    """The stack of every layer: index into `signalprop.network.layout.STACKS`."""
    rows = layout(mapping.architecture)
    return [int(rows.stack[group[0]]) for group in groups(rows)]


def has_modules(mapping: Mapping) -> bool:
    """Whether every layer is one module that the mapping names; networks of `signalprop.build` have sublayers alone."""
    return bool(mapping.layers) and not any(isinstance(item, tuple) for item in mapping.layers)


def layer_modules(attached: Anatomy) -> list[nn.Module]:
    """The module of every layer."""
    if not has_modules(attached.mapping):
        raise InputError(
            "the mapping does not name one module per layer; give Mapping.layers, the path of every layer's module"
        )
    return [layer for layer in attached.layers if isinstance(layer, nn.Module)]


def sequences(batch: Any) -> Iterator[Any]:
    """The sequences of a batch, one at a time; of a model's arguments the first."""
    if not isinstance(batch, Batch):
        yield first_sequence(batch)
        return
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "source"}
    for b in range(len(batch.targets)):
        parts: dict[str, Any] = {name: None if x is None else x[b : b + 1] for name, x in arrays.items()}
        yield replace(batch, **parts)


def first_sequences(batches: Iterable[Any], n: int) -> list[Any]:
    """The first n sequences of all batches, or as many as there are."""
    found = list(islice((one for batch in batches for one in sequences(batch)), n))
    if not found:
        raise InputError("no data to run the model on: no sequence has the requested length")
    return found


def lean(model: nn.Module, arguments: dict[str, Any], **options: Any) -> Any:
    """What a model outputs without a cache, and with those of the options that its forward knows."""
    known = signature(model.forward).parameters
    options = {"use_cache": False, **options}
    return model(**{**arguments, **{name: value for name, value in options.items() if name in known}})


def run(model: nn.Module, arguments: dict[str, Any]) -> None:
    """A pass for its streams: the model leaves out its logits if it can.

    Raises:
        InputError: the model fails on them, for instance since the sequences are too long for it.
    """
    with refusing_inputs(model, arguments):
        lean(model, arguments, logits_to_keep=1)


class Call(NamedTuple):
    """How a layer was called: what it read and output of the stream, (batch, tokens, features), which positions count.

    Attributes:
        args, kwargs: all that it was given.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stream: Tensor
    output: Tensor
    keep: Tensor

    def again(self, stream: Tensor | None = None) -> Tensor:
        """What the layer outputs now, of the same stream or another one."""
        args, kwargs = replaced(self.args, self.kwargs, stream) or (self.args, self.kwargs)
        output = first_tensor(self.layer(*args, **kwargs))
        assert output is not None
        return output

    def kept(self, x: Tensor) -> Tensor:
        """Its positions that count, (positions, features)."""
        return x.detach()[self.keep].float()


@contextmanager
def layer_calls(attached: Anatomy, arguments: dict[str, Any], skip_first: int) -> Iterator[dict[int, Call]]:
    """What every layer reads and outputs in the pass in the block, by number."""
    positions, hooks = Positions(attached.mapping, arguments, skip_first), Hooks()
    found: dict[int, Call] = {}

    def ran(k: int, stack: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = read_by(args, kwargs), first_tensor(output)
        if x is None or y is None or x.shape != y.shape:
            raise InputError(f"layer {k}: its module does not map a stream to a stream; fix Mapping.layers")
        found[k] = Call(layer, args, kwargs, x, y, positions.of(stack, (x.shape[0], x.shape[1]), x.device)[0])

    for k, (layer, stack) in enumerate(zip(layer_modules(attached), stacks_of(attached.mapping), strict=True)):
        hooks.after(layer, partial(ran, k, stack))
    with hooks:
        yield found
