"""Changes of a live model for as long as a block runs: other numbers in tensors, other attributes, roles rearranged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from signalprop.attachment.rows import Held
from signalprop.hooks import Hooks


class Trial(NamedTuple):
    """One change.

    Attributes:
        name: a short word for its kind. fault: what is wrong where it repairs the model, in words. repair: what to do.
        change: a context in which the model is changed.
    """

    name: str
    fault: str
    repair: str
    change: Callable[[], Any]


@contextmanager
def other_values(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Other numbers in tensors, for as long as the block runs. The old ones are put back bit by bit."""
    kept = []
    try:
        for tensor, other in pairs:
            kept.append((tensor, tensor.data))
            tensor.data = other
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def other_attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Other values of attributes, (owner, name, value), for as long as the block runs."""
    kept = []
    try:
        for owner, name, value in changes:
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)


@contextmanager
def other_outputs(modules: Iterable[nn.Module], to: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Other outputs of modules, `to(arguments, output)`, for as long as the block runs."""
    hooks = Hooks()
    for module in modules:
        hooks.after(module, lambda _, args, __, out: to(args, out))
    with hooks:
        yield


class Copies:
    """Copies of whole tensors in which single roles are changed; several roles can share one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def change(
        self, tensor: Tensor, rows: slice | Sequence[int] | None, axis: int, to: Callable[[Tensor], Tensor]
    ) -> None:
        """`to` gets the role's part with its outputs on the first axis, as a copy, and gives the other values."""
        _, copy = self._made.setdefault(id(tensor), (tensor, tensor.data.clone()))
        view = copy.movedim(axis, 0)
        where = slice(None) if rows is None else rows if isinstance(rows, slice) else list(rows)
        view[where] = to(view[where].clone())

    def weights(self, held: Held, to: Callable[[Tensor], Tensor]) -> None:
        """Outputs of a weight, (outputs, inputs), and of its bias, (outputs,)."""
        for tensor, axis in held.tensors:
            self.change(tensor, held.rows, axis, to)

    def inputs(self, held: Held, to: Callable[[Tensor], Tensor]) -> None:
        """Inputs of a weight on the first axis."""
        self.change(held.weight, None, 1 - held.axis, to)

    def made(self) -> list[tuple[Tensor, Tensor]]:
        return list(self._made.values())


def changed(make: Callable[[Copies], None]) -> Callable[[], Any]:
    @contextmanager
    def change() -> Iterator[None]:
        copies = Copies()
        make(copies)
        with other_values(copies.made()):
            yield

    return change


def part_of(held: Held) -> Tensor:
    """A role's outputs of a weight, (outputs, inputs), or of several, (outputs, copies, inputs)."""
    return held.of(held.weight.data.movedim(held.axis, 0), 0)


def part_of_bias(held: Held | None) -> Tensor | None:
    """A role's outputs of a bias; None if there is none."""
    bias = None if held is None or held.problem else held.bias
    if held is None or not isinstance(bias, Tensor) or bias.is_meta:
        return None
    return held.of(bias.data, held.copies)


def plain(held: Held | None, *, copies: bool = False) -> bool:
    """Whether a weight is one matrix in memory, or several where `copies` may be."""
    return (
        held is not None
        and not held.problem
        and (copies or not held.copies)
        and isinstance(held.weight, Tensor)
        and (held.weight.ndim == 2 + held.copies and held.weight.is_floating_point() and not held.weight.is_meta)
    )
