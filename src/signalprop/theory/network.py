"""The whole network by one recursion over the sublayers of a Parametrization: fidelity `moments`.

Forward, the state is (log variance, token correlation) of the stream; backward, (log gradient variance, gradient
token correlation), with each branch's backward map evaluated for all sublayers at once. Logarithms carry the products,
so that 100,000 layers neither over- nor underflow. TGS section 2.3 and v1 appendix G, generalised;
`docs/theory/network.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import Array, FloatArray, Moments, ratio
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.results.profile import POINTS, Profile, Series
from signalprop.theory import blocks
from signalprop.theory.embedding import embed
from signalprop.theory.head import AtTop, gradient_at_top
from signalprop.theory.logs import NO_SIGNAL, correlation, exp, log, log_add, plain, row, safe_exp

PRE, POST, SANDWICH, RES_POST = (PLACEMENTS.index(name) for name in ("pre", "post", "sandwich", "res-post"))


@dataclass(frozen=True)
class _Met:
    """What branches and norms meet on the way forward, as their backward maps need it; arrays (..., sublayers)."""

    second: FloatArray  # second moment of what the branch reads
    r_read: FloatArray  # its token correlation
    norm: FloatArray  # log of the variance (plus epsilon) by which the norm divides; 0 without one
    raw_branch: FloatArray  # log variance of the branch before a norm on it
    memory: tuple[Array, Array] | None  # second moment and correlation of the encoder's normed output


@dataclass(frozen=True)
class _Forward(_Met):
    """What the backward pass needs of the forward pass; arrays (..., sublayers), variances as logarithms."""

    stream_in: FloatArray
    stream_out: FloatArray
    branch: FloatArray
    r_in: FloatArray
    r_out: FloatArray
    r_branch: FloatArray
    mean_in: FloatArray
    mean_out: FloatArray
    memory_norm: Array  # log of what the encoder's final norm divides by
    token_share: Array  # log of the squared factor on the token's row in the last stream


def predict_moments(parametrization: Parametrization, inputs: InputStatistics, *, backward: bool = True) -> Profile:
    """Moments at every probe point by the closed-form recursion; a sweep gives arrays with its leading axes.

    Bidirectional stacks: median errors of 1-2 % (docs/accuracy.md). Causal stacks: position averages do not compound
    rightly there, gradients of early layers can be several times off; `signalprop.kernels` is right for those.

    Raises:
        InputError: attention is shaped, or has ALiBi: how much a token weighs depends on where it stands.
    """
    p = parametrization
    if is_shaped(p):
        raise InputError(
            "fidelity 'moments' averages over all tokens alike, and attention here is "
            f"{p.shaping.kind if p.shaping.kind != 'none' else 'ALiBi'}; expected fidelity kernel or simulate"
        )
    start = embed(p.architecture, p.embedding, inputs)
    decoder_start = None
    if p.architecture.kind == "encoder-decoder":
        decoder_start = embed(p.architecture, p.embedding, inputs.of_decoder, decoder=True)

    def passes(part: Parametrization) -> tuple[dict[str, Series], dict[str, Series] | None]:
        rows = blocks.Rows.of(part)
        f = _forward(part, rows, start, decoder_start)
        forward = {
            "stream_in": Series.of(log_variance=f.stream_in, token_correlation=f.r_in, mean=f.mean_in),
            "branch": Series.of(log_variance=f.branch, token_correlation=f.r_branch),
            "stream_out": Series.of(log_variance=f.stream_out, token_correlation=f.r_out, mean=f.mean_out),
        }
        if not backward:
            return forward, None
        top = gradient_at_top(part, inputs, f.stream_out[..., -1], f.r_out[..., -1], f.token_share)
        return forward, _backward(part, rows, f, top)

    forward, gradient = _in_parts(p, passes)
    return Profile(
        source="theory",
        fidelity="moments",
        architecture=p.architecture,
        scheme=p.scheme,
        input={
            "mean": float(start.mean),
            "variance": float(start.variance),
            "token_correlation": float(start.token_correlation),
        },
        forward=forward,
        gradient=gradient,
        statistics=sensitivity_gain(p),
    )


def is_shaped(p: Parametrization) -> bool:
    """Whether attention weights depend on positions at zero scores."""
    return p.shaping.kind != "none" or p.architecture.positions == "alibi"


_PART = 5000  # members of a sweep at a time: long enough loops for two threads, small enough arrays for memory
Passes = tuple[dict[str, Series], dict[str, Series] | None]


def _in_parts(p: Parametrization, passes: Callable[[Parametrization], Passes]) -> Passes:
    """`passes` of a sweep, part by part, on all cores (NumPy lets go of the interpreter while it computes)."""
    if p.skip.ndim != 2 or len(p.skip) <= _PART:
        return passes(p)
    parts = [p.members(slice(i, i + _PART)) for i in range(0, len(p.skip), _PART)]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(passes, parts))
    forward = {point: Series.joined([part[0][point] for part in done]) for point in POINTS}
    gradients = [part[1] for part in done]
    if gradients[0] is None:
        return forward, None
    return forward, {point: Series.joined([g[point] for g in gradients if g is not None]) for point in POINTS}


def sensitivity_gain(p: Parametrization) -> dict[str, Any]:
    """The squared ratio (beta / lambda)^2 per sublayer, for `Profile.sensitivity`: 1 where lambda is 0, else finite."""
    skip = np.where(p.parallel, np.roll(p.skip, 1, -1), p.skip)  # a parallel layer has the skip of its attention row
    with np.errstate(over="ignore"):
        gain = np.divide(p.branch, skip, out=np.ones_like(p.branch), where=skip != 0) ** 2
    return {"branch_gain": np.minimum(gain, np.finfo(np.float64).max)}


def _forward(p: Parametrization, rows: blocks.Rows, start: Moments, decoder_start: Moments | None) -> _Forward:
    a = p.architecture
    lead = p.skip.shape[:-1]
    n = p.n_sublayers
    names = ("stream_in", "stream_out", "branch", "r_in", "r_out", "r_branch", "mean_in", "mean_out", "second",
             "r_read", "norm", "raw_branch")  # fmt: skip
    out: dict[str, FloatArray] = {name: np.empty((n, *lead)) for name in names}
    kinds: list[int] = p.kind.tolist()
    shapes = {(s, c): blocks.shape_of(a, s, cross=c) for s, c in {(int(s), False) for s in p.stack} | {(1, True)}}
    placements, parallels = p.placement.tolist(), p.parallel.tolist()
    log_skip2, log_branch2 = log(p.skip**2), log(p.branch**2)
    log_gain2, log_post_gain2 = log(p.norm_output**2), log(p.post_norm_gain**2)
    epsilon = log(float(a.norm_eps))
    log_v, r, mean = _start(start, lead)
    memory: tuple[Array, Array] | None = None
    memory_norm: Array = 0.0
    layer_in: tuple[Array, Array, Array] = (log_v, r, mean)
    for i in range(n):
        stack = int(p.stack[i])
        if decoder_start is not None and i == 2 * a.n_layers:
            memory, memory_norm = _memory(a, p, log_v, r)
            log_v, r, mean = _start(decoder_start, lead)
        if not parallels[i]:
            layer_in = (log_v, r, mean)
        read_v, read_r, read_mean = layer_in
        second, r_read, norm, beyond = _read(a, p, i, placements[i], read_v, read_r, read_mean)
        made = _branch(rows, i, kinds[i], shapes[stack, kinds[i] == 1], (second, r_read), memory)
        raw = log(made.variance)
        branch_v, branch_r = raw, correlation(made.covariance, made.variance)
        if norm is None:  # a stream that is read as it is may be of any size: the branch was computed at a held one
            raw = branch_v = raw + beyond
            norm = 0.0
        if placements[i] in (SANDWICH, RES_POST):
            gain2 = log_post_gain2 if placements[i] == SANDWICH else log_gain2
            branch_v = row(gain2, i) + raw - log_add(epsilon, raw)
        log_skip = log_v if parallels[i] else row(log_skip2, i) + log_v
        log_branch = row(log_branch2, i) + branch_v
        total = log_add(log_skip, log_branch)
        share = exp(log_branch - total)  # of the branch in the sum's variance
        new_r = share * branch_r + (1 - share) * r
        new_mean = mean if parallels[i] else _within(mean * row(p.skip, i), 1e150)
        if placements[i] == POST:
            norm = log_add(total, epsilon)
            total, new_mean = total - norm + row(log_gain2, i), mean * 0.0
        for name, value in zip(
            names,
            (read_v, total, branch_v, read_r, new_r, branch_r, read_mean, new_mean, second, r_read, norm, raw),
            strict=True,
        ):
            out[name][i] = value
        log_v, r, mean = total, new_r, new_mean
    columns = {name: np.moveaxis(value, 0, -1) for name, value in out.items()}
    share = token_share(p, columns["norm"])
    return _Forward(**columns, memory=memory, memory_norm=memory_norm, token_share=share)


def token_share(p: Parametrization, log_norm: FloatArray) -> Array:
    """Log of alpha^2: the token's row of the table stands in the last stream times alpha (the skip path alone).

    Args:
        log_norm: log of the variance by which each sublayer's norm divides (used where it is a post-norm).
    """
    a = p.architecture
    last = p.stack == p.stack[-1]
    e = p.embedding
    start = log(e.scale**2)
    if a.embedding_norm:
        total = (e.token**2 + e.position**2 + e.segment**2) * e.scale**2
        start += log(float(ratio(e.norm_gain**2, total)))
    steps = np.where(p.parallel, 0.0, log(p.skip**2))
    steps = steps + np.where(p.placement == POST, log(p.norm_output**2) - log_norm, 0.0)
    return plain(start + np.sum(np.where(last, steps, 0.0), axis=-1))


def _branch(
    rows: blocks.Rows,
    i: int | blocks.Rowset,
    kind: int,
    shape: blocks.Shape,
    read: tuple[Array, Array],
    memory: tuple[Array, Array] | None,
) -> blocks.Branch:
    """The branch of a sublayer, or of several of one kind, from the second moment and correlation that it reads."""
    if kind == 2:
        return blocks.feed_forward(rows, i, shape, *read)
    if kind == 0:
        return blocks.self_attention(rows, i, shape, *read)
    assert memory is not None
    return blocks.cross_attention(rows, i, shape, read, memory)


def _start(moments: Moments, lead: tuple[int, ...]) -> tuple[Array, Array, Array]:
    log_v = log(float(moments.variance))
    values = (log_v, float(moments.token_correlation), float(moments.mean))
    return tuple(np.full(lead, v) if lead else v for v in values)  # type: ignore[return-value]


def _read(
    a: Architecture,
    p: Parametrization,
    i: int | blocks.Rowset,
    placement: int,
    log_v: Array,
    r: Array,
    mean: Array,
) -> tuple[Array, Array, Array | None, Array]:
    """What the branch reads: second moment, correlation of second moments; log of what the norm divides by (None: no
    norm); and log of what a second moment of extreme size was divided by, 0 with a norm."""
    log_mean2 = log(mean**2)
    if placement in (PRE, SANDWICH):
        if a.norm == "layernorm":
            log_mean2 = log_mean2 * 0.0 + NO_SIGNAL  # the norm takes the mean away
        log_second = log_add(log_v, log_mean2)
        norm = log_add(log_second, log(float(a.norm_eps)))
        second = safe_exp(log_second - norm) * row(p.norm_output, i) ** 2
        return plain(second), _with_mean(log_second, log_mean2, r), norm, log_v * 0.0
    log_second = log_add(log_v, log_mean2)
    held = _held(log_second)
    return plain(safe_exp(held)), _with_mean(log_second, log_mean2, r), None, log_second - held


def _with_mean(log_second: Array, log_mean2: Array, r: Array) -> Array:
    """Correlation of second moments: a mean is shared by all tokens."""
    share = exp(log_mean2 - log_second)
    return share + (1 - share) * r


def _held(log_v: Array) -> Array:
    """Where a branch reads an un-normed stream of extreme size, it is computed at this size and scaled: there the
    activations that can be reached are homogeneous of degree 1 or bounded (squared ReLU and gated blocks are not: their
    growth is a lower bound, and no double holds their streams anyway)."""
    return _within(log_v, 27.6)


def _within(x: Array, bound: float) -> Array:
    return min(max(x, -bound), bound) if isinstance(x, float) else np.asarray(np.clip(x, -bound, bound))


def _memory(a: Architecture, p: Parametrization, log_v: Array, r: Array) -> tuple[tuple[Array, Array], Array]:
    if not a.has_final_norm:  # of any size; held where products with other variances still fit a double
        return (safe_exp(_within(log_v, 200.0)), r), log_v * 0.0
    norm = log_add(log_v, log(float(a.norm_eps)))
    return (safe_exp(log_v - norm) * p.head.final_norm_gain**2, r), norm


def _backward(p: Parametrization, rows: blocks.Rows, f: _Forward, top: AtTop) -> dict[str, Series]:
    a = p.architecture
    n, lead = p.n_sublayers, p.skip.shape[:-1]
    maps, to_memory = _backward_maps(p, rows, f)
    maps = _from_the_sum(p, f, maps)
    skip2, log_branch2 = p.skip**2, log(p.branch**2)
    norm_gain = log(p.norm_output**2) - f.norm
    out = {(point, name): np.empty((n, *lead)) for point in POINTS for name in ("log", "r")}
    log_g: Array = np.zeros(lead) if lead else 0.0
    rho, kept, kept_rho = (np.broadcast_to(np.asarray(x, float), lead).copy() if lead else float(x) for x in top)
    memory_g: tuple[Array, Array] = (log_g + NO_SIGNAL, log_g)  # log variance, covariance in its units
    placements, parallels = p.placement.tolist(), p.parallel.tolist()
    held: tuple[Array, Array] | None = None  # what a parallel feed-forward sends back: variance, covariance
    for i in range(n - 1, -1, -1):
        if a.kind == "encoder-decoder" and i == 2 * a.n_layers - 1:
            log_g, rho = memory_g[0] - f.memory_norm + log(p.head.final_norm_gain**2), memory_g[1]
        out["stream_out", "log"][i], out["stream_out", "r"][i] = log_g, rho
        log_sum = log_g
        if placements[i] == POST:
            log_sum = log_g + row(norm_gain, i)
            if i == n - 1:
                log_sum, rho = log_sum + log(kept), kept_rho
        out["branch", "log"][i] = log_sum + row(log_branch2, i)
        out["branch", "r"][i] = rho
        back_v = row(maps.vv, i) + row(maps.vc, i) * rho
        back_c = row(maps.cv, i) + row(maps.cc, i) * rho
        if p.kind[i] == 1:
            memory_v = row(to_memory.vv, i) + row(to_memory.vc, i) * rho
            memory_c = row(to_memory.cv, i) + row(to_memory.cc, i) * rho
            sent = log_sum + row(log_branch2, i) + log(memory_v)
            memory_g = _add(memory_g, sent, correlation(memory_c, memory_v))
        if parallels[i]:  # attention reads the same tensor and meets the same gradient: the total is made there
            held = (back_v, back_c)
            continue
        lam2 = row(skip2, i)
        variance, covariance = lam2 + back_v, lam2 * rho + back_c
        if held is not None:
            variance, covariance = variance + held[0], covariance + held[1]
        new_log = log_sum + log(variance)
        new_rho = correlation(covariance, variance)
        if held is not None:  # both rows read one tensor: its total gradient stands on both
            out["stream_in", "log"][i + 1], out["stream_in", "r"][i + 1] = new_log, new_rho
            held = None
        out["stream_in", "log"][i], out["stream_in", "r"][i] = new_log, new_rho
        log_g, rho = new_log, new_rho
    last = out["stream_out", "log"][n - 1].copy()

    def series(point: str) -> Series:
        return Series.of(
            log_variance=np.moveaxis(out[point, "log"] - last, 0, -1),
            token_correlation=np.moveaxis(out[point, "r"], 0, -1),
        )

    return {point: series(point) for point in POINTS}


def _from_the_sum(p: Parametrization, f: _Met, maps: blocks.BranchBackward) -> blocks.BranchBackward:
    """Maps of whole branches, from the gradient at the sum to the stream: multiplier and norms included."""
    norm_gain = log(p.norm_output**2) - f.norm
    inner = log(p.branch**2) + np.where((p.placement == PRE) | (p.placement == SANDWICH), norm_gain, 0.0)
    on_branch = log(np.where(p.placement == SANDWICH, p.post_norm_gain, p.norm_output) ** 2)
    on_branch = on_branch - np.logaddexp(f.raw_branch, log(float(p.architecture.norm_eps)))
    inner = inner + np.where((p.placement == SANDWICH) | (p.placement == RES_POST), on_branch, 0.0)
    scale = safe_exp(inner)
    return blocks.BranchBackward(*(scale * column for column in maps))


def _backward_maps(
    p: Parametrization, rows: blocks.Rows, f: _Met
) -> tuple[blocks.BranchBackward, blocks.BranchBackward]:
    """Backward maps of all sublayers, (..., n); and of cross-attention to the encoder's output."""
    shape = p.skip.shape
    maps = blocks.BranchBackward(*(np.zeros(shape) for _ in range(4)))
    to_memory = blocks.BranchBackward(*(np.zeros(shape) for _ in range(4)))

    def put(target: blocks.BranchBackward, where: Any, values: blocks.BranchBackward) -> None:
        for column, value in zip(target, values, strict=True):
            column[..., where] = value

    for stack in sorted(set(p.stack.tolist())):
        for kind in (0, 1, 2):
            where = np.flatnonzero((p.stack == stack) & (p.kind == kind))
            if not len(where):
                continue
            shape_of = blocks.shape_of(p.architecture, stack, cross=kind == 1)
            second, r = f.second[..., where], f.r_read[..., where]
            if kind == 2:
                put(maps, where, blocks.feed_forward_backward(rows, where, shape_of, second, r))
            elif kind == 0:
                put(maps, where, blocks.self_attention_backward(rows, where, shape_of, second, r))
            else:
                assert f.memory is not None
                key = tuple(np.broadcast_to(np.asarray(m)[..., None], second.shape) for m in f.memory)
                query, memory = blocks.cross_attention_backward(rows, where, shape_of, (second, r), (key[0], key[1]))
                put(maps, where, query)
                put(to_memory, where, memory)
    return maps, to_memory


