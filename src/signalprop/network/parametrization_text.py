"""A Parametrization's rows as text and as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Embedding, Head
from signalprop.network.kinds import KINDS
from signalprop.network.layout import PLACEMENTS, STACKS
from signalprop.network.parametrization_document import Shaping
from signalprop.network.shown import COLUMNS

# Columns that a row shows only where they do something.
RARE = (
    "norm_scale", "norm_bias", "norm_slope", "value_skip", "attention_gain", "shape_in", "shape_out", "shape_gain",
)  # fmt: skip


def table_text(
    scheme: str, a: Architecture, rows: Sequence[Mapping[str, Any]],
    e: Embedding, h: Head, shaping: Shaping, drawn: Mapping[str, str], most: int | None = None,
) -> str:  # fmt: skip
    """An entry per sublayer, folded; consecutive layers with equal numbers share it.

    Args:
        drawn: distributions by role. most: lines, entries in the middle left out; None: all.
    """
    lines = [
        f"{scheme}: {a.n_layers_total} layers, {len(rows)} sublayers, d_model {a.d_model}; "
        f"standard deviations ({', '.join(sorted(set(drawn.values())))})",
        f"embedding token {e.token:.4g} position {e.position:.4g} segment {e.segment:.4g} scale {e.scale:.4g}",
    ]
    by_layer = groupby(rows, lambda row: (row["stack"], row["layer"]))
    layers = [(layer, [_line(row) for row in of_layer]) for (_, layer), of_layer in by_layer]
    for texts, equal in groupby(layers, lambda layer: layer[1]):
        numbers = [number for number, _ in equal]
        name = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines += [line.format(name) for line in texts]
    lines.append(f"head weight {h.weight:.4g} scale {h.scale:.4g}")
    if shaping.kind != "none":
        said = [shaping.kind, *(f"repeats {shaping.repeats:.4g}" for _ in range(shaping.repeats > 0))]
        what = "rho" if shaping.kind == "u-spa" else "e^-gamma"
        lines.append(f"shaping {' '.join(said)} (shape_in, shape_out: {what} before and after)")
    entries = [fill(line, COLUMNS, subsequent_indent="    ") for line in lines]
    text = "\n".join(entries)
    shown = len(entries) if most is None else min(len(entries), most)
    while most is not None and text.count("\n") >= most and shown > 2:
        left = f"({len(entries) - shown} rows left out; table() in Python and --json have them)"
        text = "\n".join([*entries[: shown - shown // 2], left, *entries[-(shown // 2) :]])
        shown -= 1
    return text


def _line(row: Mapping[str, Any]) -> str:
    """A sublayer as a line of the table, with {} where the layers' numbers go."""
    numbers = " ".join(f"{role} {value:.4g}" for role, value in row["weights"].items())
    for name in RARE:
        if name in row:
            numbers += f" {name} {row[name]:.4g}"
    if "learning_rates" in row:
        rates = sorted({f"{rate:.4g}" for rate in row["learning_rates"].values()})
        numbers += f" learning rates {', '.join(rates)}"
    gain = "" if row["norm_gain"] == 1 else f"gain {row['norm_gain']:.4g} "
    multipliers = f"skip {row['skip']:.5f} branch {row['branch']:.5f}"
    return f"{row['stack']} {{}} {row['kind']} norm {row['norm']} {multipliers} {gain}{numbers}"


def records(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat record per sublayer, of columns by name; stacks, kinds and placements by their names."""
    names = {"stack": STACKS, "kind": KINDS, "placement": PLACEMENTS}
    named = {name: [names[name][k] for k in x] if name in names else x for name, x in columns.items()}
    return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
