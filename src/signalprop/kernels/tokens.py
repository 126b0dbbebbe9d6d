"""Fidelity `kernel`: the token kernel K_ij = E x_i . x_j / d_model through every sublayer, and back.

Where positions differ, averages over them do not compound rightly: in a decoder an early token is read by every later
one, so gradients pile up on it with every layer; a class token carries the whole gradient. Exact statistics of real
token ids enter position by position and sequence by sequence: what two positions share is equal tokens, all or
nothing, and a non-linear function of an average over sequences is not the average of the function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from signalprop.activations import dual
from signalprop.errors import InputError
from signalprop.inputs import InputStatistics
from signalprop.kernels.attention import TokenAttention, rotation
from signalprop.kernels.ends import input_kernel, sequences, top_kernel
from signalprop.kernels.state import State
from signalprop.moments import FloatArray
from signalprop.parametrization import PLACEMENTS, Parametrization
from signalprop.profile import POINTS, Profile, Series
from signalprop.theory import blocks
from signalprop.theory.network import sensitivity_gain, token_share

PRE, POST, SANDWICH, RES_POST = (PLACEMENTS.index(name) for name in ("pre", "post", "sandwich", "res-post"))


_ANGLES = np.linspace(0.0, math.pi, 4097)


def dual_of_kernel(name: str, variance: float, correlation: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(E f(x) f(y), E f'(x) f'(y)) for a matrix of correlations, by linear interpolation in arccos r.

    Duals are smooth in the angle, also where they are kinked in r; 4,096 intervals leave an error below 1e-6 relative
    to the values at r = 1.
    """
    covariance, slope = _dual_table(name, float(f"{variance:.7e}"))
    place = np.arccos(correlation) / _ANGLES[1]
    left = np.minimum(place.astype(np.int64), len(_ANGLES) - 2)
    share = place - left

    def pick(values: FloatArray) -> FloatArray:
        return np.asarray(values[left] * (1 - share) + values[left + 1] * share)

    return pick(covariance), pick(slope)


@lru_cache(maxsize=128)
def _dual_table(name: str, variance: float) -> tuple[FloatArray, FloatArray]:
    q = dual(name, variance, np.cos(_ANGLES))
    return np.asarray(q.covariance_moment), np.asarray(q.slope_moment)


@dataclass
class _Columns:
    """Moments of one sequence, or of several, collected sublayer by sublayer.

    Attributes:
        keep: which positions count, None: all.
    """

    log_variance: dict[str, FloatArray]
    correlation: dict[str, FloatArray]
    keep: NDArray[np.bool_] | None = None

    @staticmethod
    def empty(n: int, keep: NDArray[np.bool_] | None = None) -> _Columns:
        return _Columns({k: np.zeros(n) for k in POINTS}, {k: np.zeros(n) for k in POINTS}, keep)

    @staticmethod
    def pooled(parts: Sequence[_Columns], counts: FloatArray) -> _Columns:
        """Moments over all sequences, as measured: variances average over tokens, covariances over pairs of tokens.

        Args:
            counts: number of tokens of every sequence.
        """
        if len(parts) == 1:
            return parts[0]
        tokens = counts / counts.sum()
        pairs = counts * (counts - 1) / max(float((counts * (counts - 1)).sum()), 1.0)
        log_variance, correlation = {}, {}
        for k in POINTS:
            logs = np.stack([part.log_variance[k] for part in parts])
            top = logs.max(0)
            variances = np.exp(np.maximum(logs - top, -745.0))
            variance = tokens @ variances
            shared = pairs @ (variances * np.stack([part.correlation[k] for part in parts]))
            log_variance[k], correlation[k] = top + np.log(variance), np.clip(shared / variance, -1.0, 1.0)
        return _Columns(log_variance, correlation)

    def put(self, point: str, i: int, state: State) -> None:
        self.log_variance[point][i], self.correlation[point][i] = state.moments(self.keep)

    def series(self, relative_to: float = 0.0) -> dict[str, Series]:
        return {
            k: Series.of(log_variance=self.log_variance[k] - relative_to, token_correlation=self.correlation[k])
            for k in POINTS
        }


