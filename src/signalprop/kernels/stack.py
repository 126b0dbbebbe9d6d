"""One stack as steps on token kernels: what every sublayer of a Parametrization does to K, and to gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from signalprop.errors import InputError
from signalprop.kernels.attention import ShapedAttention, TokenAttention, rotation
from signalprop.kernels.duals import dual_of_kernel, slope_of_kernel
from signalprop.kernels.shaping import (
    ESPA,
    USPA,
    ALiBi,
    AttentionShape,
    BidirectionalESPA,
    BidirectionalUSPA,
    Calibrated,
    CorrectedESPA,
    uniform_kernel,
)
from signalprop.kernels.state import State, inverse_roots
from signalprop.network.layout import KINDS, PLACEMENTS, STACKS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory import blocks

PRE, POST, SANDWICH, RES_POST = (PLACEMENTS.index(name) for name in ("pre", "post", "sandwich", "res-post"))
_ATTENTION = KINDS.index("attention")
# One sublayer's attention matrices at zero scores, one per kind of head; none: scores make the matrix.
Shapes = tuple[AttentionShape, ...]


class Stack:
    """One stack: its sublayers' forward and backward steps on kernels."""

    def __init__(self, p: Parametrization, shapes: Sequence[Shapes] | None = None) -> None:
        a = p.architecture
        self.p, self.a = p, a
        self.shapes = list(attention_shapes(p, a.seq_len) if shapes is None else shapes)
        self.rows = blocks.Rows.of(p)
        self.n = p.n_sublayers
        # feed-forwards without a way out give nothing, and need no work
        self.silent = (p.kind != _ATTENTION) & (self.rows.down == 0) & (self.rows.down_bias == 0)
        self.rho, self.omega = None, None
        if a.positions == "rotary":
            self.rho, self.omega = rotation(a.seq_len, a.d_head, a.rotary_base, a.rotary_fraction, a.causal)

    def starts_layer(self, i: int) -> bool:
        """Whether the stream that sublayer i reads is its predecessor's output."""
        return not self.p.parallel[i]

    def read(self, i: int, stream: State) -> tuple[FloatArray, FloatArray | None]:
        """(kernel that the branch reads, per-token variance that the norm divides by or None)."""
        variance = np.diagonal(stream.kernel) * math.exp(min(max(stream.log_scale, -600.0), 600.0))
        if self.p.placement[i] not in (PRE, SANDWICH):
            return stream.kernel * math.exp(min(max(stream.log_scale, -27.6), 27.6)), None
        divisor = variance + self.a.norm_eps
        scale = math.exp(min(max(stream.log_scale, -600.0), 600.0))
        root = inverse_roots(divisor) * abs(self.p.norm_output[i])
        read = stream.kernel * scale
        read *= root
        read *= root[:, None]
        return read, divisor

    def attention(self, i: int, kernel: FloatArray) -> tuple[TokenAttention, float]:
        """A sublayer's attention, and the factor on its forward kernel.

        QK-norm takes the size of the stream out of the scores (here one size for all tokens), not out of the values. On
        the way back the two cancel: scores change by 1 / size with the input, what they weigh is of that size.
        """
        size = float(np.diagonal(kernel).mean()) if self.a.qk_norm else 1.0
        size = size if size > 0 else 1.0
        made = TokenAttention(
            kernel=kernel if size == 1 else kernel / size,
            qk=float(self.rows.qk[i]),
            d_model=self.a.d_model,
            causal=self.a.causal,
            dropout=self.a.attention_dropout or 0.0,
            rho=self.rho,
            omega=self.omega,
            query_bias=float(self.rows.query_bias[i]),
            value_skip=float(self.rows.value_skip[i]),
            gain=float(self.rows.attention_gain[i]),
        )
        return made, size

    def shaped(self, i: int, kernel: FloatArray) -> ShapedAttention:
        """A sublayer's attention, where its matrices are given."""
        return ShapedAttention(
            kernel=kernel,
            shapes=self.shapes[i],
            dropout=self.a.attention_dropout or 0.0,
            value_skip=float(self.rows.value_skip[i]),
            gain=float(self.rows.attention_gain[i]),
        )

    def branch(self, i: int, kernel: FloatArray) -> FloatArray:
        """Kernel of the branch (after its dropout, before a norm on it) from the kernel that it reads."""
        rows, keep = self.rows, 1 - self.a.dropout
        if self.p.kind[i] == _ATTENTION:
            if self.shapes[i]:  # rows of D A do not sum to 1: a bias is mixed as values are
                values = self.shaped(i, kernel * rows.value[i] + rows.value_bias[i]).forward()
            else:
                attention, size = self.attention(i, kernel)
                bias = rows.value_bias[i] * (rows.value_skip[i] + rows.attention_gain[i]) ** 2
                values = attention.forward()
                values *= size * rows.value[i]
                values += bias
            out = values * rows.output[i]
            out += rows.output_bias[i]
        else:
            r, s, up = self._pre_activation(i, kernel)
            out = dual_of_kernel(self.a.activation, s, r)
            if up is not None:
                out *= up
            out *= rows.down[i]
            out += rows.down_bias[i]
        diagonal = np.diagonal(out) / keep
        np.fill_diagonal(out, diagonal)
        return np.asarray(out)

    def _pre_activation(self, i: int, kernel: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """(correlation, variances of the non-linear pre-activation, kernel of the linear one of a gated block)."""
        rows = self.rows
        weight, bias = (rows.gate[i], rows.gate_bias[i]) if self.a.gated else (rows.up[i], rows.up_bias[i])
        pre = kernel * weight + bias
        diagonal = np.diagonal(pre).copy()
        inverse = 1 / np.sqrt(np.maximum(diagonal, 1e-150))
        r = pre
        r *= inverse
        r *= inverse[:, None]
        np.clip(r, -1, 1, out=r)
        np.fill_diagonal(r, 1.0)
        return r, diagonal, kernel * rows.up[i] + rows.up_bias[i] if self.a.gated else None

    def feed_forward_back(self, i: int, kernel: FloatArray) -> FloatArray:
        """The factor with which each entry of the gradient kernel returns (dropout apart)."""
        rows = self.rows
        r, s, up = self._pre_activation(i, kernel)
        slope = slope_of_kernel(self.a.activation, s, r)
        back = float(rows.down_back[i]) * rows.wide
        if up is not None:
            q = dual_of_kernel(self.a.activation, s, r)
            return np.asarray(back * (float(rows.up[i]) * q + float(rows.gate[i]) * up * slope))
        return np.asarray(back * float(rows.up[i]) * slope)

    def branch_back(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at what the branch reads, from the one at the branch's output."""
        dropped = gradient.copy()
        np.fill_diagonal(dropped, np.diagonal(gradient) / (1 - self.a.dropout))
        if self.p.kind[i] == _ATTENTION:
            factor = float(self.rows.output_back[i] * self.rows.value_back[i])
            if self.shapes[i]:
                return self.shaped(i, kernel).backward(dropped) * factor
            return self.attention(i, kernel)[0].backward(dropped) * factor
        return dropped * self.feed_forward_back(i, kernel)

    def raw_branch(self, i: int, layer_in: State) -> State:
        """The branch before a norm on it, from the stream that it reads."""
        if self.silent[i]:
            return State(np.broadcast_to(0.0, layer_in.kernel.shape))
        kernel, divisor = self.read(i, layer_in)
        branch = State(self.branch(i, kernel)).rescaled()
        if divisor is None:  # computed at a held size; beyond it the stream is scaled
            held = min(max(layer_in.log_scale, -27.6), 27.6)
            branch = State(branch.kernel, branch.log_scale + layer_in.log_scale - held)
        return branch

    def branch_norm(self, i: int, raw: State) -> FloatArray:
        """What a norm on the branch multiplies the branch's kernel with, and gradients on their way back by.

        In units of exp(raw.log_scale) for both; (T, T).
        """
        gain = self.p.post_norm_gain[i] if self.p.placement[i] == SANDWICH else self.p.norm_output[i]
        own = np.diagonal(raw.kernel) + self.a.norm_eps * math.exp(-min(max(raw.log_scale, -600.0), 600.0))
        root = inverse_roots(own) * abs(gain)
        return np.outer(root, root)

    def step(self, i: int, stream: State, layer_in: State) -> tuple[State, State, FloatArray | None]:
        """(stream_out, branch before its multiplier, per-token variance of a post-norm's input)."""
        p = self.p
        branch = self.raw_branch(i, layer_in)
        if p.placement[i] in (SANDWICH, RES_POST):
            branch = State(branch.kernel * self.branch_norm(i, branch)).rescaled()
        skip = 1.0 if p.parallel[i] else float(p.skip[i]) ** 2
        total = stream.times(skip)
        if not self.silent[i]:
            added = branch.times(float(p.branch[i]) ** 2)
            total = total.plus(added) if skip > 0 else added
        if p.placement[i] != POST:
            return total, branch, None
        own = np.diagonal(total.kernel) * math.exp(min(max(total.log_scale, -600), 600)) + self.a.norm_eps
        scale = math.exp(min(max(total.log_scale, -600), 600)) * p.norm_output[i] ** 2
        root = inverse_roots(own)
        return State(total.kernel * scale * root * root[:, None]), branch, own

    def run(self, start: State, first: int, last: int) -> Iterator[tuple[int, State, State, State, FloatArray | None]]:
        """(index, stream read, branch, stream_out, post-norm variance) of sublayers first to last - 1."""
        stream = layer_in = start
        for i in range(first, last):
            if self.starts_layer(i):
                layer_in = stream
            stream, branch, own = self.step(i, stream, layer_in)
            yield i, layer_in, branch, stream, own


def row_shape(p: Parametrization, i: int) -> AttentionShape | None:
    """The matrix that a sublayer's attention is shaped to, before any calibration; None where it is not shaped.

    What U-SPA does about repeated tokens and feed-forwards is in its numbers: Shaping's repeats and corrected say only
    how they were chosen.

    Raises:
        InputError: numbers that need negative attention weights, or what a family cannot do.
    """
    if p.shaping.kind == "none" or p.kind[i] != _ATTENTION:
        return None
    causal = STACKS[p.stack[i]] == "decoder"
    before, after, gain = float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])
    if p.shaping.kind == "u-spa":
        if gain:
            raise InputError(f"U-SPA: shape_gain of sublayer {i} is {gain!r}; only E-SPA has one, expected 0")
        return USPA(before, after) if causal else BidirectionalUSPA(before, after)
    repeats = 0.0 if p.shaping.calibrated else p.shaping.repeats
    if not causal:
        if gain or repeats or p.shaping.corrected:
            raise InputError(
                "E-SPA without a mask: shape_gain, repeats and corrected are for causal attention only; leave them out"
            )
        return BidirectionalESPA(before, after)
    if p.shaping.corrected and before > 0:
        if gain or repeats:
            raise InputError("E-SPA: shape_gain and repeats do not go with corrected; calibrate the rows instead")
        return CorrectedESPA(before, after, p.architecture.activation)
    return ESPA(before, after, gain or None, repeats)


