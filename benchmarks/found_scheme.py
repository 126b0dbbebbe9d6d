"""docs/found-scheme.md: the multipliers and learning rates that the theory calls best, found by predictions alone.

python -m benchmarks.found_scheme    # half a minute; `signalprop sweep sweep-found` trains what it finds
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

import signalprop as sp
from benchmarks.timing import table
from signalprop.data.batches import default_statistics
from signalprop.files.storage import write_text
from signalprop.frontier import frontier
from signalprop.network.architecture import Placement

PAGE = Path(__file__).resolve().parent.parent / "docs" / "found-scheme.md"
LOW, HIGH = 0.05, 2.0  # of k; the paper's is 2
SHARE = 0.5  # of the last stream that branches should have made


def made(norm: Placement, k: float) -> tuple[sp.Parametrization, sp.InputStatistics]:
    """The decoder of the sweep with the multipliers of a `k`, and the statistics of its text."""
    a = sp.Architecture.preset(
        "gpt2", n_layers=48, d_model=64, n_heads=2, d_ff=256, positions="rotary", dropout=0.0, norm_placement=norm,
        vocab_size=2048, seq_len=64,
    )  # fmt: skip
    inputs = default_statistics(a)
    return sp.scheme("deepscalelm", k=k)(a, inputs), inputs


@cache
def terms(norm: Placement, k: float) -> dict[str, float]:
    """Logarithms that would be 0 in the best network."""
    p, inputs = made(norm, k)
    found = sp.predict(p, inputs)
    assert found.gradient is not None
    first, last = found.forward["stream_in"], found.forward["stream_out"]
    gradient = found.gradient["stream_in"].variance[0] / found.gradient["stream_out"].variance[-1]
    return {
        "variance": math.log(last.variance[-1] / first.variance[0]),
        "gradient": math.log(gradient),
        "tokens": math.log((1 - first.token_correlation[0]) / (1 - last.token_correlation[-1])),
        "share": math.log((1 - np.prod(p.skip**2)) / SHARE),
    }


def objective(norm: Placement, k: float) -> float:
    """The sum of their squares."""
    return sum(x * x for x in terms(norm, k).values())


def search(norm: Placement) -> float:
    """The best k of a placement."""
    found = minimize_scalar(
        lambda x: objective(norm, math.exp(x)), bounds=(math.log(LOW), math.log(HIGH)), method="bounded",
        options={"xatol": 1e-3},
    )  # fmt: skip
    return math.exp(float(found.x))


def main() -> None:
    """Search, and write the page."""
    best = {norm: search(norm) for norm in ("pre", "post")}
    rows = [
        [norm, f"{k:.4g}", f"{objective(norm, k):.3f}", *(f"{x:+.2f}" for x in terms(norm, k).values())]
        for norm in best
        for k in (best[norm], 2.0, 1.0, 0.5, 0.1)
    ]
    norm = min(best, key=lambda x: objective(x, best[x]))
    p, inputs = made(norm, best[norm])
    rates = frontier([p], inputs=inputs).cells[0].even_rates
    chosen = ", ".join(f"{role} {rate:.4g}" for role, rate in rates.items())
    write_text(PAGE, _PAGE.format(
        rows=table(["norm", "k", "sum of squares", *terms("pre", 2.0)], rows), norm=norm, k=best[norm], rates=chosen,
    ))  # fmt: skip


_PAGE = """\
# A scheme found by predictions alone

Written by `python -m benchmarks.found_scheme`: do not edit. What the theory calls best, for a decoder of 48 layers and
width 64: multipliers skip^2 = 1 - k/L and branch^2 = k/L on branches of variance 1 ([DeepScaleLM](schemes.md), where k
is 2), norms before or after, and factors on the learning rates of roles. Nothing was trained to find them.

**The signal.** Four logarithms would be 0 in the best network, and the smallest sum of their squares is taken: last
over first variance of the stream (*variance*) and of its gradient (*gradient*), 1 - token correlation of the embedding
over that of the last stream (*tokens*), and the share of the last stream that branches have made over one half
(*share*; so that deep layers neither do nothing nor wipe out what was read). All weigh the same: that is a choice.

{rows}

**The steps.** The weights of each role move the function by the same amount in Adam's first step
([how well that is predicted](first-steps.md#whose-weights-move-it)).

**Found**: norms {norm}, k = {k:.4g}, rates times

    {rates}

That is `--scheme deepscalelm --option k={k:.4g} --norm {norm}`, and `model.rates` in a recipe. How it trains beside
DeepScaleLM, LayerNorm Scaling and ReZero: [results](results/found.md), by `signalprop sweep sweep-found`.
"""

if __name__ == "__main__":
    main()