class _Stack:
    """One stack: its sublayers' forward and backward steps on kernels."""

    def __init__(self, p: Parametrization) -> None:
        a = p.architecture
        self.p, self.a = p, a
        self.rows = blocks.Rows.of(p)
        self.n = p.n_sublayers
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
        normed = stream.kernel * scale / np.sqrt(np.outer(divisor, divisor)) * self.p.norm_output[i] ** 2
        return normed, divisor

    def attention(self, i: int, kernel: FloatArray) -> tuple[TokenAttention, float]:
        """A sublayer's attention, and the factor on its forward kernel.

        QK-norm takes the size of the stream out of the scores (here one size for all tokens), not out of the values. On
        the way back the two cancel: scores change by 1 / size with the input, what they weigh is of that size.
        """
        size = float(np.diagonal(kernel).mean()) if self.a.qk_norm else 1.0
        size = size if size > 0 else 1.0
        made = TokenAttention(
            kernel=kernel / size,
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

    def branch(self, i: int, kernel: FloatArray) -> FloatArray:
        """Kernel of the branch (after its dropout, before a norm on it) from the kernel that it reads."""
        rows, keep = self.rows, 1 - self.a.dropout
        if self.p.kind[i] == 0:
            bias = rows.value_bias[i] * (rows.value_skip[i] + rows.attention_gain[i]) ** 2
            attention, size = self.attention(i, kernel)
            values = attention.forward() * (size * rows.value[i]) + bias
            out = values * rows.output[i] + rows.output_bias[i]
        else:
            r, s, up = self._pre_activation(i, kernel)
            q, _ = dual_of_kernel(self.a.activation, s, r)
            out = q * (up if self.a.gated else 1.0) * rows.down[i] + rows.down_bias[i]
        diagonal = np.diagonal(out) / keep
        np.fill_diagonal(out, diagonal)
        return np.asarray(out)

    def _pre_activation(self, i: int, kernel: FloatArray) -> tuple[FloatArray, float, FloatArray]:
        """(correlation, variance of the non-linear pre-activation, kernel of the linear one).

        One variance for all positions: exact under a norm; without one, positions enter through their mean.
        """
        rows = self.rows
        weight, bias = (rows.gate[i], rows.gate_bias[i]) if self.a.gated else (rows.up[i], rows.up_bias[i])
        pre = kernel * weight + bias
        diagonal = np.diagonal(pre)
        r = np.clip(pre / np.sqrt(np.maximum(np.outer(diagonal, diagonal), 1e-300)), -1, 1)
        np.fill_diagonal(r, 1.0)
        up = kernel * rows.up[i] + rows.up_bias[i]
        return r, float(diagonal.mean()), up

    def feed_forward_back(self, i: int, kernel: FloatArray) -> FloatArray:
        """The factor with which each entry of the gradient kernel returns (dropout apart)."""
        rows = self.rows
        r, s, up = self._pre_activation(i, kernel)
        q, slope = dual_of_kernel(self.a.activation, s, r)
        back = float(rows.down_back[i]) * rows.wide
        if self.a.gated:
            return np.asarray(back * (float(rows.up[i]) * q + float(rows.gate[i]) * up * slope))
        return np.asarray(back * float(rows.up[i]) * slope)

    def branch_back(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at what the branch reads, from the one at the branch's output."""
        dropped = gradient.copy()
        np.fill_diagonal(dropped, np.diagonal(gradient) / (1 - self.a.dropout))
        if self.p.kind[i] == 0:
            factor = float(self.rows.output_back[i] * self.rows.value_back[i])
            return self.attention(i, kernel)[0].backward(dropped) * factor
        return dropped * self.feed_forward_back(i, kernel)

    def raw_branch(self, i: int, layer_in: State) -> State:
        """The branch before a norm on it, from the stream that it reads."""
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
        return np.asarray(gain**2 / np.sqrt(np.outer(own, own)))

    def step(self, i: int, stream: State, layer_in: State) -> tuple[State, State, FloatArray | None]:
        """(stream_out, branch before its multiplier, per-token variance of a post-norm's input)."""
        p = self.p
        branch = self.raw_branch(i, layer_in)
        if p.placement[i] in (SANDWICH, RES_POST):
            branch = State(branch.kernel * self.branch_norm(i, branch)).rescaled()
        skip = 1.0 if p.parallel[i] else float(p.skip[i]) ** 2
        total = stream.times(skip).plus(branch.times(float(p.branch[i]) ** 2))
        if p.placement[i] != POST:
            return total, branch, None
        own = np.diagonal(total.kernel) * math.exp(min(max(total.log_scale, -600), 600)) + self.a.norm_eps
        scale = math.exp(min(max(total.log_scale, -600), 600)) * p.norm_output[i] ** 2
        return State(total.kernel * scale / np.sqrt(np.outer(own, own))), branch, own

    def run(self, start: State, first: int, last: int) -> Iterator[tuple[int, State, State, State, FloatArray | None]]:
        """(index, stream read, branch, stream_out, post-norm variance) of sublayers first to last - 1."""
        stream = layer_in = start
        for i in range(first, last):
            if self.starts_layer(i):
                layer_in = stream
            stream, branch, own = self.step(i, stream, layer_in)
            yield i, layer_in, branch, stream, own


def predict_token_kernels(
    parametrization: Parametrization, inputs: InputStatistics, *, backward: bool = True
) -> Profile:
    """Profile of an encoder or decoder by token kernels: averages over positions of what each position does.

    Real ids: every sequence by itself, moments over all of them (as measured); of more than 4 sequences (2 beyond 512
    tokens) as many as stand evenly spaced in the order of their token correlation, which the notes say. O(T^2) work per
    sublayer and sequence and O(T^2 sqrt(n_sublayers)) memory (segments of the forward pass are computed again for the
    backward one). Measured errors: docs/accuracy.md, and of the choice of sequences docs/theory/kernels.md.

    Raises:
        InputError: the architecture is an encoder-decoder, or the parametrization is a sweep.
    """
    p, a = parametrization, parametrization.architecture
    if a.kind == "encoder-decoder":
        raise InputError(
            "fidelity 'kernel' covers encoders and decoders; use moments or simulate for an encoder-decoder"
        )
    if p.skip.ndim != 1:
        raise InputError("fidelity 'kernel' takes one parametrization at a time; use moments for a sweep")
    stack = _Stack(p)
    parts, note = sequences(a, inputs)
    passes = [_passes(stack, part, keep, backward) for part, keep in parts]
    counts = np.array([a.seq_len if keep is None else keep.sum() for _, keep in parts], np.float64)
    forward = _Columns.pooled([ahead for ahead, _ in passes], counts).series()
    gradient = None
    if backward:
        columns = _Columns.pooled([back for _, back in passes if back is not None], counts)
        gradient = columns.series(relative_to=float(columns.log_variance["stream_out"][-1]))
    return Profile(
        source="theory",
        fidelity="kernel",
        architecture=a,
        scheme=p.scheme,
        input={
            "mean": 0.0,
            "variance": float(forward["stream_in"].variance[0]),
            "token_correlation": float(forward["stream_in"].token_correlation[0]),
        },
        forward=forward,
        gradient=gradient,
        statistics=sensitivity_gain(p),
        notes=(note,) if note else (),
    )


def _passes(
    stack: _Stack, inputs: InputStatistics, keep: NDArray[np.bool_] | None, backward: bool
) -> tuple[_Columns, _Columns | None]:
    """Forward and backward moments of one token kernel; `keep`: which positions count."""
    p, n = stack.p, stack.n
    start = State(input_kernel(p, inputs)).rescaled()
    length = 2 * max(1, math.isqrt(n // 2))
    checkpoints: dict[int, State] = {}
    forward, last = _Columns.empty(n, keep), start
    log_norm = np.zeros(n)
    for i, layer_in, branch, stream_out, own in stack.run(start, 0, n):
        if i % length == 0:
            checkpoints[i] = layer_in
        forward.put("stream_in", i, layer_in)
        forward.put("branch", i, branch)
        forward.put("stream_out", i, stream_out)
        last = stream_out
        if own is not None:
            log_norm[i] = math.log(max(float(own.mean()), 1e-300))
    if not backward:
        return forward, None
    top = top_kernel(p, inputs, last, float(token_share(p, log_norm)))
    return forward, _backward(stack, top, checkpoints, last, length, keep)


def _backward(
    stack: _Stack,
    top: tuple[FloatArray, FloatArray],
    checkpoints: dict[int, State],
    last: State,
    length: int,
    keep: NDArray[np.bool_] | None,
) -> _Columns:
    p, a, n = stack.p, stack.a, stack.n
    kernel, across = top
    if a.has_final_norm:
        own = np.diagonal(last.kernel) + a.norm_eps * math.exp(-min(max(last.log_scale, -600), 600))
        kernel = across = kernel / np.sqrt(np.outer(own, own))
    gradient = State(kernel).rescaled()
    columns = _Columns.empty(n, keep)
    held: State | None = None
    for first in sorted(checkpoints, reverse=True):
        segment = list(stack.run(checkpoints[first], first, min(first + length, n)))
        for i, layer_in, _, _, own_post in reversed(segment):
            columns.put("stream_out", i, gradient)
            at_sum = gradient
            if own_post is not None:
                arrived = State(across) if i == n - 1 else gradient
                gain = float(p.norm_output[i]) ** 2
                at_sum = State(
                    arrived.kernel * gain / np.sqrt(np.outer(own_post, own_post)), arrived.log_scale
                ).rescaled()
            at_branch = at_sum.times(float(p.branch[i]) ** 2)
            columns.put("branch", i, at_branch)
            sent = _through_branch(stack, i, layer_in, at_branch)
            if p.parallel[i]:  # both sublayers read one tensor: its total gradient is complete at the attention row
                held = sent
                continue
            total = at_sum.times(float(p.skip[i]) ** 2).plus(sent)
            if held is not None:
                total = total.plus(held)
                columns.put("stream_in", i + 1, total)
                held = None
            columns.put("stream_in", i, total)
            gradient = total
    return columns


def _through_branch(stack: _Stack, i: int, layer_in: State, gradient: State) -> State:
    """Gradient at the stream from the one at the branch's output."""
    p = stack.p
    at_output, log_scale = gradient.kernel, gradient.log_scale
    kernel, divisor = stack.read(i, layer_in)
    if p.placement[i] in (SANDWICH, RES_POST):
        raw = stack.raw_branch(i, layer_in)
        at_output, log_scale = at_output * stack.branch_norm(i, raw), log_scale - raw.log_scale
    back = stack.branch_back(i, kernel, at_output)
    if divisor is not None:
        back = back * p.norm_output[i] ** 2 / np.sqrt(np.outer(divisor, divisor))
    return State(back, log_scale).rescaled()
