"""What the numbers of a diagnosis mean, in words: faults first, then what the depth does, with the numbers it rests on.

Rules compare a layer with its neighbours, with what theory predicts from the live weights, or with a fixed bound. The
bounds stand here, each with what healthy models reach: six trained checkpoints, without a fault (docs/diagnoses.md,
which lists how near each comes to every bound), and small ones at the start and after 200 steps (tests/diagnosis). The
faults that they have to find are planted in tests/diagnosis/test_faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from signalprop.diagnosis.result import ONE_SCALE, Cast, Diagnosis, LayerSignal, Removal, Verdict, Weights
from signalprop.network.moments import FloatArray
from signalprop.theory.bounds import growth_exponent
from signalprop.watching.first_positions import MASSIVE

# Layers on either side that a layer's weights are compared with.
NEIGHBOURS = 4
# A weight's standard deviation over the median of its neighbours': larger, and smaller. Trained: up to 2.58 (Qwen2.5,
# layer 2, feed-forward; Whisper 1.92) and down to 0.346 (SmolLM2's first values; Qwen2.5 0.386).
LARGE_WEIGHT, SMALL_WEIGHT = 3.0, 0.2
# Share of a head in its layer's output, relative to an equal share, below which it is dead. Trained: 0.023 (Qwen2.5).
DEAD_HEAD = 1e-6
# Relative error of the factor between a norm and the branch that reads it. Trained: 1e-4 in float32, 5e-4 in bfloat16.
NORM_OFF = 0.05
# Entropy of attention over that of equal weights, mean over heads. Trained: 0.23 (SmolLM2).
ONE_HOT = 0.02
# Token correlation, and effective rank, at which tokens have grown alike. Trained: 0.964 and 1.19 (Gemma 3), 0.79 and
# 2.8 (Whisper); of rank 1.24 is a small model that has learnt how frequent tokens are and little else.
ALIKE, ONE_DIRECTION = 0.98, 1.1
# Largest entry over the root mean square, and effective rank, where a few features are what tokens share (Gemma 3: 26
# to 131, and 1.19 to 5.6). SmolLM2 has entries of 193 whose tokens stay apart.
FEW_FEATURES, FEW_DIRECTIONS = 20.0, 1.5
# Loss that removing an idle layer costs at most, in nats per token; its standard error has to be below that, too.
# Cheapest layers: 0.065 (SmolLM2), 0.30 (Gemma 3), 1.1 (Whisper), and -0.08 in Qwen2.5, whose layer 8 is idle there.
IDLE_LOSS = 0.02
# Loss that the dearest layer costs where any counts. Trained: 1.7 to 12; before training, and soon after, up to 0.07.
COUNTING_LOSS = 0.1
# |J - I| of an idle layer, where layers were not removed. Trained: 0.37 (Whisper).
IDLE_JACOBIAN = 0.1
# Gradient variance over the layers, largest over smallest. Trained: 6.0e3 (Gemma 3), 423 (Whisper).
GRADIENT_RANGE = 1e5
# Variance after the last layer over that after the first from which growth is told. Not a fault at any size.
GROWN = 4.0
# Loss that a cast may cost, in nats per token, beside three standard errors. bfloat16 costs SmolLM2 0.000.
CAST_LOSS = 0.01


def verdicts(diagnosis: Diagnosis, expected: str = "") -> tuple[Verdict, ...]:
    """All findings, the most severe first.

    Args:
        expected: name of the scheme that the model is meant to carry, '' if none was claimed.
    """
    rules: tuple[Callable[[Diagnosis], Iterable[Verdict]], ...] = (
        _not_finite,
        _norms_off,
        _deepnorm_gain,
        partial(_scaling_missing, expected=expected),
        _odd_weights,
        _silent_layers,
        _dead_heads,
        _one_hot_attention,
        _collapse,
        _gradients,
        _idle,
        _growth,
        _massive,
        _casts,
    )
    found = [verdict for rule in rules for verdict in rule(diagnosis)]
    order = {"fault": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda verdict: order[verdict.severity]))


def ranges(layers: Sequence[int]) -> str:
    """Layer numbers as inclusive ranges: `3, 7-9`."""
    parts: list[list[int]] = []
    for layer in sorted(set(layers)):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _named(layers: Sequence[int]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {ranges(layers)}"


# --- faults ------------------------------------------------------------------------------------------------------


def _not_finite(d: Diagnosis) -> Iterable[Verdict]:
    bad = [item.layer for item in d.signal if not item.finite]
    if bad:
        first = bad[0]
        weights = next((w for w in d.weights if w.layer == first), None)
        broken = [role for role, std in weights.std.items() if std is None] if weights else []
        reads = next(item.variance_in for item in d.signal if item.layer == first)
        if broken:
            cause = f"its {', '.join(broken)} weights hold NaN or infinite values"
        elif reads is None:
            cause = "what it reads is not finite already: look at the embeddings and the input"
        else:
            cause = "its matrices are finite: a bias or a gain that is not, an overflow (float16?), or a division by 0"
        yield Verdict(
            severity="fault",
            kind="not finite",
            layers=(first,),
            text=f"layer {first} is the first that outputs NaN or infinite values"
            + (f", and {_named(bad[1:])} pass{'es' if len(bad) == 2 else ''} them on" if len(bad) > 1 else ""),
            cause=cause,
            advice="restore the layer from the last good checkpoint, or run in bfloat16 or float32",
        )


def _norms_off(d: Diagnosis) -> Iterable[Verdict]:
    """What a branch reads is what its norm makes of the stream, times the scale that the model is known to have."""
    off: dict[int, tuple[float, float]] = {}
    for signal, weights in _pairs(d):
        for measured, scale in zip(signal.norm_factor, weights.norm_scale, strict=False):
            if measured is not None and scale and abs(measured / scale - 1) > NORM_OFF:
                off[signal.layer] = (measured, scale)
    if off:
        layers = tuple(off)
        measured, scale = off[layers[0]]
        yield Verdict(
            severity="fault",
            kind="norm output off",
            layers=layers,
            text=f"{_named(layers)}: branches read {measured:.3g} times what their norm makes of the stream by its "
            f"weights; expected {scale:.3g}",
            cause="a factor on the norm that is not among the weights, such as a scale kept in a buffer that "
            "materialising from the meta device (to_empty) has erased",
            advice="set the scale again after to_empty, or keep it as a Python number (signalprop.apply does)",
        )


def _deepnorm_gain(d: Diagnosis) -> Iterable[Verdict]:
    """DeepNorm divides values, outputs and feed-forwards by (8N)^(1/4); the inverse has been seen in released code."""
    found = [(w.layer, w.std.get("value"), w.std.get("key")) for w in d.weights]
    logs = [math.log(value / key) for _, value, key in found if value and key]
    n = len(logs)
    if n < 4 or n < len(found) or len({w.stack for w in d.weights}) > 1:
        return
    ratio, wrong = float(np.median(logs)), 0.25 * math.log(8 * n)
    alike = max(abs(log - ratio) for log in logs) < 0.2
    if alike and abs(ratio - wrong) < 0.1:
        yield Verdict(
            severity="fault",
            kind="deepnorm gain",
            layers=tuple(layer for layer, _, _ in found),
            text=f"values are {math.exp(ratio):.3g} times as large as keys in every layer: that is (8N)^(1/4) = "
            f"{math.exp(wrong):.3g}, and DeepNorm asks for (8N)^(-1/4) = {math.exp(-wrong):.3g}",
            cause="the gain of DeepNorm's initialisation was multiplied instead of divided",
            advice="initialise again with signalprop.apply(model, 'deepnorm')",
        )


def _scaling_missing(d: Diagnosis, expected: str) -> Iterable[Verdict]:
    """LayerNorm Scaling divides what norms output by sqrt(layer number), by a factor or folded into their gains."""
    if expected != "lns":
        return
    known = [
        (s.layer, factor, gain)
        for s, w in _pairs(d)
        if (factor := _known(s.norm_factor[:1])) and (gain := _known(w.norm_gain[:1]) or [1.0])
    ]
    factors = {layer: factor[0] for layer, factor, _ in known}
    off = tuple(layer for layer, value in factors.items() if abs(value * math.sqrt(layer + 1) - 1) > NORM_OFF)
    if len(off) <= len(factors) / 2:
        return
    if len(known) > 2:
        gains = np.log([max(gain[0], 1e-30) for _, _, gain in known])
        if np.polyfit(np.log([layer + 1.0 for layer, _, _ in known]), gains, 1)[0] < -0.25:
            return  # half of the slope of a fresh model whose factors were folded into its gains
    layer = max(off)
    yield Verdict(
        severity="fault",
        kind="layernorm scaling not in effect",
        layers=off,
        text=f"{_named(off)}: branches do not read their norms over the square root of the layer's number: the factor "
        f"at layer {layer} is {factors[layer]:.3g}, LayerNorm Scaling makes it {(layer + 1) ** -0.5:.3g}, and the "
        "gains of the norms do not fall with depth either",
        cause="the switch that turns the scaling on does not reach the layers",
        advice="apply it with signalprop.apply(model, 'lns'), and see the norm_scale column of the parametrization",
    )


def weight_ratios(d: Diagnosis) -> dict[int, dict[str, float]]:
    """Standard deviations of weights over the median of the same role's in the layers around, by layer and role."""
    out: dict[int, dict[str, float]] = {}
    for stack in dict.fromkeys(w.stack for w in d.weights):
        rows = [w for w in d.weights if w.stack == stack]
        for role in dict.fromkeys(role for w in rows for role in w.std):
            held = [(w.layer, std) for w in rows if (std := w.std.get(role)) is not None]
            for (layer, std), around in zip(held, _neighbours([std for _, std in held]), strict=True):
                if around > 0:
                    out.setdefault(layer, {})[role] = std / around
    return out


