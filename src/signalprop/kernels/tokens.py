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
from signalprop.inputs import InputStatistics, IntArray
from signalprop.kernels.attention import TokenAttention, rotation
from signalprop.moments import FloatArray
from signalprop.parametrization import PLACEMENTS, Parametrization
from signalprop.profile import POINTS, Profile, Series
from signalprop.theory import blocks
from signalprop.theory.embedding import embed
from signalprop.theory.head import coincidences, top_gradient
from signalprop.theory.network import sensitivity_gain, token_share

PRE, POST, SANDWICH = (PLACEMENTS.index(name) for name in ("pre", "post", "sandwich"))


@dataclass(frozen=True)
class State:
    """A kernel of shape (T, T) times exp(log_scale); the scale keeps deep stacks within range."""

    kernel: FloatArray
    log_scale: float = 0.0

    def rescaled(self) -> State:
        """The same kernel with mean diagonal 1 (unless it is zero)."""
        mean = float(np.mean(np.diagonal(self.kernel)))
        return State(self.kernel / mean, self.log_scale + math.log(mean)) if mean > 0 else self

    def plus(self, other: State) -> State:
        """The sum of two kernels."""
        top = max(self.log_scale, other.log_scale)
        left = self.kernel * math.exp(max(self.log_scale - top, -745.0))
        return State(left + other.kernel * math.exp(max(other.log_scale - top, -745.0)), top).rescaled()

    def times(self, factor: float) -> State:
        """The kernel times a number >= 0."""
        if factor > 0:
            return State(self.kernel, self.log_scale + math.log(factor))
        return State(self.kernel * 0.0, self.log_scale)

    def moments(self) -> tuple[float, float]:
        """(log variance, token correlation), averaged over positions and pairs of positions."""
        t = len(self.kernel)
        diagonal = float(np.trace(self.kernel))
        if diagonal <= 0:
            return -1e12, 0.0
        pairs = (float(self.kernel.sum()) - diagonal) / (t * (t - 1)) if t > 1 else 0.0
        return self.log_scale + math.log(diagonal / t), min(1.0, max(-1.0, pairs / (diagonal / t)))


def input_kernel(parametrization: Parametrization, inputs: InputStatistics) -> FloatArray:
    """Kernel of the stream that enters the first sublayer: coincidences of real ids, or the average correlation."""
    p, a = parametrization, parametrization.architecture
    start = embed(a, p.embedding, inputs)
    t = a.seq_len
    kernel = np.full((t, t), float(start.covariance))
    np.fill_diagonal(kernel, float(start.variance))
    if inputs.kind == "patches":
        return _patch_kernel(parametrization, inputs, kernel)
    if inputs.kind == "tokens" and inputs.tokens is not None and inputs.tokens.shape[1] == t:
        equal = _coincidences(inputs.tokens, inputs.tokens)
        e = p.embedding
        segment = inputs.segment_correlation * e.segment**2 if a.n_segments > 1 else e.segment**2
        positions = np.eye(t)
        if a.positions == "sinusoidal":
            # rows of the table are alike; what is the same for all features of a token is not part of its variance
            angle = np.arange(t)[:, None] * 10_000.0 ** (-np.arange(0, a.d_model, 2) / a.d_model)
            table = np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], 1)
            table -= table.mean(1, keepdims=True)
            positions = table @ table.T / table.shape[1]
        shared = (e.token**2 * equal + segment + e.position**2 * positions) * e.scale**2
        np.fill_diagonal(shared, (e.token**2 + e.segment**2 + e.position**2 * np.diagonal(positions)) * e.scale**2)
        total = np.diagonal(shared)
        if a.embedding_norm:
            shared = shared / np.sqrt(np.maximum(np.outer(total, total), 1e-300)) * e.norm_gain**2
        kept = 1 - (a.embedding_dropout or 0.0)
        np.fill_diagonal(shared, np.diagonal(shared) / kept)
        seen = (inputs.tokens >= 0).any(0)
        kernel = np.where(np.outer(seen, seen), shared, kernel)
    return kernel


def _patch_kernel(p: Parametrization, inputs: InputStatistics, average: FloatArray) -> FloatArray:
    """Kernel of embedded patches, position by position where second moments are known, with the class token first."""
    a, e = p.architecture, p.embedding
    t, first = a.seq_len, int(a.class_token)
    moments = inputs.second_moments
    if a.embedding_norm or moments is None or len(moments) != t - first:
        return average
    kernel = np.zeros((t, t))
    kernel[first:, first:] = (a.patch_dim * e.token**2 * moments + e.patch_bias**2) * e.scale**2
    own: FloatArray = np.diagonal(kernel) + (e.position * e.scale) ** 2
    if a.class_token:  # independent of the patches, and made of two rows of the position table's size
        own[0] = 2 * (e.position * e.scale) ** 2
    np.fill_diagonal(kernel, own / (1 - (a.embedding_dropout or 0.0)))
    return kernel


