"""One stack as steps on token kernels: what every sublayer of a Parametrization does to K, and to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np

from signalprop.errors import require
from signalprop.kernels.causal_shaping import ALiBi, Shapes, row_shape
from signalprop.kernels.nodes import Nodes
from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State, on_both_sides
from signalprop.network.kinds import drawn_rows, kind_of, rows_where
from signalprop.network.layout import PLACEMENTS, STACKS
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.products import of_matrix
from signalprop.network.residual import NORM_BEFORE, NORM_ON_BRANCH, step, step_back, through
from signalprop.theory.branch_inputs import LARGEST_MEMORY, check_norms_divide
from signalprop.theory.log_arithmetic import HELD, inverse_roots, log, safe_exp, within
from signalprop.theory.network import token_share
from signalprop.theory.signals import Signal, Sublayers


class BranchKernel(Protocol):
    """Sublayers of one stack on token kernels: in closed form (`OnNodes`), or drawn (`sublayers/drawn.py`).

    Attributes:
        network: the number of the network that is drawn, where it is.
        caches: whether `forward` leaves what `backward` can use again.
    """

    caches: bool = False
    network: int = 0

    def silent(self, i: int) -> bool:
        """Whether sublayer i gives nothing, and needs no work."""
        return False

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        """Kernel of the branch before its dropout, (T, T), from the one that it reads."""

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at what the branch reads, from that kernel and the gradient's before the dropout."""


class OnNodes(BranchKernel):
    """A kind's sublayers in one stack on n nodes.

    Attributes:
        memory: kernel of the encoder's output, where they read it. sent: gradient kernel there, of the last `backward`.
    """

    def __init__(self, kind: Sublayers, nodes: Nodes) -> None:
        self.kind, self.nodes = kind, nodes
        self.memory: FloatArray | None = None
        self.sent: FloatArray = np.zeros(0)

    def silent(self, i: int) -> bool:
        return self.kind.silent(i)

    @property
    def caches(self) -> bool:
        """As of `BranchKernel`."""
        return self.nodes.caches

    @caches.setter
    def caches(self, caches: bool) -> None:
        self.nodes.caches = caches

    @property
    def _across(self) -> Signal | None:
        return None if self.memory is None else self.nodes.memory_signal(self.memory)

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        output = self.kind.forward(i, self.nodes.signal(kernel), self._across)
        return _to_fill(self.nodes.matrix(output), kernel)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        sent = self.kind.backward(i, self.nodes.signal(kernel), self.nodes.signal(gradient), self._across)
        if sent.memory is not None:
            self.sent = self.nodes.memory_matrix(sent.memory)
        return _to_fill(self.nodes.matrix(sent.stream), gradient)


def _to_fill(output: FloatArray, given: FloatArray) -> FloatArray:
    """A matrix that can be written to."""
    return output.copy() if output is given or not output.flags.writeable else output


class Read(NamedTuple):
    """What a branch reads: its kernel, per-token variance that a norm divided by (None: no norm), and without one the
    log of the scale beyond which it was held."""

    kernel: FloatArray
    divisor: FloatArray | None
    beyond: Array = 0.0


Record = Callable[[int, State, State, State], None]


def _at(column: FloatArray, i: int) -> Any:
    """Entry i of a column; of a sweep one for each member, (members, 1)."""
    return float(column[i]) if column.ndim == 1 else column[..., i, None]


