"""Changes of a live model for as long as a block runs: other numbers in tensors, other attributes, roles rearranged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from signalprop.attachment.attached import Held


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
def output_times(module: nn.Module, factor: float) -> Iterator[None]:
    """What a module outputs times a factor, for as long as the block runs."""
    handle = module.register_forward_hook(lambda _, __, out: out * factor)
    try:
        yield
    finally:
        handle.remove()


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
        self.change(held.weight, held.rows, int(held.transposed), to)
        if isinstance(held.bias, Tensor):
            self.change(held.bias, held.rows, 0, to)

    def inputs(self, held: Held, to: Callable[[Tensor], Tensor]) -> None:
        """Inputs of a weight on the first axis."""
        self.change(held.weight, None, 1 - int(held.transposed), to)

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
    """A role's own outputs of a weight, (outputs, inputs)."""
    turned: Tensor = held.weight.data.movedim(int(held.transposed), 0)
    return turned if held.rows is None else turned[held.rows if isinstance(held.rows, slice) else list(held.rows)]
