"""Token kernels as the SPA paper draws them: figures 1, 5, 6 and 7."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import uniform_kernel
from signalprop.kernels.gallery import figure_6, figure_7
from signalprop.kernels.trace import Trace, trace
from signalprop.network.inputs import InputStatistics, IntArray, from_tokens
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Settings

DEPTHS = (1, 10, 30, 100)
LENGTH, REPEATS, REPEATS_6 = 100, 0.02, 0.05
_SAMPLES = (32, 64)  # sequences of figure 6, by scale


def sampled_tokens(length: int, repeats: float, n: int = 1, seed: int = 0) -> IntArray:
    """Sequences of independent tokens, two of which are equal with probability `repeats`; ids (n, length).

    Uniform over 1 / repeats symbols where that is a whole number; else one more symbol stands for the remainder, which
    is rarer. Without repeats every token is another.

    Raises:
        InputError: repeats outside [0, 1), or no sequence.
    """
    if not 0 <= repeats < 1:
        raise InputError(f"repeats is {repeats!r:.40}; expected a share of equal pairs from 0 up to, but not, 1")
    if n < 1 or length < 1 or seed < 0:
        raise InputError(f"{n} sequences of {length} tokens, seed {seed}; expected at least 1 of each, and a seed >= 0")
    if repeats == 0:
        return np.tile(np.arange(length, dtype=np.int64), (n, 1))
    symbols = math.ceil(1 / repeats - 1e-9)
    # m - 1 symbols of probability p and one of 1 - (m - 1) p collide with probability `repeats`
    p = (1 + math.sqrt(max(0.0, 1 - symbols * (1 - repeats) / (symbols - 1)))) / symbols
    borders = p * np.arange(1, symbols)
    return np.searchsorted(borders, np.random.default_rng([seed, length]).random((n, length)), side="right")


def sequences(repeats: float, n: int, seed: int = 0) -> InputStatistics:
    """Sampled tokens, of which a share of the pairs is equal."""
    return from_tokens(sampled_tokens(LENGTH, repeats, n, seed), causal=True, source="sampled")


def figures_1_7(settings: Settings) -> Findings:
    """Kernels of seven attention-only networks, on the average input kernel."""
    networks = figure_7()
    found: dict[str, Trace] = {}
    for number, (name, p) in enumerate(networks.items()):
        found[name] = trace(p, uniform_kernel(REPEATS, LENGTH), at=DEPTHS, backward=False, matrices="forward")
        settings.progress(number + 1, len(networks))

    def collapse(name: str) -> float:
        depth = found[name].collapse_depth
        return math.inf if depth is None else float(depth)

    def lags(name: str) -> float:
        f = found[name].forward
        return float(f.lags[1][-1] - f.lags[50][-1])

    def diagonal(name: str) -> float:
        return float(found[name].forward.diagonal_mean[-1])

    checks = (
        Check("vanilla attention: block at which 1 - mean cosine falls below 1e-6",
              '"quickly suffer from rank collapse"', collapse("skipless"), high=30),
        Check("skipless with norm: the same block", "collapses too", collapse("skipless + norm"), high=30),
        *(
            Check(f"{name}: mean cosine after block 100", '"maintain controlled signal propagation"',
                  float(found[name].forward.mean_cosine[-1]), high=0.9)
            for name in ("U-SPA", "E-SPA")
        ),
        *(
            Check(f"{name}: mean diagonal after block 100", "1", diagonal(name), 0.95, 1.05)
            for name in ("U-SPA", "E-SPA")
        ),
        Check("E-SPA: cosine of neighbours less that of positions 50 apart", "a recency bias", lags("E-SPA"), low=0.1),
        Check("U-SPA: the same", "no recency bias", lags("U-SPA"), -0.01, 0.01),
        Check("Post-LN: block of collapse over that of the skipless network", "collapses, more slowly",
              collapse("Post-LN") / collapse("skipless"), 1.5, 4.0),
        *(
            Check(f"{name}: mean cosine after block 100", "no collapse",
                  float(found[name].forward.mean_cosine[-1]), high=0.9)
            for name in ("Pre-LN", "Pre-LN, skips 0.98")
        ),
    )  # fmt: skip
    x = np.arange(101.0)
    curves = tuple(Curve(name, x, np.maximum(item.forward.distance, 1e-16), "theory") for name, item in found.items())
    panel = Panel("1 − mean cosine of two positions", "block", "", curves, log_y=True)
    details = {
        name: {str(depth): float(item.forward.mean_cosine[depth]) for depth in DEPTHS}
        | {"collapse": item.collapse_depth}
        for name, item in found.items()
    }
    reduced = (
        "nothing: 100 blocks, 100 tokens, infinite width, on the average over inputs of which a share 0.02 repeats"
    )
    return Findings(checks, reduced, (panel,), (), details, lambda: _maps(found))


def _maps(found: dict[str, Trace]) -> Any:
    from signalprop.report.kernels import cosine_maps
    from signalprop.report.plots import sections_figure
    from signalprop.report.sections import Section

    title = "Normalised kernels, attention only; above each its mean cosine"
    return sections_figure([Section(title, cosine_maps(found, DEPTHS))], title, columns=len(DEPTHS), size=(2.3, 2.1))


def figures_5_6(settings: Settings) -> Findings:
    """Diagonals of E-SPA where tokens repeat, with and without the correction."""
    n = settings.pick(*_SAMPLES)
    networks = figure_6(repeats=REPEATS_6)
    found: dict[str, Trace] = {}
    for number, (name, p) in enumerate(networks.items()):
        read = sequences(REPEATS_6, n, settings.seed)
        found[name] = trace(p, inputs=read, backward=False, rank=False, matrices="none")
        settings.progress(number + 1, len(networks))
    ignored, corrected = (found[name].forward for name in networks)

    def error(name: str) -> float:
        sd = found[name].forward_sd
        return 0.0 if sd is None else float(sd["diagonal_mean"][-1]) / math.sqrt(n)

    names = tuple(networks)
    shares = {r: _share(r, settings.seed) for r in (0.01, 0.05, 0.2)}
    checks = (
        Check("repeats ignored: mean diagonal after block 36", '"diverges at deeper blocks"',
              float(ignored.diagonal_mean[-1]), low=2.0, standard_error=error(names[0])),
        Check("repeats ignored: growth from block 18 to 36 over growth from 0 to 18", "deeper blocks diverge faster",
              float((ignored.diagonal_mean[-1] - ignored.diagonal_mean[18]) / (ignored.diagonal_mean[18] - 1)),
              low=1.0),
        Check("corrected: mean diagonal after block 36", '"around 1"', float(corrected.diagonal_mean[-1]), 0.95, 1.05,
              error(names[1])),
        Check("corrected: standard deviation over positions after block 36", '"controlled standard deviations"',
              float(corrected.diagonal_sd[-1]), high=0.2),
        Check("sampled inputs of r = 0.05: share of equal pairs", "0.05", shares[0.05], 0.04, 0.06),
    )  # fmt: skip
    x = np.arange(len(ignored.diagonal_mean), dtype=np.float64)
    curves = tuple(
        Curve(f"{name}, mean ± 2 sd over positions", x, f.diagonal_mean, "measured", f.diagonal_sd)
        for name, f in zip(names, (ignored, corrected), strict=True)
    )
    one = Curve("around 1", x, np.ones(len(x)), "paper")
    panel = Panel("Diagonal of Σ under E-SPA, r = 0.05, last γ = 0.02", "block", "diagonal", (*curves, one))
    details = {
        name: {"mean": f.diagonal_mean[[12, 24, 36]], "sd": f.diagonal_sd[[12, 24, 36]]}
        for name, f in zip(names, (ignored, corrected), strict=True)
    }
    reduced = f"nothing; the average over {n} sampled sequences in place of one (the paper's is not given)"
    tokens = {r: sampled_tokens(LENGTH, r, 1, settings.seed)[0] for r in (0.01, 0.02, 0.05, 0.1, 0.2)}
    kernels = {f"input, r = {r:g}": np.equal.outer(ids, ids).astype(np.float64) for r, ids in tokens.items()}
    return Findings(checks, reduced, (panel,), (), details, maps=kernels)


def _share(repeats: float, seed: int) -> float:
    """Share of pairs of different positions with equal tokens, over sampled sequences."""
    ids = sampled_tokens(LENGTH, repeats, 64, seed)
    equal = (ids[:, :, None] == ids[:, None, :]).sum() - ids.size
    return float(equal / (len(ids) * LENGTH * (LENGTH - 1)))