def _odd_weights(d: Diagnosis) -> Iterable[Verdict]:
    """Roles whose weights are much larger or smaller than in the layers around: one verdict per layer."""
    for layer, found in weight_ratios(d).items():
        ratios = {role: ratio for role, ratio in found.items() if not SMALL_WEIGHT <= ratio <= LARGE_WEIGHT}
        if not ratios:
            continue
        zero = [role for role, ratio in ratios.items() if ratio == 0]
        listed = ", ".join(f"{role} x {ratio:.3g}" for role, ratio in ratios.items() if ratio > 0)
        what = f"{', '.join(zero)} are 0" if zero else ""
        scores = not zero and set(ratios) <= {"query", "key"}
        yield Verdict(
            severity="fault" if zero or max(ratios.values()) > LARGE_WEIGHT else "warning",
            kind="zero weights" if zero else "scaled queries and keys" if scores else "scaled weights",
            layers=(layer,),
            text=f"layer {layer}: standard deviations of weights over those of the {NEIGHBOURS} layers on either "
            f"side: {'; '.join(part for part in (what, listed) if part)}",
            cause="weights that were never loaded or trained"
            if zero
            else "a layer that was scaled, or initialised by another rule than the rest",
            advice="compare with the checkpoint it came from; signalprop check compares with a scheme",
        )