def _add(state: tuple[Array, Array], log_v: Array, r: Array) -> tuple[Array, Array]:
    total = log_add(state[0], log_v)
    share = exp(log_v - total)
    return total, share * r + (1 - share) * state[1]


class Returned(NamedTuple):
    """How gradients come back through every sublayer, arrays (..., sublayers).

    Attributes:
        maps: from the gradient at the sublayer's output to what its branch sends to the stream that it reads.
        skip: the factor on the gradient along the skip path; a norm behind the sum is in both.
        skip_share: of the skip path in the variance of the sum.
    """

    maps: blocks.BranchBackward
    skip: FloatArray
    skip_share: FloatArray


def returned(parametrization: Parametrization, profile: Profile) -> Returned:
    """The backward pass of every sublayer at the forward signal that a profile tells of, predicted or measured."""
    p = parametrization
    rows = blocks.Rows.of(p)
    f = _met(p, rows, profile)
    maps = _from_the_sum(p, f, _backward_maps(p, rows, f)[0])
    skip = np.where(p.parallel, 1.0, p.skip)  # a parallel layer has the skip of its attention row
    log_skip = log(skip**2) + np.maximum(profile.forward["stream_in"].log_variance, NO_SIGNAL)
    log_branch = log(p.branch**2) + np.maximum(profile.forward["branch"].log_variance, NO_SIGNAL)
    log_sum = np.logaddexp(log_skip, log_branch)
    norm = np.logaddexp(log_sum, log(float(p.architecture.norm_eps)))
    after = safe_exp(np.where(p.placement == POST, log(p.norm_output**2) - norm, 0.0))
    return Returned(
        maps=blocks.BranchBackward(*(after * column for column in maps)),
        skip=np.sqrt(after) * skip,
        skip_share=np.exp(log_skip - log_sum),
    )


