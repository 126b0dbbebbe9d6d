"""Token correlations: TGS figures 7 and 8, v1 figures 12 and 13, the fixed point of v1 appendix F."""

from __future__ import annotations

import math

import numpy as np

from signalprop.network.duals import central_dual, dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import KINDS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop_lab.reproductions.networks import HEADS, both, data_words, over_depth, tgs
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings
from signalprop_lab.studies.growth import fixed_point

DROPOUT = 0.1
PAPER_CROSSING, PAPER_FIXED_POINT = 0.65, 0.88  # TGS figure 7; v1 appendix F
_GRID = np.linspace(0.0, 1.0, 201)


def relu_polynomial(r: FloatArray) -> FloatArray:
    """Correlation after ReLU of r, as TGS Table 1 fits it."""
    return np.asarray(0.7 * r + 0.3 * r**2)


def ffn_polynomial(r: FloatArray) -> FloatArray:
    """Correlation after linear, ReLU, linear of r, as TGS Table 2 fits it; dropout multiplies it by 1 - p."""
    return np.asarray(1 / math.pi + r / 2 + (0.5 - 1 / math.pi) * r**2)


def ffn_map(r: FloatArray) -> FloatArray:
    """What `ffn_polynomial` fits: E[ReLU(x) ReLU(y)] over its value at r = 1."""
    found = dual("relu", 1.0, r)
    return np.asarray(np.asarray(found.covariance_moment) / np.asarray(found.second_moment))


def relu_map(r: FloatArray) -> FloatArray:
    """What `relu_polynomial` fits: the correlation of ReLU(x) and ReLU(y)."""
    found = central_dual("relu", 1.0, r)
    return np.asarray(np.asarray(found.covariance) / np.asarray(found.variance))


# --- figure 7 ---------------------------------------------------------------------------------------------------------


def _block(settings: Settings, kind: str, length: int) -> Parametrization:
    """One layer whose other sublayer is silent, so that the stream's correlation is what it was given."""
    a = tgs(settings, "pre", 1, seq_len=length, dropout=DROPOUT)
    p = scheme("xavier")(a)
    return p.with_columns(branch=np.where(p.kind == KINDS.index(kind), 1.0, 0.0))


def figure_7(settings: Settings) -> Findings:
    """Token correlation that a block puts out, against that of what it reads."""
    n_seeds, length = settings.pick(8, 16), settings.pick(128, 256)
    inputs = np.round(np.arange(0.05, 1.0, 0.1), 2)
    total, done = 2 * len(inputs), 0
    curves: list[Curve] = []
    measured, fine = {}, {}
    for kind, name in (("feed_forward", "FFN"), ("attention", "attention")):
        p = _block(settings, kind, length)
        row = int(np.flatnonzero(p.kind == KINDS.index(kind))[0])

        def given(r: float) -> InputStatistics:
            return InputStatistics(kind="stream", token_correlation=r, source="Gaussian streams")

        points = []
        for r in inputs:
            pair = both(p, settings, n_seeds, done, total, backward=False, inputs=given(float(r)))
            branch = pair.measured.forward["branch"]
            done += 1
            assert branch.token_correlation_se is not None
            points.append((float(branch.token_correlation[row]), float(branch.token_correlation_se[row])))
        fine[name] = np.array(
            [predict(p, given(r), backward=False).forward["branch"].token_correlation[row] for r in _GRID]
        )
        y, error = np.array(points).T
        measured[name] = (y, error)
        curves += [
            Curve(f"{name}, predicted", _GRID, fine[name], "theory"),
            Curve(f"{name}, measured", inputs, y, "measured", error),
        ]
    polynomial = (1 - DROPOUT) * ffn_polynomial(_GRID)
    curves += [
        Curve("FFN, the paper's polynomial", _GRID, polynomial, "paper"),
        Curve("r out = r in", _GRID, _GRID, "paper"),
    ]
    ffn, ffn_error = measured["FFN"]
    high, high_error = (column[-1] for column in measured["attention"])
    crossing, slope = _crossing(inputs, ffn)
    off = np.abs(np.interp(inputs, _GRID, fine["FFN"]) - ffn)
    checks = (
        Check(
            "r at which the FFN falls below the diagonal, measured",
            f"{PAPER_CROSSING} (0.64 in v1)",
            crossing,
            PAPER_CROSSING - 0.05,
            PAPER_CROSSING + 0.05,
            float(ffn_error.mean()) / abs(slope),
        ),
        Check("attention, r out at r in = 0.95, measured", "below 1", high, high=0.95, standard_error=high_error),
        Check(
            "attention, largest predicted r out",
            f"at most {1 - DROPOUT} (v1 appendix F)",
            float(fine["attention"].max()),
            high=1 - DROPOUT + 1e-9,
        ),
        Check("FFN, largest error of the theory", "theory on measurement", float(off.max()), high=0.03),
    )
    reduced = f"width {p.architecture.d_model}, {length} Gaussian tokens; {n_seeds} networks per point"
    notes = (
        f"By theory the FFN crosses at {_crossing(_GRID, fine['FFN'])[0]:.3f}, the paper's polynomial at "
        f"{_crossing(_GRID, polynomial)[0]:.3f}.",
    )
    panel = Panel("Token correlation of a block, p = 0.1", "r in", "r out", tuple(curves), y_limits=(0, 1.02))
    return Findings(checks, reduced, (panel,), notes)