class Stack:
    """One stack: its sublayers' steps on kernels, forward and back; the algebra of `signalprop.network.residual`.

    Of a sweep, whose members are followed together, on a grid and where every sublayer is attention or a feed-forward
    of the usual kind (`predicting.predict_together`).

    Attributes:
        draws: whether some are drawn (`sublayers/drawn.py`).
        shapes: how each sublayer's attention is shaped. branches: of every sublayer; different: each once. silent:
            sublayers that give nothing. across: those that read the encoder's output, `memory`, which whoever runs a
            decoder sets before.
        sum_divisors: per-token variance before post-norms on the way forward; branch_norms: what norms on branches
            multiply each token by, in units of exp of the log beside it. Whoever needs them takes them out.
    """

    def __init__(
        self,
        p: Parametrization,
        grid: Grid | None = None,
        encoder_grid: Grid | None = None,
    ) -> None:
        a = p.architecture
        check_norms_divide(a)
        self.p, self.a = p, a
        self.norm_output, self.norm_shift = p.norm_output, p.norm_shift
        self.shifted, self.skips = ((x != 0).reshape(-1, p.n_sublayers).any(0).tolist() for x in (p.norm_shift, p.skip))
        self.shapes = attention_shapes(p)
        self.n = p.n_sublayers
        drawn = drawn_rows(p) if grid is None else np.zeros(self.n, np.bool_)
        self.draws = bool(drawn.any())
        output: dict[tuple[int, int, bool], BranchKernel] = {}
        keys = list(zip(p.stack.tolist(), p.kind.tolist(), drawn.tolist(), strict=True))
        for i, key in enumerate(keys):
            if key not in output:
                on = encoder_grid if STACKS[key[0]] == "encoder" else grid
                output[key] = _drawn(p, key[0]) if key[2] else _closed(p, i, self.shapes, on)
        self.branches: list[Any] = [output[key] for key in keys]
        self.different: list[Any] = list(output.values())
        self.across = rows_where(p, lambda kind: kind.reads_memory).tolist()
        self.silent = [branch.silent(i) for i, branch in enumerate(self.branches)]
        self.placements = [PLACEMENTS[code] for code in p.placement.tolist()]
        self.parallel = p.parallel.tolist()
        self.sum_divisors: dict[int, FloatArray] = {}
        self.branch_norms: dict[int, tuple[FloatArray, float]] = {}

    def read_memory(self, last: State) -> FloatArray:
        """What a decoder reads of the encoder's last stream; without a norm, held where its products are doubles."""
        if not self.a.has_final_norm:
            return last.kernel * math.exp(within(last.log_scale, LARGEST_MEMORY))
        scale = safe_exp(last.log_scale)
        root = inverse_roots(np.diagonal(last.kernel) * scale + self.a.norm_eps) * abs(self.p.head.final_norm_gain)
        return on_both_sides(last.kernel, root * scale**0.5)

    def remember(self, memory: FloatArray, encoder_grid: Grid | None = None) -> None:
        """The kernel that cross-attentions read, and its grid."""
        for branch in (branch for branch, across in zip(self.branches, self.across, strict=True) if across):
            branch.memory, branch.nodes.memory = memory, encoder_grid

    def cache_attention(self, caches: bool) -> None:
        """Whether what runs forward from here on leaves its attention for the way back: ten matrices a sublayer."""
        for branch in self.different:
            branch.caches = caches

    def draw(self, network: int) -> None:
        """From here on the network of that number."""
        for branch in self.different:
            branch.network = network

    def enter(self, start: State) -> State:
        """What enters the first sublayer, from the model's input."""
        return start

    def leave(self, last: State) -> State:
        """What is read of the last stream."""
        return last

    def log_token_share(self, log_norm: FloatArray) -> float:
        """As of `theory.network.token_share`."""
        return float(token_share(self.p, log_norm))

    def back(self, gradient: State) -> State:
        """The gradient at the last stream, from that of what is read of it."""
        return gradient

    def run(self, start: State, rows: Sequence[int], record: Record | None = None) -> State:
        """The stream after some sublayers, which make whole layers.

        `record` is called with (index, stream read, branch before its multiplier, stream after it).
        """
        between = self.entering if self.a.layer_inputs else None
        return through(rows, [self.parallel[i] for i in rows], self.sublayer, start, record, between)

    def entering(self, i: int, stream: State) -> State:
        """What sublayer i reads, of the stream after the one before it."""
        return stream

    def sublayer(self, i: int, stream: State, onto: State | None) -> tuple[State, State]:
        """One sublayer: (branch before its multiplier, stream after it)."""
        return step(self, i, self.placements[i], stream, onto)

    def what_is_read(self, i: int, stream: State) -> Read:
        """What the branch reads, by its placement."""
        return self.read_normed(i, stream) if self.placements[i] in NORM_BEFORE else self.read(i, stream)

    def read(self, i: int, stream: State) -> Read:
        """A stream as it is, held at a size that the branch can be computed at."""
        log_size = stream.log_scale + log(np.maximum(stream.size, 1e-300))
        beyond = log_size - within(log_size, HELD)
        return Read(stream.kernel * of_matrix(safe_exp(stream.log_scale - beyond)), None, beyond)

    def read_normed(self, i: int, stream: State) -> Read:
        """A stream after a norm."""
        scale = safe_exp(stream.log_scale)
        divisor = stream.kernel.diagonal(0, -2, -1) * scale + self.a.norm_eps
        root = inverse_roots(divisor) * abs(_at(self.norm_output, i))
        return Read(self._with_bias(i, on_both_sides(stream.kernel, root * scale**0.5)), divisor)

    def _with_bias(self, i: int, kernel: FloatArray) -> FloatArray:
        """What a norm gives plus its bias, which all tokens share."""
        if not self.shifted[i]:
            return kernel
        shift = _at(self.norm_shift, i)
        return kernel + of_matrix(shift)

    def output(self, i: int, read: Read) -> State:
        """The branch's output, after a norm on it."""
        raw = self._raw(i, read)
        if self.placements[i] not in NORM_ON_BRANCH:
            return raw
        gain = self.p.post_norm_gain if self.placements[i] == "sandwich" else self.norm_output
        sum_divisors = raw.kernel.diagonal(0, -2, -1) + self.a.norm_eps * safe_exp(-raw.log_scale)
        root = inverse_roots(sum_divisors) * abs(_at(gain, i))
        self.branch_norms[i] = root, raw.log_scale
        return State(on_both_sides(raw.kernel, root)).rescaled()

    def _raw(self, i: int, read: Read) -> State:
        if self.silent[i]:
            return State(np.broadcast_to(0.0, read.kernel.shape))
        out = self.branches[i].forward(i, read.kernel)
        if self.a.dropout:
            np.einsum("...ii->...i", out)[...] /= 1 - self.a.dropout
        output = State(out).rescaled()
        beyond = (
            np.any(read.beyond) and not self.across[i]
        )  # what is averaged across does not grow with what asks for it
        return replace(output, log_scale=output.log_scale + read.beyond) if beyond else output

    def skipped(self, i: int, stream: State) -> State:
        """The stream times its multiplier."""
        return stream.times(_at(self.p.skip, i) ** 2)

    def plus(self, i: int, skipped: State, output: State) -> State:
        """The skip plus the branch, which is independent of it."""
        if self.silent[i]:
            return skipped
        added = output.times(_at(self.p.branch, i) ** 2)
        return skipped.plus(added) if self.parallel[i] or self.skips[i] else added

    def norm_sum(self, i: int, total: State) -> State:
        """The sum after a post-norm."""
        scale = safe_exp(total.log_scale)
        sum_divisors = total.kernel.diagonal(0, -2, -1) * scale + self.a.norm_eps
        self.sum_divisors[i] = sum_divisors
        root = inverse_roots(sum_divisors) * (abs(_at(self.norm_output, i)) * scale**0.5)
        return State(self._with_bias(i, on_both_sides(total.kernel, root)))


