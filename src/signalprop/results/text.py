"""Numbers, tables and networks as plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from textwrap import fill
from typing import TypeVar

import numpy as np

from signalprop.network.activations import UNKNOWN_ACTIVATION
from signalprop.network.architecture import Architecture
from signalprop.network.layer_inputs import changed
from signalprop.network.shown import COLUMNS

T = TypeVar("T")


def spread(items: Sequence[T], most: int | None) -> list[T]:
    """At most so many of the items, evenly spread, the first and the last included; None: all."""
    n = len(items)
    if most is None or n <= most:
        return list(items)
    return [items[i] for i in sorted({round(i) for i in np.linspace(0, n - 1, most)})]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, room: int | None = None) -> str:
    """Columns padded to equal width: the first `left` to the left, the others to the right.

    Args:
        room: characters of a line. Columns beyond it follow in another table, beside the first `left` again.
    """
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def padded(line: Sequence[str], shown: Sequence[int]) -> str:
        cells = [line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]) for i in shown]
        return "  ".join(cells).rstrip()

    tables = []
    for shown in _parts(widths, left, room):
        rule = "  ".join("-" * widths[i] for i in shown)
        tables.append("\n".join([padded(lines[0], shown), rule, *(padded(line, shown) for line in lines[1:])]))
    return "\n\n".join(tables)


def listing(rows: Sequence[tuple[str, str]]) -> str:
    """A line for each name and what is said of it, folded at 80 columns beside the names."""
    width = max((len(name) for name, _ in rows), default=0) + 2
    indent = " " * width
    return "\n".join(
        fill(f"{name:<{width}}{text}", COLUMNS, subsequent_indent=indent, break_on_hyphens=False) for name, text in rows
    )


def columns(cells: Sequence[str]) -> str:
    """The texts in columns of equal width, in the order of their lines, at most 80 characters wide."""
    width = max(map(len, cells), default=0) + 2
    each = max(1, (COLUMNS + 2) // width)
    lines = ["".join(f"{cell:<{width}}" for cell in cells[i : i + each]).rstrip() for i in range(0, len(cells), each)]
    return "\n".join(lines)


def _parts(widths: Sequence[int], left: int, room: int | None) -> list[list[int]]:
    """Columns of every table that is needed, so that none is wider than `room`."""
    first = list(range(min(left, len(widths))))
    parts = [list(first)]
    for i in range(len(first), len(widths)):
        wide = sum(widths[k] + 2 for k in (*parts[-1], i)) - 2
        if room is not None and wide > room and len(parts[-1]) > len(first):
            parts.append(list(first))
        parts[-1].append(i)
    return parts


def number(value: float | None) -> str:
    """Four significant digits, short at any magnitude; `-` for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}"


def headed(word: str, text: str) -> str:
    """A line of a result: the word, and what it says."""
    return f"{word:<20}{text}"


def percent(value: float | None) -> str:
    """A relative error in per cent; `-` for None."""
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2f} %" if value < 10 else f"{100 * value:.3g} %"


def tokens_in_words(architecture: Architecture) -> str:
    """`128 tokens per sequence`, of an encoder-decoder `128 + 64 tokens per sequence`."""
    a = architecture
    tokens = "token" if a.seq_len == 1 and not a.target_len else "tokens"
    return f"{a.seq_len:,}{f' + {a.target_len:,}' if a.target_len else ''} {tokens} per sequence"


def depth_in_words(architectures: Sequence[Architecture]) -> str:
    """`12 layers`, of an encoder-decoder `6+6 layers`, of several depths `12, 48 and 192 layers`."""
    depths = [f"{a.n_layers}+{a.n_decoder_layers}" if a.n_decoder_layers else str(a.n_layers) for a in architectures]
    *others, last = dict.fromkeys(depths)
    return f"{', '.join(others)} and {last} layers" if others else f"{last} layers"


def network_in_words(*architectures: Architecture) -> str:
    """`gpt2 decoder, 12 layers, d_model 768, pre-norm, gelu_tanh`; several may differ in depth alone."""
    a, depth = architectures[0], depth_in_words(architectures)
    placement = a.norm_placement if isinstance(a.norm_placement, str) else "mixed"
    name = " ".join(word for word in (a.family or "", a.kind) if word)
    norm = "no norm" if placement == "none" else f"{placement}-norm"
    streams = "" if a.streams is None else f", {a.streams.n} streams ({a.streams.mixing})"
    streams += "" if a.layer_inputs is None else f", {len(changed(a.layer_inputs))} layers read earlier streams"
    known = "activation not known" if a.activation == UNKNOWN_ACTIVATION else a.activation
    activation = re.sub(r"\d+\.\d{5,}", lambda found: f"{float(found[0]):.4g}", known)
    return f"{name}, {depth}, d_model {a.d_model}, {norm}, {activation}{streams}"


def ranges(layers: Sequence[int]) -> str:
    """Layer numbers as inclusive ranges: `3, 7-9`."""
    parts: list[list[int]] = []
    for layer in sorted(set(layers)):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def named(layers: Sequence[int]) -> str:
    """`layer 3`, or `layers 3, 7-9`."""
    return f"layer{'' if len(layers) == 1 else 's'} {ranges(layers)}"
