"""The whole network by one recursion over the sublayers of a Parametrization: fidelity `moments`.

Forward, the state is (log variance, token correlation, mean) of the stream; backward, (log gradient variance, gradient
token correlation), with each branch's backward map evaluated for all sublayers at once. Logarithms carry the products,
so that 100,000 layers neither over- nor underflow. TGS section 2.3 and v1 appendix G, generalised;
`docs/theory/network.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_starts
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER
from signalprop.results.profile import POINTS, Profile
from signalprop.results.series import Series
from signalprop.theory.branches import placed
from signalprop.theory.embedding import embed
from signalprop.theory.log_arithmetic import log, plain
from signalprop.theory.loss_gradient import gradient_at_top
from signalprop.theory.scalar_recursion import Ahead, Back


def predict_moments(parametrization: Parametrization, inputs: InputStatistics, *, backward: bool = True) -> Profile:
    """Moments of one stream at every probe point by the closed-form recursion; a sweep gives arrays with its axes.

    Bidirectional stacks: median errors of 1-2 % (records/accuracy.md). Causal stacks: position averages do not compound
    rightly there, gradients of early layers can be several times off; `signalprop.kernels` is right for those.

    Raises:
        InputError: attention is shaped, or has ALiBi: how much a token weighs depends on where it stands.
    """
    p = parametrization
    check_averages(p)
    a = p.architecture
    starts = [embed(a, p.embedding, inputs)]
    if a.kind == "encoder-decoder":
        starts.append(embed(a, p.embedding, inputs.of_decoder, decoder=True))

    def passes(part: Parametrization) -> tuple[dict[str, Series], dict[str, Series] | None]:
        ahead = Ahead(part)
        stream = ahead.run(starts)
        if not backward:
            return ahead.series(), None
        top = gradient_at_top(part, inputs, stream[0], stream[1], token_share(part, ahead.columns("norm")))
        return ahead.series(), Back(part, ahead, top).run()

    forward, gradient = _in_parts(p, passes)
    return Profile(
        source="theory",
        fidelity="moments",
        architecture=p.architecture,
        scheme=p.scheme,
        input={
            "mean": float(starts[0].mean),
            "variance": float(starts[0].variance),
            "token_correlation": float(starts[0].token_correlation),
        },
        forward=forward,
        gradient=gradient,
        statistics=sensitivity_gain(p),
    )


def check_averages(p: Parametrization) -> None:
    """Raise InputError where averages over positions say nothing: attention is shaped, or has ALiBi."""
    if is_shaped(p):
        raise InputError(
            "fidelity 'moments' averages over all tokens, and attention here depends on positions: "
            f"{p.shaping.kind if p.shaping.kind != 'none' else 'ALiBi'}; expected fidelity kernel or simulate"
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
    from concurrent.futures import ThreadPoolExecutor  # with logging and queues, which one prediction does not need

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
    starts = layer_starts(p)
    first = np.repeat(starts, np.diff(starts, append=p.n_sublayers))
    skip = np.where(p.parallel, p.skip[..., first], p.skip)  # a parallel layer has the skip of its first row
    with np.errstate(over="ignore"):
        gain = np.divide(p.branch, skip, out=np.ones_like(p.branch), where=skip != 0) ** 2
    return {"branch_gain": np.minimum(gain, np.finfo(np.float64).max)}


def token_share(p: Parametrization, log_norm: FloatArray) -> Array:
    """ln of alpha^2: the token's row of the table stands in the last stream times alpha (the skip path alone).

    Args:
        log_norm: ln of the variance by which each sublayer's norm divides (used where it is a post-norm).
    """
    steps = np.where(p.parallel, 0.0, log(p.skip**2))
    steps = steps + np.where(placed(p, NORM_AFTER), log(p.norm_output**2) - log_norm, 0.0)
    return plain(log_of_row(p) + np.sum(np.where(p.stack == p.stack[-1], steps, 0.0), axis=-1))


def log_of_row(p: Parametrization) -> Array:
    """ln of alpha^2 where the stream enters the first sublayer: scale and norm of the embedding."""
    e, start = p.embedding, log(p.embedding.scale**2)
    if not p.architecture.embedding_norm:
        return start
    total = (e.token**2 + e.position**2 + e.segment**2) * e.scale**2
    return start + log(float(ratio(e.norm_gain**2, total + p.architecture.norm_eps)))