def _closed(p: Parametrization, i: int, shapes: Sequence[Shapes], grid: Grid | None) -> BranchKernel:
    """The kind of sublayer i in its stack, in closed form."""
    nodes = Nodes(shapes, grid)
    return OnNodes(kind_of(p, i).part("signal").of(p, int(p.stack[i]), None if nodes.is_one else nodes), nodes)


def _drawn(p: Parametrization, stack: int) -> BranchKernel:
    """Sublayers of one stack that are drawn, by PyTorch."""
    require("torch", "models")
    output: BranchKernel = import_module("signalprop.sublayers.drawn").DrawnSublayers(p, stack)
    return output


class Back:
    """The way back over a stretch of sublayers; the algebra of gradients.

    Attributes:
        reads: the streams that the sublayers read. across: the gradient at the top as the last post-norm sees it.
        overlap: called with a sublayer, the gradient at its sum, and what its branch sends.
        memory: what branches sent to the encoder's output. along: what it has along the stream, where it is followed.
    """

    def __init__(self, stack: Stack, across: State, overlap: Callable[[int, State, State], None] | None = None) -> None:
        self.stack, self.p = stack, stack.p
        self.across, self.overlap = across, overlap
        self.reads: dict[int, State] = {}
        self.memory: list[State] = []
        self.along: Any = None

    def keep(self, i: int, layer_in: State, branch: State, stream_out: State) -> None:
        """Keep what the way back needs of a sublayer; called on a way forward, as `Stack.run` does."""
        self.reads[i] = layer_in

    def sublayer(self, i: int, gradient: State) -> tuple[State, State]:
        """One sublayer backwards: (gradient at its branch, its share of the gradient of what it read)."""
        return step_back(self, i, self.stack.placements[i], self.stack.parallel[i], gradient)

    def norm_sum_back(self, i: int, gradient: State) -> State:
        """Before a post-norm."""
        arrived = self.across if i == self.stack.n - 1 else gradient
        root = inverse_roots(self.stack.sum_divisors.pop(i)) * abs(_at(self.stack.norm_output, i))
        return State(on_both_sides(arrived.kernel, root), arrived.log_scale).rescaled()

    def at_branch(self, i: int, at_sum: State) -> State:
        """Times the branch's multiplier."""
        return at_sum.times(_at(self.p.branch, i) ** 2)

    def sent(self, i: int, at_sum: State, at_branch: State) -> State:
        """Through a norm on the branch, dropout, the branch, and the norm before it."""
        stack = self.stack
        if stack.silent[i]:
            return State(np.broadcast_to(0.0, at_branch.kernel.shape))
        at_output, log_scale = at_branch.kernel, at_branch.log_scale
        read = stack.what_is_read(i, self.reads[i])
        if stack.placements[i] in NORM_ON_BRANCH:
            root, log_size = stack.branch_norms.pop(i)
            at_output, log_scale = on_both_sides(at_output, root), log_scale - log_size
        dropped = at_output
        if stack.a.dropout:
            dropped = at_output.copy()
            np.einsum("...ii->...i", dropped)[...] /= 1 - stack.a.dropout
        back = stack.branches[i].backward(i, read.kernel, dropped)
        if stack.across[i]:
            self.memory.append(State(stack.branches[i].sent, log_scale).rescaled())
        if read.divisor is not None:
            root = inverse_roots(read.divisor) * abs(_at(stack.norm_output, i))
            back = on_both_sides(back, root)
        share = State(back, log_scale).rescaled()
        if self.along is not None:
            share = self.along.added(i, read, self.reads[i], share)
        if self.overlap is not None:
            self.overlap(i, at_sum, share)
        return share

    def entering_back(self, i: int, gradient: State) -> tuple[State, State]:
        """As `residual.back_through` asks for it."""
        return gradient, gradient

    def skipped_back(self, i: int, at_sum: State) -> State:
        """Times the skip's multiplier."""
        return at_sum.times(_at(self.p.skip, i) ** 2)

    def together(self, one: State, other: State) -> State:
        """Shares of one gradient."""
        return one.plus(other)


def attention_shapes(p: Parametrization) -> list[Shapes]:
    """The attention matrices of every sublayer.

    Raises:
        InputError: as `row_shape`.
    """
    alibi = ALiBi.heads(p.architecture.n_heads) if p.architecture.positions == "alibi" else ()
    shapes = [row_shape(p, i) for i in range(p.n_sublayers)]
    return [
        (shape,) if shape is not None else alibi if kind_of(p, i).attends_itself else ()
        for i, shape in enumerate(shapes)
    ]
