"""Faults of weights, norms and multipliers, in words: what a layer has that its neighbours, or theory, do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from signalprop.diagnosis.bounds import DEAD_HEAD, LARGE_WEIGHT, NEIGHBOURS, NORM_OFF, SMALL_WEIGHT
from signalprop.diagnosis.result import Diagnosis, known, paired
from signalprop.network.moments import FloatArray
from signalprop.results.findings import Finding
from signalprop.results.text import named, ranges


def faults(diagnosis: Diagnosis, expected: str) -> Iterable[Finding]:
    """All of them; expected: as of `verdicts`."""
    yield from _not_finite(diagnosis)
    yield from _norms_off(diagnosis)
    yield from _deepnorm_gain(diagnosis)
    yield from _scaling_missing(diagnosis, expected)
    yield from _odd_weights(diagnosis)
    yield from _silent_layers(diagnosis)
    yield from _dead_heads(diagnosis)


def _not_finite(d: Diagnosis) -> Iterable[Finding]:
    bad = [item.layer for item in d.signal if not item.finite]
    if bad and not d.bad_tensors and not any(one.name == "not finite" for one in d.wired):
        first = bad[0]
        signal, weights = next(pair for pair in paired(d) if pair[0].layer == first)
        broken = [role for role, std in weights.std.items() if std is None] if weights else []
        if broken:
            cause = f"its {', '.join(broken)} weights hold NaN or infinite values"
        elif signal.variance_in is None:
            cause = "what it reads is not finite already: look at the embeddings and the input"
        else:
            cause = "not found: every parameter and buffer is finite, and no operation of a short pass shows it"
        yield Finding(
            severity="fault",
            name="not finite",
            layers=(first,),
            text=f"layer {first} is the first that outputs NaN or infinite values"
            + (f", and {named(bad[1:])} pass{'es' if len(bad) == 2 else ''} them on" if len(bad) > 1 else ""),
            cause=cause,
            remedy="restore the layer from the last good checkpoint, or run in bfloat16 or float32",
        )


def _norms_off(d: Diagnosis) -> Iterable[Finding]:
    """A branch reads the output of its norm, times the scale that the model is known to have."""
    off: dict[int, tuple[float, float]] = {}
    for signal, weights in paired(d):
        for measured, scale in zip(signal.norm_factor, weights.norm_scale if weights else (), strict=False):
            if measured is not None and scale and abs(measured / scale - 1) > NORM_OFF:
                off[signal.layer] = (measured, scale)
    if off:
        layers = tuple(off)
        measured, scale = off[layers[0]]
        yield Finding(
            severity="fault",
            name="norm output off",
            layers=layers,
            text=f"{named(layers)}: branches read {measured:.3g} times the output that the weights of their norm "
            f"give; expected {scale:.3g} times",
            cause="a factor on the norm that is not among the weights, such as a scale in a buffer that "
            "materialising from the meta device (to_empty) has erased",
            remedy="set the scale again after to_empty, or keep it as a Python number (signalprop.apply does)",
        )


def _deepnorm_gain(d: Diagnosis) -> Iterable[Finding]:
    """DeepNorm divides values, outputs and feed-forwards by (8N)^(1/4); the inverse has been seen in released code."""
    found = [(w.layer, w.std.get("value"), w.std.get("key")) for w in d.weights]
    logs = [math.log(value / key) for _, value, key in found if value and key]
    n = len(logs)
    if n < 4 or n < len(found) or len({w.stack for w in d.weights}) > 1:
        return
    ratio, wrong = float(np.median(logs)), 0.25 * math.log(8 * n)
    alike = max(abs(log - ratio) for log in logs) < 0.2
    if alike and abs(ratio - wrong) < 0.1:
        yield Finding(
            severity="fault",
            name="deepnorm gain",
            layers=tuple(layer for layer, _, _ in found),
            text=f"values are {math.exp(ratio):.3g} times as large as keys in every layer: that is (8N)^(1/4) = "
            f"{math.exp(wrong):.3g}, and DeepNorm asks for (8N)^(-1/4) = {math.exp(-wrong):.3g}",
            cause="the gain of DeepNorm's initialisation was multiplied instead of divided",
            remedy="initialise again with signalprop.apply(model, 'deepnorm')",
        )


def _scaling_missing(d: Diagnosis, expected: str) -> Iterable[Finding]:
    """LayerNorm Scaling divides what norms output by sqrt(layer number), by a factor or folded into their gains."""
    if expected != "lns":
        return
    gains = {s.layer: (known(w.norm_gain[:1]) or [1.0])[0] for s, w in paired(d) if w and known(s.norm_factor[:1])}
    factors = {s.layer: s.norm_factor[0] or 0.0 for s in d.signal if s.layer in gains}
    off = tuple(layer for layer, value in factors.items() if abs(value * math.sqrt(layer + 1) - 1) > NORM_OFF)
    if len(off) <= len(factors) / 2:
        return
    if len(gains) > 2:
        logs = np.log([max(gain, 1e-30) for gain in gains.values()])
        if np.polyfit(np.log([layer + 1.0 for layer in gains]), logs, 1)[0] < -0.25:
            return  # half of the slope of a fresh model whose factors were folded into its gains
    layer = max(off)
    yield Finding(
        severity="fault",
        name="layernorm scaling not in effect",
        layers=off,
        text=f"{named(off)}: branches do not read their norms over the square root of the layer's number: the factor "
        f"at layer {layer} is {factors[layer]:.3g}, LayerNorm Scaling makes it {(layer + 1) ** -0.5:.3g}, and the "
        "gains of the norms do not fall with depth either",
        cause="the switch that turns the scaling on does not reach the layers",
        remedy="apply it with signalprop.apply(model, 'lns'), and see the norm_scale column of the parametrization",
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


def _odd_weights(d: Diagnosis) -> Iterable[Finding]:
    """Roles whose weights are much larger or smaller than in the layers around: one verdict per layer."""
    muted = set() if d.fresh is None else {s.layer for s in d.signal if s.attention_share == 0 == s.feed_forward_share}
    for layer, found in weight_ratios(d).items():
        if layer in muted:
            continue  # `whole_model` says whether they can learn
        ratios = {role: ratio for role, ratio in found.items() if not SMALL_WEIGHT <= ratio <= LARGE_WEIGHT}
        if not ratios:
            continue
        zero = [role for role, ratio in ratios.items() if ratio == 0]
        listed = ", ".join(f"{role} x {ratio:.3g}" for role, ratio in ratios.items() if ratio > 0)
        what = f"{', '.join(zero)} {'is' if len(zero) == 1 else 'are'} 0" if zero else ""
        scores = not zero and set(ratios) <= {"query", "key"}
        yield Finding(
            severity="fault" if zero or max(ratios.values()) > LARGE_WEIGHT else "warning",
            name="zero weights" if zero else "scaled queries and keys" if scores else "scaled weights",
            layers=(layer,),
            text=f"layer {layer}: standard deviations of weights over those of the {NEIGHBOURS} layers on either "
            f"side: {'; '.join(part for part in (what, listed) if part)}",
            cause="weights that were never loaded or trained"
            if zero
            else "a layer that was scaled, or initialised by another rule than the rest",
            remedy="compare with the checkpoint it came from; signalprop check compares with a scheme",
        )


def _silent_layers(d: Diagnosis) -> Iterable[Finding]:
    if d.fresh is not None and d.fresh.reached:
        return  # `whole_model` says whether they can learn
    silent = [s.layer for s in d.signal if s.attention_share == 0 and s.feed_forward_share == 0]
    told = {layer for rule in (_odd_weights, _norms_off) for verdict in rule(d) for layer in verdict.layers}
    left = tuple(layer for layer in silent if layer not in told)
    if left:
        yield Finding(
            severity="fault",
            name="silent layers",
            layers=left,
            text=f"{named(left)}: exactly nothing is added to the stream, though the weights are not 0",
            cause="a multiplier of 0 (SkipInit, ReZero and LayerScale start there), or a layer that is skipped",
            remedy="train on, if this is the start; else look at the multipliers with `signalprop measure`",
        )


def _dead_heads(d: Diagnosis) -> Iterable[Finding]:
    for s in d.signal:
        n = len(s.head_share)
        heads = [h for h, share in enumerate(s.head_share) if share is not None and share * n < DEAD_HEAD]
        if n > 1 and heads and s.finite and s.attention_share:
            which = f"head {heads[0]} of {n} adds" if len(heads) == 1 else f"heads {ranges(heads)} of {n} add"
            yield Finding(
                severity="fault",
                name="dead heads",
                layers=(s.layer,),
                text=f"layer {s.layer}: {which} nothing (a share below {DEAD_HEAD:g} of an equal one)",
                cause="weights of the head are 0: pruned, never loaded, or decayed away",
                remedy="prune the heads, or initialise them again",
            )


def _neighbours(values: Sequence[float]) -> FloatArray:
    """The median of up to four values on either side of each, itself and zeros left out; 0 if there are none.

    Of an even number it is the geometric mean of the middle two: one odd layer of three must not drag the others along.
    """
    out = []
    for i in range(len(values)):
        around = [x for x in (*values[max(0, i - NEIGHBOURS) : i], *values[i + 1 : i + 1 + NEIGHBOURS]) if x > 0]
        out.append(math.exp(float(np.median(np.log(around)))) if around else 0.0)
    return np.array(out)
