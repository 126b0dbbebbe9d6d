"""COD's lemmas: growth of the variance, and nearness to the identity, with and without LayerNorm Scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme
from signalprop.theory.bounds import identity_distances
from signalprop_lab.reproductions.networks import both, layers, over_depth
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings
from signalprop_lab.studies.growth import growth_fit

LAYERS = 24
_WIDTH, _HEADS, _TOKENS = (192, 768), (3, 12), (48, 128)  # by scale
_STD, _REFERENCE_WIDTH = 0.02, 768  # of the 130M shape; narrower networks keep d s²
_NETWORKS = 6


def stack(name: str, settings: Settings) -> Parametrization:
    """A Llama of the 130M shape's proportions, no final norm, no head; `fixed` is Pre-LN, `lns` LayerNorm Scaling."""
    d, heads, length = settings.pick(*zip(_WIDTH, _HEADS, _TOKENS, strict=True))
    fields = {"n_layers": LAYERS, "d_model": d, "n_heads": heads, "d_ff": 8 * d // 3, "seq_len": length}
    a = Architecture.preset("llama-130m", **fields, head="none").replace(final_norm=False)
    std = _STD * math.sqrt(_REFERENCE_WIDTH / d)
    made = scheme("fixed", std=std)(a)
    scaled = scheme("lns")(a)
    p = made if name == "fixed" else made.with_columns(norm_scale=scaled.norm_scale)
    return replace(p, embedding=p.embedding.model_copy(update={"token": _STD}), scheme=name)


def lemmas(settings: Settings) -> Findings:
    """Pre-LN and LayerNorm Scaling at initialisation, beside what the paper derives."""
    inputs = InputStatistics(kind="stream", variance=_STD**2, token_correlation=0.0, source="Gaussian tokens")
    tables = {"Pre-LN": stack("fixed", settings), "LNS": stack("lns", settings)}
    pairs = {
        name: both(p, settings, _NETWORKS, number, 2, inputs=inputs) for number, (name, p) in enumerate(tables.items())
    }
    found = {name: layers(pair.measured) for name, pair in pairs.items()}
    pre, lns = found["Pre-LN"], found["LNS"]
    fits = {name: growth_fit(values) for name, values in found.items()}
    near = {name: identity_distances(tables[name], pair.predicted) for name, pair in pairs.items()}
    checks = (
        Check(
            "Pre-LN: R² of an exponential less R² of a straight line",
            '"exponentially grows" (abstract)',
            fits["Pre-LN"]["exponential"] - fits["Pre-LN"]["linear"],
            low=0.0,
        ),
        Check("Pre-LN: exponent of variance in depth", "at least 1: Θ(L) to Θ(exp L) (Lemma 1)", _power(pre), low=0.9),
        Check("LNS: exponent of variance in depth", "1 to 1.75: Θ(L) to Θ(L^(2-ε)) (Lemma 3)", _power(lns), 0.9, 1.75),
        Check(
            "Pre-LN: predicted distance from the identity, last layer over second",
            "deep layers approach the identity",
            float(near["Pre-LN"][-1] / near["Pre-LN"][1]),
            high=0.8,
        ),
        Check(
            "predicted distance of the last layer from the identity, LNS over Pre-LN",
            "above 1: scaling keeps layers away from it",
            float(near["LNS"][-1] / near["Pre-LN"][-1]),
            low=1.0,
        ),
    )
    notes = (
        "At initialisation branches are uncorrelated with the stream: variance grows linearly, with LayerNorm Scaling "
        "like a logarithm, which the paper's lower ends exclude.",
        "The bounds of Theorems 1 and 2 on the norm of the Jacobian are true once corrected, and vacuous: a factor of "
        "about 1,700 for layer 12 of the 130M shape, whose distance from the identity is 0.23 "
        "(docs/papers/curse-of-depth.md).",
        "Scaling makes branches smaller faster than it makes the stream smaller, so its layers start nearer to the "
        "identity; what training makes of them is another figure (COD Fig 1, 5).",
    )
    x = np.arange(1.0, LAYERS + 1)
    growth = [curve for name, pair in pairs.items() for curve in over_depth(pair, "forward", name)]
    growth.append(Curve("Lemma 3 at its lower end, ∝ L", x, lns[0] * x, "paper"))
    exponential = pre[0] * (pre[-1] / pre[0]) ** ((x - 1) / (LAYERS - 1))
    growth.append(Curve("exponential through both ends", x, exponential, "paper"))
    distances = tuple(Curve(f"{name}, predicted", x, near[name], "theory") for name in tables)
    panels = (
        Panel("Variance of the stream at initialisation", "layer", "variance", tuple(growth), log_y=True),
        Panel("Distance of a layer's Jacobian from the identity", "layer", "|J − I| / √n", distances, log_y=True),
    )
    a = tables["Pre-LN"].architecture
    reduced = (
        f"LLaMA-130M's proportions at width {a.d_model}, {LAYERS} layers, {a.seq_len} Gaussian tokens; weights with "
        f"the d s² of width {_REFERENCE_WIDTH} and s = {_STD}; {_NETWORKS} networks"
    )
    return Findings(checks, reduced, panels, notes, {"fits": fits})


def _power(variances: FloatArray) -> float:
    """Exponent of variance in depth, deeper three quarters of the layers."""
    deep = slice(len(variances) // 4, None)
    layers = np.log(np.arange(1.0, len(variances) + 1))
    return float(np.polyfit(layers[deep], np.log(variances[deep]), 1)[0])