def _silent_layers(d: Diagnosis) -> Iterable[Verdict]:
    silent = [s.layer for s in d.signal if s.attention_share == 0 and s.feed_forward_share == 0]
    named = {layer for rule in (_odd_weights, _norms_off) for verdict in rule(d) for layer in verdict.layers}
    left = tuple(layer for layer in silent if layer not in named)
    if left:
        yield Verdict(
            severity="fault",
            kind="silent layers",
            layers=left,
            text=f"{_named(left)}: exactly nothing is added to the stream, though the weights are not 0",
            cause="a multiplier of 0 (SkipInit, ReZero and LayerScale start there), or a layer that is skipped",
            advice="train on, if this is the start; else look at the multipliers with `signalprop measure`",
        )


def _dead_heads(d: Diagnosis) -> Iterable[Verdict]:
    dead = {
        s.layer: [
            h for h, share in enumerate(s.head_share) if share is not None and share * len(s.head_share) < DEAD_HEAD
        ]
        for s in d.signal
        if len(s.head_share) > 1 and s.finite and s.attention_share
    }
    for layer, heads in dead.items():
        if heads:
            yield Verdict(
                severity="fault",
                kind="dead heads",
                layers=(layer,),
                text=f"layer {layer}: {'head' if len(heads) == 1 else 'heads'} {ranges(heads)} of "
                f"{len(d.of_layers([layer])[0].head_share)} add nothing (a share below {DEAD_HEAD:g} of an equal one)",
                cause="weights of the head are 0: pruned, never loaded, or decayed away",
                advice="prune the heads, or initialise them again",
            )