def _met(p: Parametrization, rows: blocks.Rows, profile: Profile) -> _Met:
    """What branches and norms met in the forward pass of a profile; norms behind the sum apart."""
    a = p.architecture
    stream, after = profile.forward["stream_in"], profile.forward["stream_out"]
    log_v = np.maximum(stream.log_variance, NO_SIGNAL)
    second, r_read, norm, raw = (np.zeros(log_v.shape) for _ in range(4))
    memory = spread = None
    if a.kind == "encoder-decoder":
        last = 2 * a.n_layers - 1
        memory, _ = _memory(a, p, after.log_variance[..., last], after.token_correlation[..., last])
        spread = np.asarray(memory[0])[..., None], np.asarray(memory[1])[..., None]  # one for many sublayers
    groups = sorted(set(zip(p.placement.tolist(), p.stack.tolist(), p.kind.tolist(), strict=True)))
    for placement, stack, kind in groups:
        i = np.flatnonzero((p.placement == placement) & (p.stack == stack) & (p.kind == kind))
        read = log_v[..., i], stream.token_correlation[..., i], stream.mean[..., i]
        second[..., i], r_read[..., i], divisor, beyond = _read(a, p, i, placement, *read)
        norm[..., i] = 0.0 if divisor is None else divisor
        if placement in (SANDWICH, RES_POST):
            shape = blocks.shape_of(a, stack, cross=kind == 1)
            made = _branch(rows, i, kind, shape, (second[..., i], r_read[..., i]), spread)
            raw[..., i] = log(np.asarray(made.variance)) + (beyond if divisor is None else 0.0)
    return _Met(second=second, r_read=r_read, norm=norm, raw_branch=raw, memory=memory)
