"""Predicted against measured load of experts over depth, with plain and depth-scaled branches: docs/expert-load.md.

python -m benchmarks.expert_load
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

import signalprop as sp
from signalprop.data.batches import default_batch
from signalprop.files.storage import write_text
from signalprop.results.profile import EXPERT_LOAD
from signalprop.schemes.vanilla import unit_embedding

PAGE = Path("docs/expert-load.md")
LAYERS, WIDTH, TOKENS, SEEDS = 24, 256, 128, 4
INTRODUCTION = f"""# Load of experts over depth

Written by `python -m benchmarks.expert_load`: do not edit.

Decoders of {LAYERS} layers, width {WIDTH}, 16 experts of which a token has 2, Xavier's weights, on {TOKENS} tokens of
real text, two sequences; {SEEDS} networks. The load of an expert is how many tokens of a sequence choose it; shown is
its standard deviation over its mean, predicted and measured: 0 for equal loads, 2.65 if all tokens chose the same two.
Tokens that have become alike choose alike. *Depth-scaled*: DeepScaleLM's multipliers, skip² = 1 - 2/N and
branch² = 2/N of N branches. [How it is derived](theory/experts.md).
"""
HEADINGS = (
    "| layer | plain: correlation | predicted load | measured | depth-scaled: correlation | predicted load | measured |"
)


def tables() -> dict[str, sp.Parametrization]:
    """The same network as usual, and with DeepScaleLM's multipliers."""
    architecture = sp.Architecture(
        kind="decoder", n_layers=LAYERS, d_model=WIDTH, n_heads=4, d_ff=WIDTH, gated=True, activation="silu",
        norm="rmsnorm", norm_bias=False, bias=False, positions="rotary", vocab_size=2000, seq_len=TOKENS,
        tied_embeddings=False, branches=("attention", "experts"), settings={"experts": {"n_experts": 16, "top_k": 2}},
    )  # fmt: skip
    plain = replace(sp.scheme("xavier")(architecture), embedding=unit_embedding(architecture))
    square = 2 / (2 * LAYERS)  # of N sublayers: beta^2 = 2 / N
    scaled = plain.with_columns(branch=math.sqrt(square), skip=math.sqrt(1 - square))
    return {"plain": plain, "depth-scaled": scaled}


def measured(table: sp.Parametrization, batch: sp.Batch) -> sp.Profile:
    """Mean over networks."""
    return sp.average([sp.measure(sp.build(table, seed=seed), batch, backward=False) for seed in range(SEEDS)])


def main() -> None:
    lines = [INTRODUCTION, HEADINGS, "| --- | --- | --- | --- | --- | --- | --- |"]
    columns = []
    for table in tables().values():
        batch = default_batch(table.architecture, batch_size=2)
        profile, seen = sp.predict(table, batch.statistics(table.architecture), backward=False), measured(table, batch)
        columns += [seen.forward["stream_in"].token_correlation[1::2]]
        columns += [np.asarray(one.statistics[EXPERT_LOAD]) for one in (profile, seen)]
    for layer in [*range(0, LAYERS, 3), LAYERS - 1]:
        lines.append(f"| {layer} | " + " | ".join(f"{column[layer]:.2f}" for column in columns) + " |")
    write_text(PAGE, "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