# --- what training or depth has done -----------------------------------------------------------------------------


def _one_hot_attention(d: Diagnosis) -> Iterable[Verdict]:
    entropies = {s.layer: float(np.mean(_known(s.entropy))) for s in d.signal if _known(s.entropy)}
    sharp = tuple(layer for layer, entropy in entropies.items() if entropy < ONE_HOT)
    if sharp:
        stds = [max(_known(s.score_std), default=0.0) for s in d.of_layers(sharp)]
        yield Verdict(
            severity="warning",
            kind="one-hot attention",
            layers=sharp,
            text=f"{_named(sharp)}: attention looks at single tokens (entropy {min(entropies[i] for i in sharp):.2g} "
            f"of that of equal weights, scores with standard deviations up to {max(stds):.3g})",
            cause="queries and keys grew without bound, which stops their gradients",
            advice="QK-norm, or a smaller learning rate for queries and keys",
        )


def _collapse(d: Diagnosis) -> Iterable[Verdict]:
    """Tokens that have grown alike; apart from those whose likeness is a few huge features, which norms' gains undo."""

    def below(s: LayerSignal, rank: float) -> bool:
        r = s.token_correlation
        return (r is not None and r > ALIKE) or (s.effective_rank is not None and s.effective_rank < rank)

    few = tuple(
        s.layer for s in d.signal if s.outlier is not None and s.outlier > FEW_FEATURES and below(s, FEW_DIRECTIONS)
    )
    alike = tuple(s.layer for s in d.signal if s.layer not in few and below(s, ONE_DIRECTION))
    if few:
        largest = max(s.outlier or 0.0 for s in d.of_layers(few))
        yield Verdict(
            severity="note",
            kind="outlier features",
            layers=few,
            text=f"{_named(few)}: a few features carry most of the stream (largest entry {largest:.3g} times its root "
            "mean square), which makes tokens look alike there: cosines and ranks speak of those features",
            cause="trained models keep constants in single features; the gains of their norms make up for it",
            advice="keep those features in high precision when quantising",
        )
    if alike:
        worst = max(d.of_layers(alike), key=lambda s: s.token_correlation or 0.0)
        yield Verdict(
            severity="warning",
            kind="rank collapse",
            layers=alike,
            text=f"{_named(alike)}: tokens have grown alike (correlation {worst.token_correlation or 0:.3f}, effective "
            f"rank {worst.effective_rank or 0:.3g} at layer {worst.layer})",
            cause="attention averages faster than the skips and feed-forwards keep tokens apart",
            advice="larger skips or smaller attention branches (deepscalelm, noci), or shaped attention (e-spa)",
        )


def _gradients(d: Diagnosis) -> Iterable[Verdict]:
    known = [(s.layer, s.gradient) for s in d.signal if s.gradient]
    if len(known) < 3:
        return
    values = [g for _, g in known]
    spread = max(values) / min(values)
    if spread > GRADIENT_RANGE:
        first, last = known[0], known[-1]
        grows = first[1] > last[1]
        yield Verdict(
            severity="warning",
            kind="exploding gradients" if grows else "vanishing gradients",
            layers=tuple(layer for layer, _ in known),
            text=f"gradient variance spans a factor {spread:.3g} over the layers ({first[1]:.3g} after layer "
            f"{first[0]}, {last[1]:.3g} after layer {last[0]})",
            cause="each layer multiplies the gradient on its way down",
            advice="an initialisation that conserves it: deepscalelm; signalprop predict shows which",
        )


