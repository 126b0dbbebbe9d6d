"""The residual recursion, once: skip, branch, where norms stand, parallel branches; forward and back.

It says in which order things happen, and leaves what happens to the signal to an algebra: scalars in logarithms
(`theory/scalar_recursion.py`), token kernels (`kernels/stack.py`, `kernels/passes.py`). Tensors pass through stacks in
the same order (`models/transformer.py`, `models/layerwise.py`); a sublayer of them is a module, whose step is in
`models/residual.py`. A row is whatever the algebra knows a sublayer by: its index in the table, or its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

# Where a placement puts norms: on what the branch reads, on its output, on the sum.
NORM_BEFORE = frozenset({"pre", "sandwich"})
NORM_ON_BRANCH = frozenset({"sandwich", "res-post"})
NORM_AFTER = frozenset({"post"})

Row = TypeVar("Row")
Stream = TypeVar("Stream")
Output = TypeVar("Output")  # of a branch
Share = TypeVar("Share")


class Forward(Protocol[Stream, Output]):
    """What a sublayer does to a kind of state, on the way forward."""

    def read(self, row: Any, stream: Stream) -> Any:
        """What a branch reads of a stream without a norm before it."""

    def read_normed(self, row: Any, stream: Stream) -> Any:
        """What a branch reads after the norm before it."""

    def output(self, row: Any, read: Any) -> Output:
        """The branch's output, after the norm on it where its placement has one."""

    def skipped(self, row: Any, stream: Stream) -> Stream:
        """The stream on the skip path."""

    def plus(self, row: Any, skipped: Stream, output: Output) -> Stream:
        """The skip, plus the multiplier times the branch's output."""

    def norm_sum(self, row: Any, total: Stream) -> Stream:
        """The sum after the norm after it."""


def step(
    algebra: Forward[Stream, Output], row: Any, placement: str, stream: Stream, onto: Stream | None
) -> tuple[Output, Stream]:
    """One sublayer: (the branch's output, the stream after it).

    Args:
        stream: what the branch reads. onto: what a parallel branch adds to, with the skip in it; None: the skip path.
    """
    read = algebra.read_normed(row, stream) if placement in NORM_BEFORE else algebra.read(row, stream)
    output = algebra.output(row, read)
    total = algebra.plus(row, algebra.skipped(row, stream) if onto is None else onto, output)
    return output, algebra.norm_sum(row, total) if placement in NORM_AFTER else total


def through(
    rows: Iterable[Row],
    parallel: Iterable[bool],
    one: Callable[[Row, Stream, Stream | None], tuple[Output, Stream]],
    stream: Stream,
    see: Callable[[Row, Stream, Output, Stream], None] | None = None,
    enter: Callable[[Row, Stream], Stream] | None = None,
) -> Stream:
    """The stream after all sublayers of a stack.

    Args:
        stream: what the first one reads.
        rows, parallel: the sublayers in order, and which of them read the same stream as the one before.
        one: one sublayer, of (row, what it reads, what a parallel one adds to) to (branch, stream after it).
        see: called with every row, what it read, its branch and the stream after it.
        enter: what another row than the first reads, of (row, stream after the one before); default: that stream.
    """
    layer_in = stream
    for number, (row, beside) in enumerate(zip(rows, parallel, strict=True)):
        if beside:
            output, stream = one(row, layer_in, stream)
        else:
            layer_in = enter(row, stream) if enter is not None and number else stream
            output, stream = one(row, layer_in, None)
        if see is not None:
            see(row, layer_in, output, stream)
    return stream


class Backward(Protocol[Stream, Share]):
    """What a sublayer does to gradients, on the way back."""

    def norm_sum_back(self, row: Any, gradient: Stream) -> Stream:
        """The gradient before the norm after the sum."""

    def at_branch(self, row: Any, at_sum: Stream) -> Stream:
        """The gradient at the branch's output."""

    def sent(self, row: Any, at_sum: Stream, at_branch: Stream) -> Share:
        """What the branch sends back to the stream that it read."""

    def skipped_back(self, row: Any, at_sum: Stream) -> Share:
        """What the skip path sends back."""

    def together(self, one: Share, other: Share) -> Share:
        """Shares of one tensor's gradient, added up."""


def step_back(
    algebra: Backward[Stream, Share], row: Any, placement: str, parallel: bool, gradient: Stream
) -> tuple[Stream, Share]:
    """One sublayer backwards: (gradient at the branch, its share of the gradient of the stream that it read)."""
    at_sum = algebra.norm_sum_back(row, gradient) if placement in NORM_AFTER else gradient
    at_branch = algebra.at_branch(row, at_sum)
    share = algebra.sent(row, at_sum, at_branch)
    return at_branch, share if parallel else algebra.together(algebra.skipped_back(row, at_sum), share)


def back_through(
    rows: Sequence[int],
    parallel: Sequence[bool],
    one: Callable[[int, Stream], tuple[Stream, Share]],
    together: Callable[[Share, Share], Share],
    whole: Callable[[Share], Stream],
    gradient: Stream,
    see: Callable[[str, int, Stream], None],
    enter_back: Callable[[int, Stream], tuple[Stream, Stream]] | None = None,
) -> Stream:
    """The gradient of the stream that enters the first of some sublayers, which make whole layers.

    Parallel branches read one tensor: its gradient is complete at the first of them, and is given to all.

    Args:
        rows: the sublayers in forward order. parallel: of all sublayers of the table.
        one: one sublayer, of (row, gradient after it) to (gradient at its branch, share of what it read).
        together, whole: two shares added up; the gradient that all shares make.
        see: called with the probe point, the row and the gradient there.
        enter_back: of (row, what it sends to the tensor that it reads) the gradients of that tensor, which others may
            read too, and of the stream after the row before; default: both are what it sends.
    """
    readers: list[int] = []
    gathered: Share | None = None
    for row in reversed(rows):
        see("stream_out", row, gradient)
        at_branch, share = one(row, gradient)
        see("branch", row, at_branch)
        gathered = share if gathered is None else together(share, gathered)
        readers.append(row)
        if parallel[row]:
            continue
        gradient = whole(gathered)
        at_read, gradient = (gradient, gradient) if enter_back is None else enter_back(row, gradient)
        for reader in readers:
            see("stream_in", reader, at_read)
        readers, gathered = [], None
    return gradient