def top_kernel(
    parametrization: Parametrization, inputs: InputStatistics, last: State, log_token_share: float
) -> FloatArray:
    """Kernel of the gradient that cross-entropy sends to the head's input, in units of one position's gradient.

    Positions i and j share what equal targets and overlapping softmax outputs give (`signalprop.theory.head`); real ids
    enter position by position. Position 0 alone where a class token is read.
    """
    p, a, t = parametrization, parametrization.architecture, parametrization.architecture.seq_len
    if a.head == "classes" and a.class_token:
        return np.outer(np.arange(t) == 0, np.arange(t) == 0).astype(np.float64)
    if a.head == "none" or inputs.kind == "stream":
        f = inputs.loss_fraction
        kernel = np.full((t, t), f * f * max(0.0, inputs.target_correlation))
        np.fill_diagonal(kernel, f)
        return kernel
    own = np.diagonal(last.kernel)
    scale = np.sqrt(np.maximum(np.outer(own, own), 1e-300))
    variance = np.log(np.maximum(scale, 1e-300)) + last.log_scale
    top = top_gradient(p, variance, np.clip(last.kernel / scale, 0.0, 1.0), log_token_share)
    mean = coincidences(a, inputs)
    if inputs.targets is not None and inputs.tokens is not None and inputs.targets.shape[1] == t:
        y, x = inputs.targets, inputs.tokens
        both = ((y >= 0)[:, :, None] & (y >= 0)[:, None, :]).mean(0)
        one = (y >= 0).mean(0)
        read = np.where(y >= 0, x, -1)
        crossed = _coincidences(read, y)
        pairs = (_coincidences(y, y), _coincidences(read, read), (crossed + crossed.T) / 2)
    else:
        f = inputs.loss_fraction
        both, one = np.full((t, t), f * f), np.full(t, f)
        pairs = (np.full((t, t), mean.targets), np.full((t, t), mean.tokens), np.full((t, t), mean.crossed))
    kernel = both * np.asarray(top.covariance(*pairs)) / np.asarray(top.variance(mean.copied))
    np.fill_diagonal(kernel, one)
    return np.asarray(kernel)


def _coincidences(left: IntArray, right: IntArray) -> FloatArray:
    """Share of sequences in which `left` at i equals `right` at j, of those where both count (>= 0)."""
    t = left.shape[1]
    equal, counted = np.zeros((t, t)), np.zeros((t, t))
    for x, y in zip(left, right, strict=True):
        both = np.outer(x >= 0, y >= 0)
        counted += both
        equal += both & (x[:, None] == y[None, :])
    return np.asarray(equal / np.maximum(counted, 1))


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

    def attention(self, i: int, kernel: FloatArray) -> TokenAttention:
        return TokenAttention(
            kernel=kernel,
            qk=float(self.rows.qk[i]),
            d_model=self.a.d_model,
            causal=self.a.causal,
            dropout=self.a.attention_dropout or 0.0,
            rho=self.rho,
            omega=self.omega,
            query_bias=float(self.rows.query_bias[i]),
        )

    def branch(self, i: int, kernel: FloatArray) -> FloatArray:
        """Kernel of the branch (after its dropout) from the kernel that it reads."""
        rows, keep = self.rows, 1 - self.a.dropout
        if self.p.kind[i] == 0:
            values = self.attention(i, kernel).forward() * rows.value[i] + rows.value_bias[i]
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
            return self.attention(i, kernel).backward(dropped) * factor
        return dropped * self.feed_forward_back(i, kernel)

    def step(self, i: int, stream: State, layer_in: State) -> tuple[State, State, FloatArray | None]:
        """(stream_out, branch before its multiplier, per-token variance of a post-norm's input)."""
        p = self.p
        kernel, divisor = self.read(i, layer_in)
        branch = State(self.branch(i, kernel)).rescaled()
        if divisor is None:  # computed at a held size; beyond it the stream is scaled
            held = min(max(layer_in.log_scale, -27.6), 27.6)
            branch = State(branch.kernel, branch.log_scale + layer_in.log_scale - held)
        if p.placement[i] == SANDWICH:
            own = np.diagonal(branch.kernel) * math.exp(branch.log_scale) + self.a.norm_eps
            scale = math.exp(branch.log_scale) * p.post_norm_gain[i] ** 2
            branch = State(branch.kernel * scale / np.sqrt(np.outer(own, own))).rescaled()
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
        for i, layer_in, branch, _, own_post in reversed(segment):
            columns.put("stream_out", i, gradient)
            at_sum = gradient
            if own_post is not None:
                gain = float(p.norm_output[i]) ** 2
                at_sum = State(
                    gradient.kernel * gain / np.sqrt(np.outer(own_post, own_post)), gradient.log_scale
                ).rescaled()
            at_branch = at_sum.times(float(p.branch[i]) ** 2)
            columns.put("branch", i, at_branch)
            sent = _through_branch(stack, i, layer_in, branch, at_branch)
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


def _through_branch(stack: _Stack, i: int, layer_in: State, branch: State, gradient: State) -> State:
    """Gradient at the stream from the one at the branch's output."""
    p, a = stack.p, stack.a
    at_output = gradient.kernel
    log_scale = gradient.log_scale
    kernel, divisor = stack.read(i, layer_in)
    if p.placement[i] == SANDWICH:
        raw = np.diagonal(stack.branch(i, kernel)) + a.norm_eps
        at_output = at_output * p.post_norm_gain[i] ** 2 / np.sqrt(np.outer(raw, raw))
    back = stack.branch_back(i, kernel, at_output)
    if divisor is not None:
        back = back * p.norm_output[i] ** 2 / np.sqrt(np.outer(divisor, divisor))
    return State(back, log_scale).rescaled()