def _idle(d: Diagnosis) -> Iterable[Verdict]:
    """Layers that cost nothing to remove; without removals, layers whose Jacobian is the identity's."""
    if d.removal is not None and d.removal.single:
        yield from _idle_by_removal(d, d.removal)
    elif d.identity is not None and d.identity.jacobian:
        near = tuple(i for i, e in enumerate(d.identity.jacobian) if e.value is not None and e.value < IDLE_JACOBIAN)
        if near:
            yield Verdict(
                severity="note",
                kind="near-identity layers",
                layers=near,
                text=f"{_named(near)}: |J - I| below {IDLE_JACOBIAN:g} (root mean square), so a change of their input "
                "passes nearly unchanged",
                advice="diagnose --remove measures what they are worth",
            )


def _idle_by_removal(d: Diagnosis, removal: Removal) -> Iterable[Verdict]:
    known = [
        (item.layers[0], item.increase.value, item.increase.standard_error or 0.0)
        for item in removal.single
        if item.increase.value is not None
    ]
    costs = {layer: cost for layer, cost, _ in known}
    unsure = {layer: error for layer, cost, error in known if error >= IDLE_LOSS and cost < IDLE_LOSS + 2 * error}
    if unsure:
        yield Verdict(
            severity="note",
            kind="few tokens",
            layers=tuple(unsure),
            text=f"{_named(tuple(unsure))}: whether the loss rises by less than {IDLE_LOSS:g} nats per token without "
            f"one of them cannot be told (errors up to {max(unsure.values()):.3g})",
            advice="more --tokens",
        )
    idle = tuple(layer for layer, cost, error in known if max(cost, error) < IDLE_LOSS)
    if len(costs) > 1 and max(costs.values()) < COUNTING_LOSS:  # idle layers are none where nothing else is at work
        if not unsure:
            yield Verdict(
                severity="note",
                kind="no layer counts",
                layers=tuple(costs),
                text=f"whichever layer is removed, the loss rises by at most {max(costs.values()):.3g} nats per token "
                f"(of {_loss(d):.3g})",
                cause="a model at the start of its training, or a text that it can say little of",
                advice="train on, or give --data that the model was made for",
            )
        return
    if idle:
        low, high = min(costs[layer] for layer in idle), max(costs[layer] for layer in idle)
        yield Verdict(
            severity="warning" if len(idle) > 0.15 * len(d.signal) else "note",
            kind="idle layers",
            layers=idle,
            text=f"{_named(idle)}: removing {'it' if len(idle) == 1 else 'any one'} changes the loss by {low:+.3g}"
            f"{'' if len(idle) == 1 else f' to {high:+.3g}'} nats per token (of {_loss(d):.3g})",
            cause="what is added is small against the stream, or along it" + _depth_share(d, idle),
            advice="diagnose --greedy finds how many can go together; for the next run LayerNorm Scaling (lns) or "
            "deepscalelm keep deep layers' share up: compare with signalprop predict",
        )


def _loss(d: Diagnosis) -> float:
    return math.nan if d.loss is None or d.loss.value is None else d.loss.value


def _depth_share(d: Diagnosis, layers: Sequence[int]) -> str:
    shares = [(s.attention_share or 0.0) + (s.feed_forward_share or 0.0) for s in d.of_layers(layers)]
    return f" (branches hold {np.median(shares):.2g} of the stream's variance, median)" if shares else ""


def _growth(d: Diagnosis) -> Iterable[Verdict]:
    """The exponent p of variance ~ layer^p in every stack, against the laws of docs/theory/depth.md."""
    for stack in dict.fromkeys(s.stack for s in d.signal):
        rows = [s for s in d.signal if s.stack == stack]
        values = [s.variance for s in rows if s.variance]
        if len(values) < max(len(rows), 6) or values[-1] <= GROWN * values[0]:
            continue
        p = growth_exponent(values)
        sort = "slowly" if p <= 1 else "between fresh weights (1) and branches aligned with the stream (2)"
        layers = tuple(s.layer for s in rows)
        yield Verdict(
            severity="note",
            kind="variance growth",
            layers=layers,
            text=f"the stream's variance grows from {values[0]:.3g} to {values[-1]:.3g}; as layer^{p:.2f} over layers "
            f"{ranges(layers[len(rows) // 4 :])}, {sort if p <= 2.3 else 'faster than like branches can, aligned (2)'}",
            advice="" if p <= 1 else "low-precision formats see the largest layer: diagnose --cast",
        )


