"""Growth orders with depth from predictions: TGS Table 3, and the laws of any scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings
from signalprop_lab.studies.growth import Growth, growth_orders

DEPTHS = (12, 48, 192, 768, 2500, 10_000)
# TGS Table 3: (forward, gradient, sensitivity); its post-norm half has no forward column
TABLE_3 = {
    ("xavier", "pre"): ("O(N)", "O(N)", "O(log N)"),
    ("xavier", "post"): ("", "O(e^{±N})", "O(N)"),
    ("ds-init", "pre"): ("O(1)", "O(1)", "O(N^-1)"),
    ("ds-init", "post"): ("", "O(1)", "O(N^-1)"),
    ("layerscale", "pre"): ("O(1)", "O(1)", "O(βN)"),
    ("layerscale", "post"): ("", "O(1)", "O(βN)"),
    ("deepnorm", "post"): ("", "O(1)", "O(N^-0.5)"),
    ("deepscalelm", "pre"): ("1", "O(1)", "O(1)"),
    ("deepscalelm", "post"): ("", "O(1)", "O(1)"),
}
_NAMES = {
    "xavier": "Vanilla", "ds-init": "DS-Init", "layerscale": "LayerScale", "deepnorm": "DeepNet",
    "deepscalelm": "DeepScaleLM",
}  # fmt: skip
_QUANTITIES = ("forward", "gradient", "sensitivity_mean")
# Exponents of N at the deep end that count as a law of the table: local powers at 5,000 layers. A logarithm's is
# 1/(ln N + c); an exponential has none, there it is the rate per layer that must not be 0.
_ALLOWED = {
    "O(1)": (-0.02, 0.02),
    "1": (-0.02, 0.02),
    "O(N)": (0.9, 1.1),
    "O(βN)": (0.9, 1.1),
    "O(N^-1)": (-1.1, -0.9),
    "O(N^-0.5)": (-0.6, -0.4),
    "O(log N)": (0.05, 0.2),
}


def encoder(n_layers: int, placement: str, dropout: float = 0.1) -> Architecture:
    """The bidirectional model that growth laws are shown for: width 256, 128 tokens, ReLU."""
    return Architecture.preset(
        "tgs", n_layers=n_layers, d_model=256, seq_len=128, dropout=dropout, norm_placement=placement
    )


@dataclass(frozen=True)
class Orders:
    """Growth laws of a scheme under a placement, or why there are none.

    Attributes:
        laws: by quantity (forward, gradient, sensitivity_mean, sensitivity_median), in words. growth: the same, as
            numbers. profiles: predictions by depth. refused: why there are none.
    """

    scheme: str
    placement: str
    laws: dict[str, str]
    growth: dict[str, Growth] = field(default_factory=dict)
    profiles: dict[int, Profile] = field(default_factory=dict)
    refused: str = ""


def orders(
    name: str, asked: str, depths: Sequence[int] = DEPTHS, step: Callable[[int], None] = lambda done: None
) -> Orders:
    """Growth of a scheme on an architecture of the asked placement; the scheme may demand another placement."""
    profiles: dict[int, Profile] = {}
    placement = asked
    try:
        for done, n in enumerate(depths):
            p = scheme(name)(encoder(n, asked))
            placement = ", ".join(dict.fromkeys(p.architecture.placements))
            profiles[n] = predict(p, fidelity="moments")
            step(done + 1)
    except InputError as error:
        return Orders(name, asked, {}, refused=str(error))
    growth = growth_orders(profiles)
    laws = {key: str(law) for key, law in growth.items()}
    last = profiles[depths[-1]].sensitivity()
    for kind in ("mean", "median"):
        if last[kind] == 0:
            laws[f"sensitivity_{kind}"] = "0"
    return Orders(name, placement, laws, growth, profiles)


def law_check(what: str, paper: str, growth: Growth) -> Check:
    """Whether a law is the table's."""
    if paper == "O(e^{±N})":
        rate = abs(growth.exponent) if growth.order == "exp" else math.nan
        return Check(f"{what}: rate per layer, without its sign", paper, rate, low=1e-3)
    low, high = _ALLOWED[paper]
    exponent = growth.exponent if growth.order != "exp" else math.copysign(math.inf, growth.exponent)
    return Check(f"{what}: exponent of N", paper, exponent, low, high)


def table_3(settings: Settings) -> Findings:
    """Fitted orders beside those of the table."""
    found: dict[tuple[str, str], Orders] = {}
    total = len(TABLE_3) * len(DEPTHS)
    for number, (name, place) in enumerate(TABLE_3):

        def step(done: int, before: int = number * len(DEPTHS)) -> None:
            settings.progress(before + done, total)

        found[name, place] = orders(name, place, step=step)
    checks: list[Check] = []
    for (name, place), printed in TABLE_3.items():
        for quantity, paper in zip(_QUANTITIES, printed, strict=True):
            if paper:
                words = quantity.removesuffix("_mean")
                what = f"{_NAMES[name]}, {place.capitalize()}-LN, {words}"
                checks.append(law_check(what, paper, found[name, place].growth[quantity]))
    small, a = (1e-3, 2e-3), encoder(192, "pre")  # d ln(sensitivity) / d ln(β) at small β
    s = [predict(scheme("layerscale", epsilon=b)(a), fidelity="moments").sensitivity()["mean"] for b in small]
    beta = math.log(s[1] / s[0]) / math.log(small[1] / small[0])
    checks.append(Check("LayerScale, Pre-LN, sensitivity: exponent of β", "O(βN)", beta, 0.9, 1.1))
    medians = {f"{_NAMES[n]} {p}": f.laws["sensitivity_median"].replace("{", "(").replace("}", ")")
               for (n, p), f in found.items()}  # fmt: skip
    notes = (
        "Sensitivity is N times the mean over layers of branch over stream variance (TGS section 4.6, its inverted "
        "ratio "
        "put right). With the median in place of the mean it is "
        f"{', '.join(f'{k}-LN {v}' for k, v in medians.items())}.",
    )
    details = {"laws": {f"{name} {place}": item.laws for (name, place), item in found.items()}, "depths": DEPTHS}
    reduced = "nothing: predictions at " + ", ".join(f"{n:,}" for n in DEPTHS) + " layers, width 256, 128 tokens"
    return Findings(tuple(checks), reduced, _panels(found), notes, details)


def _panels(found: dict[tuple[str, str], Orders]) -> tuple[Panel, ...]:
    x = np.array(DEPTHS, np.float64)
    out = []
    for quantity, title in (("gradient", "Gradient variance, first stream over last"), ("sensitivity", "Sensitivity")):
        for place in ("pre", "post"):
            curves = []
            for name in _NAMES:
                if (name, place) not in found:
                    continue
                items = [found[name, place].profiles[n] for n in DEPTHS]
                y = np.array([_value(quantity, item) for item in items])
                curves.append(Curve(_NAMES[name], x, np.where(y > 1e-12, y, np.nan), "theory"))
            out.append(
                Panel(f"{title}, {place.capitalize()}-LN", "layers N", "", tuple(curves), log_x=True, log_y=True)
            )
    return tuple(out)


def _value(quantity: str, profile: Profile) -> float:
    if quantity == "sensitivity":
        return profile.sensitivity()["mean"]
    assert profile.gradient is not None
    return math.exp(max(-600.0, float(profile.gradient["stream_in"].log_variance[0])))