def _crossing(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """(where y first falls below x, slope of y - x there), by straight lines between points; NaN where it does not."""
    gap = y - x
    below = np.flatnonzero((gap[:-1] > 0) & (gap[1:] <= 0))
    if not len(below):
        return math.nan, 1.0
    i = int(below[0])
    slope = float((gap[i + 1] - gap[i]) / (x[i + 1] - x[i]))
    return float(x[i] - gap[i] / slope), slope


# --- figure 8 ---------------------------------------------------------------------------------------------------------

_LAYERS = 96  # the figure's axis ends at 100


def _scaled(p: Parametrization) -> Parametrization:
    """Residual weights β² = 2/N, λ² = 1 - β², weights as they were."""
    beta2 = 2.0 / p.architecture.n_layers
    return p.with_columns(skip=math.sqrt(1 - beta2), branch=math.sqrt(beta2))


def paper_fixed_point(attention: float, feed_forward: float, *, by_variance: bool) -> float:
    """r of TGS v1 appendix F with their C1 and C2: attention weighed by C1 as printed, or by its variance C1 r."""
    r = 0.5
    for _ in range(1000):
        relu = r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi
        weight = attention * (r if by_variance else 1.0)
        r = (1 - DROPOUT) * (weight + feed_forward * relu) / (weight + feed_forward)
    return r


def figure_8(settings: Settings) -> Findings:
    """Token correlation after every layer of four networks."""
    n_seeds = settings.pick(4, 8)
    a = tgs(settings, "pre", _LAYERS, dropout=DROPOUT)
    dry = a.replace(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    xavier, by_head = scheme("xavier"), scheme("xavier", value_per_head=True)
    tables = {
        "Xavier, p = 0": xavier(dry),
        "Xavier, p = 0.1": xavier(a),
        "Xavier, values by head": by_head(a.replace(n_heads=HEADS)),
        "Xavier, β² = 2/N": _scaled(xavier(a)),
        "DeepScaleLM": scheme("deepscalelm")(a),
    }
    pairs = {
        name: both(p, settings, n_seeds, i, len(tables), backward=False) for i, (name, p) in enumerate(tables.items())
    }
    last, error, half = {}, {}, {}
    for name, pair in pairs.items():
        series = pair.measured.forward["stream_out"]
        assert series.token_correlation_se is not None
        last[name], error[name] = float(series.token_correlation[-1]), float(series.token_correlation_se[-1])
        half[name] = float(series.token_correlation[_LAYERS // 4])
    stars = [
        fixed_point(made(a.replace(n_layers=1, n_heads=HEADS, norm_placement=place))).token_correlation
        for made in (by_head, xavier)
        for place in ("pre", "post")
    ]
    dropped, plain = "Xavier, p = 0.1", "Xavier, p = 0"
    low, high = PAPER_FIXED_POINT - 0.02, PAPER_FIXED_POINT + 0.02
    checks = (
        Check(
            f"fixed point of Xavier, p = 0.1, by theory, values drawn by head ({HEADS})",
            f"{PAPER_FIXED_POINT} (v1 appendix F)",
            stars[0],
            low,
            high,
        ),
        Check(
            f"Xavier, values by head, p = 0.1: r after layer {_LAYERS}, measured",
            f"{PAPER_FIXED_POINT}, \"empirically verified\"",
            last["Xavier, values by head"],
            low,
            high,
            error["Xavier, values by head"],
        ),
        Check(
            "r at the end, without dropout less with",
            "dropout prevents rank collapse",
            last[plain] - last[dropped],
            low=0.05,
            standard_error=math.hypot(error[plain], error[dropped]),
        ),
        *(
            Check(
                f"r a quarter up the stack, Xavier, p = 0.1 less {name}",
                "increases slower",
                half[dropped] - half[name],
                low=0.05,
                standard_error=error[name],
            )
            for name in ("Xavier, β² = 2/N", "DeepScaleLM")
        ),
        Check(
            "DeepScaleLM: r at the end, measured", "below 1 - e^-2 = 0.865 (section 3.5)", last["DeepScaleLM"],
            high=1 - math.exp(-2), standard_error=error["DeepScaleLM"],
        ),
    )  # fmt: skip
    theirs = [paper_fixed_point(2.2, 0.4, by_variance=way) for way in (False, True)]
    notes = (
        f"The paper's equation has the root {theirs[0]:.3f} with the constants that it states, {theirs[1]:.3f} if "
        "attention "
        f"is weighed by its variance. Pre-LN tends to {stars[0]:.3f} as a power of depth, Post-LN to {stars[1]:.3f} "
        f"exponentially; with Xavier on whole value matrices to {stars[2]:.3f} and {stars[3]:.3f}; "
        f"measured end points: {', '.join(f'{name} {r:.3f}' for name, r in last.items())}.",
    )
    curves = [c for name, pair in pairs.items() for c in over_depth(pair, "r", name)]
    guide = np.array([0.0, _LAYERS])
    curves.append(Curve("the paper's fixed point, 0.88", guide, np.full(2, PAPER_FIXED_POINT), "paper"))
    panel = Panel("Token correlation of the stream, Pre-LN", "layer", "r", tuple(curves), y_limits=(0, 1.02))
    reduced = (
        f"{_LAYERS} layers (the figure's axis ends at 100) of width {a.d_model}; {data_words(a)}; {n_seeds} networks "
        "each; "
        "placement not stated in the paper, Pre-LN here"
    )
    return Findings(checks, reduced, (panel,), notes, {"last": last, "last_se": error})


# --- figures 12 and 13 ------------------------------------------------------------------------------------------------


def figures_12_13(settings: Settings) -> Findings:
    """Two polynomials beside what they fit."""
    del settings  # exact at any scale
    relu, ffn = relu_map(_GRID), ffn_map(_GRID)
    relu_error = float(np.abs(relu_polynomial(_GRID) - relu).max())
    ffn_error = float(np.abs(ffn_polynomial(_GRID) - ffn).max())
    # least squares through the ends, as theirs: a r + (1 - a) r², and 1/π + b r + (1 - 1/π - b) r²
    bend = _GRID - _GRID**2
    a = float(bend @ (relu - _GRID**2) / (bend @ bend))
    rest = ffn - 1 / math.pi - (1 - 1 / math.pi) * _GRID**2
    b = float(bend @ rest / (bend @ bend))
    checks = (
        Check("ReLU: largest error of 0.7 r + 0.3 r²", '"a remarkably good fit"', relu_error, high=0.01),
        Check("ReLU: best coefficient of r", "0.7", a, 0.65, 0.75),
        Check("FFN: largest error of 1/π + r/2 + (1/2 − 1/π) r²", '"also a very good fit"', ffn_error, high=0.01),
        Check("FFN: best coefficient of r", "0.5", b, 0.45, 0.55),
    )
    guide = Curve("r out = r in", _GRID, _GRID, "paper")
    panels = tuple(
        Panel(title, "r in", "r out", (Curve("exact", _GRID, y), Curve(f"paper: {words}", _GRID, fit, "paper"), guide))
        for title, words, y, fit in (
            ("ReLU", "0.7 r + 0.3 r²", relu, relu_polynomial(_GRID)),
            ("FFN, without dropout", "1/π + r/2 + (1/2 − 1/π) r²", ffn, ffn_polynomial(_GRID)),
        )
    )
    return Findings(checks, "nothing: closed forms", panels)
