"""Fidelity `kernel`: the token kernel K_ij = E x_i . x_j / d_model through every sublayer, and back.

Where positions differ, averages over them do not compound rightly: in a decoder an early token is read by every later
one, so gradients pile up on it with every layer; a class token carries the whole gradient. Exact statistics of real
token ids enter position by position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from signalprop.activations import dual
from signalprop.errors import InputError
from signalprop.inputs import InputStatistics
from signalprop.kernels.attention import TokenAttention, rotation
from signalprop.kernels.ends import input_kernel, top_kernel
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
    q = dual(name, variance, np.cos(_ANGLES))
    place = np.arccos(correlation) / _ANGLES[1]
    left = np.minimum(place.astype(np.int64), len(_ANGLES) - 2)
    share = place - left

    def pick(values: FloatArray) -> FloatArray:
        return np.asarray(values[left] * (1 - share) + values[left + 1] * share)

    return pick(np.asarray(q.covariance_moment)), pick(np.asarray(q.slope_moment))


@dataclass
class _Columns:
    """Moments collected sublayer by sublayer."""

    log_variance: dict[str, FloatArray]
    correlation: dict[str, FloatArray]

    @staticmethod
    def empty(n: int) -> _Columns:
        return _Columns({k: np.zeros(n) for k in POINTS}, {k: np.zeros(n) for k in POINTS})

    def put(self, point: str, i: int, state: State) -> None:
        self.log_variance[point][i], self.correlation[point][i] = state.moments()

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

    O(T^2) work per sublayer and O(T^2 sqrt(n_sublayers)) memory (segments of the forward pass are computed again for
    the backward one). Measured errors: docs/accuracy.md.

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
    start = State(input_kernel(p, inputs)).rescaled()
    n = p.n_sublayers
    length = 2 * max(1, math.isqrt(n // 2))
    checkpoints: dict[int, State] = {}
    forward, last = _Columns.empty(n), start
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
    log_variance, correlation = start.moments()
    top = top_kernel(p, inputs, last, float(token_share(p, log_norm)))
    return Profile(
        source="theory",
        fidelity="kernel",
        architecture=a,
        scheme=p.scheme,
        input={"mean": 0.0, "variance": math.exp(log_variance), "token_correlation": correlation},
        forward=forward.series(),
        gradient=_backward(stack, top, checkpoints, last, length) if backward else None,
        statistics=sensitivity_gain(p),
    )


def _backward(
    stack: _Stack, top: FloatArray, checkpoints: dict[int, State], last: State, length: int
) -> dict[str, Series]:
    p, a, n = stack.p, stack.a, stack.n
    kernel = top
    if a.has_final_norm:
        own = np.diagonal(last.kernel) + a.norm_eps * math.exp(-min(max(last.log_scale, -600), 600))
        kernel = kernel / np.sqrt(np.outer(own, own))
    gradient = State(kernel).rescaled()
    columns = _Columns.empty(n)
    held: State | None = None
    for first in sorted(checkpoints, reverse=True):
        segment = list(stack.run(checkpoints[first], first, min(first + length, n)))
        for i, layer_in, _, _, own_post in reversed(segment):
            columns.put("stream_out", i, gradient)
            at_sum = gradient
            if own_post is not None:
                gain = float(p.norm_output[i]) ** 2
                at_sum = State(
                    gradient.kernel * gain / np.sqrt(np.outer(own_post, own_post)), gradient.log_scale
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
    return columns.series(relative_to=float(columns.log_variance["stream_out"][n - 1]))


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