def _massive(d: Diagnosis) -> Iterable[Verdict]:
    ratios = {s.layer: s.first_variance / s.variance for s in d.signal if s.first_variance and s.variance}
    huge = tuple(layer for layer, ratio in ratios.items() if ratio > MASSIVE)
    if huge:
        yield Verdict(
            severity="note",
            kind="massive activations",
            layers=huge,
            text=f"{_named(huge)}: the first {d.data.skip_first} positions have up to {max(ratios.values()):.3g} times "
            "the variance of the others, which leave them out",
            cause="attention parks weight on the first token; common in trained decoders",
            advice="keep the first token in high precision when quantising activations",
        )


def _casts(d: Diagnosis) -> Iterable[Verdict]:
    """One verdict per format whose cast costs something.

    int8 without a scale is a note by itself: it holds whole numbers alone, so what it costs says nothing of the model.
    """
    for form in dict.fromkeys(cast.format for cast in d.casts):
        costly = [cast for cast in d.casts if cast.format == form and _costs(cast)]
        whole_numbers = [cast for cast in costly if form == "int8" and not cast.scaled]
        if whole_numbers:
            yield Verdict(
                severity="note",
                kind="no scale",
                layers=(),
                text=f"int8 without a scale: the loss rises, in nats per token, by a direct cast of: "
                f"{_listed(whole_numbers)}",
                cause="it holds whole numbers alone, so that weights below one half become 0",
                advice="a scale per tensor at the least; never cast to int8 without",
            )
        costly = [cast for cast in costly if cast not in whole_numbers]
        if not costly:
            continue
        worst = max(costly, key=lambda cast: math.inf if cast.increase.value is None else cast.increase.value)
        ratios = [(ratio, layer) for layer, ratio in enumerate(worst.signal_to_noise) if ratio is not None]
        at = f"; least signal over noise after layer {min(ratios)[1]} ({min(ratios)[0]:.3g} dB)" if ratios else ""
        helps = not any(cast.scaled for cast in costly) and any(c.format == form and c.scaled for c in d.casts)
        yield Verdict(
            severity="warning",
            kind="low precision",
            layers=(min(ratios)[1],) if ratios else (),
            text=f"{form}: the loss rises, in nats per token, by a direct cast of: {_listed(costly)}{at}",
            cause="numbers below or above the format's range, or too few digits for outliers",
            advice="a scale per tensor fixes it" if helps else _leave(worst),
        )


def _leave(cast: Cast) -> str:
    names = [item.name for item in sorted(cast.maps, key=lambda item: -(item.damage or 0.0)) if item.damage]
    first = "finer scales (per channel or block), or " if cast.format in ONE_SCALE else ""
    return f"{first}{' and '.join(names[:2])} in bfloat16" if names else f"{first}that layer in bfloat16"


def _listed(casts: Sequence[Cast]) -> str:
    return ", ".join(
        f"{cast.of}{' with a scale per tensor' if cast.scaled and cast.format in ONE_SCALE else ''} "
        + ("not finite" if cast.increase.value is None else f"+{cast.increase.value:.3g}")
        for cast in casts
    )


def _costs(cast: Cast) -> bool:
    increase, error = cast.increase.value, cast.increase.standard_error or 0.0
    return increase is None or increase > max(CAST_LOSS, 3 * error)


# --- arithmetic --------------------------------------------------------------------------------------------------


def _pairs(d: Diagnosis) -> Iterable[tuple[LayerSignal, Weights]]:
    weights = {(w.stack, w.layer): w for w in d.weights}
    return [(s, weights[s.stack, s.layer]) for s in d.signal if (s.stack, s.layer) in weights]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _neighbours(values: Sequence[float]) -> FloatArray:
    """The median of up to four values on either side of each, itself and zeros left out; 0 where there are none.

    Of an even number it is the geometric mean of the middle two: one odd layer of three must not drag the others along.
    """
    out = []
    for i in range(len(values)):
        around = [x for x in (*values[max(0, i - NEIGHBOURS) : i], *values[i + 1 : i + 1 + NEIGHBOURS]) if x > 0]
        out.append(math.exp(float(np.median(np.log(around)))) if around else 0.0)
    return np.array(out)
