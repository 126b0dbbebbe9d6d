"""A Parametrization as text and as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from signalprop.network.kinds import KINDS
from signalprop.network.layout import PLACEMENTS, STACKS

if TYPE_CHECKING:
    from signalprop.network.parametrization import Parametrization

# Columns that a row shows only where they do something.
RARE = (
    "norm_scale", "norm_bias", "norm_slope", "value_skip", "attention_gain", "shape_in", "shape_out", "shape_gain",
)  # fmt: skip


def parametrization_text(p: Parametrization) -> str:
    """One line per sublayer; consecutive layers with equal numbers share it. Not for sweeps."""
    e, h = p.embedding, p.head
    lines = [
        f"{p.scheme}: {p.architecture.n_layers_total} layers, {p.n_sublayers} sublayers, "
        f"d_model {p.architecture.d_model}",
        f"  embedding  token {e.token:.4g}  position {e.position:.4g}  segment {e.segment:.4g}  scale {e.scale:.4g}",
    ]
    layers: list[tuple[int, list[str]]] = []  # number within its stack, one line per sublayer
    for i, row in enumerate(p.rows()):
        if i == 0 or (p.layer[i], p.stack[i]) != (p.layer[i - 1], p.stack[i - 1]):
            layers.append((row["layer"], []))
        layers[-1][1].append(_line(row))
    start = 0
    for i in range(1, len(layers) + 1):
        if i < len(layers) and layers[i][1] == layers[start][1]:
            continue
        first, last = layers[start][0], layers[i - 1][0]
        name = f"{first}" if first == last else f"{first}-{last}"
        lines += [line.format(name) for line in layers[start][1]]
        start = i
    lines.append(f"  head       weight {h.weight:.4g}  scale {h.scale:.4g}")
    if p.shaping.kind != "none":
        s = p.shaping
        said = [s.kind, *(f"repeats {s.repeats:.4g}" for _ in range(s.repeats > 0))]
        what = "rho" if s.kind == "u-spa" else "e^-gamma"
        lines.append(f"  shaping    {'  '.join(said)}  (shape_in, shape_out: {what} before and after)")
    lines.append("weights are standard deviations; " + ", ".join(sorted(set(p.distribution.values()))))
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    """A sublayer as a line of the table, with {} where the layers' numbers go."""
    numbers = "  ".join(f"{role} {value:.4g}" for role, value in row["weights"].items())
    for name in RARE:
        if name in row:
            numbers += f"  {name} {row[name]:.4g}"
    if "learning_rates" in row:
        rates = sorted({f"{rate:.4g}" for rate in row["learning_rates"].values()})
        numbers += f"  learning rates {', '.join(rates)}"
    return (
        f"  {row['stack']} {{:>9}}  {row['kind']:<15} norm {row['norm']:<8} skip {row['skip']:.5f}"
        f"  branch {row['branch']:.5f}  gain {row['norm_gain']:.4g}  {numbers}"
    )


def records(p: Parametrization) -> list[dict[str, Any]]:
    """One flat record per sublayer: its place and every numeric column. Not for sweeps."""
    names = {"stack": STACKS, "kind": KINDS, "placement": PLACEMENTS}
    columns: dict[str, Any] = {name: [names[name][k] for k in getattr(p, name)] for name in names}
    columns |= {"layer": p.layer, **p.columns()}
    return [{name: column[i] for name, column in columns.items()} for i in range(p.n_sublayers)]