def attention_shapes(p: Parametrization, length: int) -> list[Shapes]:
    """The attention matrices of every sublayer for sequences of up to `length` tokens.

    Calibration sends the average kernel (1 - repeats) I + repeats 1 1^T through the stack, row by row.

    Raises:
        InputError: as `row_shape`; or a calibration without a mask, where it would hold for one length only, or beside
            output biases or value skips.
    """
    a = p.architecture
    shapes: list[Shapes] = []
    for i in range(p.n_sublayers):
        shape = row_shape(p, i)
        if shape is not None:
            shapes.append((shape,))
        else:
            shapes.append(ALiBi.heads(a.n_heads) if a.positions == "alibi" and p.kind[i] == _ATTENTION else ())
    if p.shaping.kind == "none" or not p.shaping.calibrated:
        return shapes
    if not a.causal:
        raise InputError("calibrated attention needs a causal stack: without a mask it would hold for one length only")
    attends = p.kind == _ATTENTION
    if (p.value_skip[attends] != 0).any() or (p.biases["output"][attends] != 0).any():
        raise InputError(
            "calibrated attention sets what a branch gives by the rows of its matrix, which neither an output bias nor "
            "a value skip goes through; set both to 0, or leave calibrated out"
        )
    stack = Stack(_of_length(p, length), shapes)
    stream = layer_in = State(uniform_kernel(p.shaping.repeats, length))
    for i in range(p.n_sublayers):
        if stack.starts_layer(i):
            layer_in = stream
        if p.kind[i] == _ATTENTION:
            own = np.diagonal(stack.raw_branch(i, layer_in).absolute())
            stack.shapes[i] = (Calibrated(shapes[i][0], 1 / np.sqrt(own)),)
        stream, *_ = stack.step(i, stream, layer_in)
    return stack.shapes


def _of_length(p: Parametrization, length: int) -> Parametrization:
    return replace(p, architecture=p.architecture.replace(seq_len=length))
