"""Token kernels in the report: what `signalprop kernel` writes, and its section with heat maps and a depth slider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict

from signalprop.errors import InputError
from signalprop.files.storage import check_arrays, finite, opened
from signalprop.files.validation import Value
from signalprop.kernels.state import normalised
from signalprop.kernels.trace import Trace
from signalprop.network.moments import FloatArray
from signalprop.report.html import blocks
from signalprop.report.html.blocks import Block
from signalprop.report.html.parts import Part, numbered
from signalprop.results.text import number

SCHEMA = "signalprop/kernel/1"
Number = float | None
_BANDS, _SAID = 3, " Bands: the range over positions."
_ENDS = (("low", "diagonal_min"), ("high", "diagonal_max"))
_CURE = "larger skips, smaller attention branches (deepscalelm, noci), or shaped attention (e-spa)"
_LOWEST = 1e-16  # of 1 - cosine on a logarithmic axis: below is rounding


class Curves(Value):
    """Numbers of one configuration over depth, as the JSON form of a Trace has them (what the report draws)."""

    model_config = ConfigDict(title="kernel", extra="ignore")
    n_layers: int
    n_tokens: int
    scheme: str = ""
    source: str = ""
    collapse_depth: int | None = None
    rank_collapse_depth: int | None = None
    forward: dict[str, list[Number]]
    gradient: dict[str, list[Number]] | None = None


@dataclass(frozen=True, eq=False)
class Kernels:
    """One network's kernels: numbers over depth (None where only matrices were given), and raw kernels by depth."""

    curves: Curves | None
    forward: Mapping[int, FloatArray] = field(default_factory=dict)
    gradient: Mapping[int, FloatArray] = field(default_factory=dict)


def of_trace(trace: Trace) -> Kernels:
    """What the report shows of a Trace."""
    return Kernels(_curves(finite(trace.to_json())), trace.kernels, trace.gradients)


def of_json(data: Mapping[str, Any]) -> dict[str, Kernels]:
    """The configurations in the JSON form of `signalprop kernel`, by name."""
    items = data.get("configurations")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError("it has no list of configurations; write it with signalprop kernel --json")
    return {str(item.get("name", "")): Kernels(_curves(item)) for item in items}


def of_arrays(path: Path) -> dict[str, Kernels]:
    """The matrices in a file of `signalprop kernel --matrices`, by configuration."""
    found: dict[str, dict[str, dict[int, FloatArray]]] = {}
    try:
        with opened(path) as file, np.load(file, allow_pickle=False) as arrays:
            check_arrays(arrays, path)
            for key in arrays.files:
                name, direction, depth = key.rsplit("/", 2)
                matrix = np.asarray(arrays[key], np.float64)
                if direction not in ("forward", "gradient") or matrix.ndim != 2 or len(set(matrix.shape)) != 1:
                    raise ValueError(f"{key} is not a kernel")
                found.setdefault(name, {"forward": {}, "gradient": {}})[direction][int(depth)] = matrix
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or 'it is not a NumPy file'}") from None
    except Exception as error:  # of zip files, NumPy's headers, and names of arrays
        reason = " ".join(str(error).split())
        raise InputError(f"{path} holds no kernels ({reason:.80}); expected a file of kernel --matrices") from None
    return {name: Kernels(None, item["forward"], item["gradient"]) for name, item in found.items()}


def _curves(data: Mapping[str, Any]) -> Curves:
    curves = Curves(**{str(key): value for key, value in data.items()})
    for column in (*curves.forward.values(), *(curves.gradient or {}).values()):
        if len(column) != curves.n_layers + 1:
            raise InputError(f"a column has {len(column)} numbers; expected {curves.n_layers + 1}, one per depth")
    return curves


def kernel_section(items: Mapping[str, Kernels]) -> Block:
    """Heat maps of cosines with a depth slider, and the numbers over depth."""
    groups = list(items)
    drawn = _charts(items)
    matrices = _heat_maps(items)
    depths = sorted({depth for item in items.values() for depth in (*item.forward, *item.gradient)})
    slider = (
        {"label": "depth", "values": [str(depth) for depth in depths], "start": len(depths) - 1} if depths else None
    )
    return blocks.section(
        "kernels",
        "Token kernels",
        [*matrices, *drawn, *_table(items)],
        lead="Who becomes alike: cosines of all pairs of tokens after every layer. Rank collapse is a map of ones.",
        groups=groups,
        sources=[("signal", "line"), ("gradient", "dashed")],
        places=[_depths(item) for item in items.values()],
        slider=slider,
    )


def _depths(item: Kernels) -> Block:
    n = 0 if item.curves is None else item.curves.n_layers
    return blocks.place(range(n + 1), ["the input"] + [f"after layer {layer}" for layer in range(n)])


def _charts(items: Mapping[str, Kernels]) -> list[Block]:
    """Bands, of few networks: one standard deviation over sequences, or the range over positions."""
    shown = [(k, item.curves) for k, item in enumerate(items.values()) if item.curves is not None]
    bands = len(shown) <= _BANDS

    def curves(name: str, floor: float = 0.0) -> list[Block]:
        out = []
        for k, c in shown:
            y = np.maximum(blocks.numbers(c.forward.get(name, ())), floor)
            sd = c.forward.get(f"{name}_sd") if bands else None
            low, high = (None, None) if sd is None else (y - blocks.numbers(sd), y + blocks.numbers(sd))
            if np.isfinite(y).any():
                out.append(blocks.series(k, 0, k, y, low=low, high=high))
        return out

    diagonals = [
        blocks.log_series(
            k, source, k, blocks.numbers(columns["log_diagonal"]),
            **{side: blocks.numbers(columns[name]) for side, name in _ENDS if bands and name in columns},
        )
        for k, c in shown
        for source, columns in enumerate((c.forward, c.gradient or {}))
        if "log_diagonal" in columns
    ]  # fmt: skip
    made = [
        blocks.chart("kernel-distance", "How far apart tokens are", curves("distance", _LOWEST), x="depth",
                     y="1 - mean cosine", scale="log"),
        blocks.chart("kernel-cosine", "Mean cosine of two tokens", curves("mean_cosine"), x="depth", y="cosine"),
        blocks.chart("kernel-rank", "Effective rank", curves("effective_rank"), x="depth", y="tokens", scale="log"),
        blocks.chart("kernel-diagonal", "Mean diagonal of the raw kernel", diagonals, x="depth", y="mean diagonal",
                     scale="log", caption=f"The gradient's is relative to that at the top.{_SAID * bands}"),
    ]  # fmt: skip
    return [item for item in made if item["series"]]


def _heat_maps(items: Mapping[str, Kernels]) -> list[Block]:
    shown = [
        (k, name, direction, matrices)
        for k, (name, item) in enumerate(items.items())
        for direction, matrices in (("forward", item.forward), ("gradient", item.gradient))
        if matrices
    ]
    frames = sum(len(matrices) for *_, matrices in shown)
    out = []
    for k, name, direction, matrices in shown:
        stride = blocks.every(max(len(matrix) for matrix in matrices.values()), frames)
        cosines = {str(depth): normalised(matrix)[::stride, ::stride] for depth, matrix in matrices.items()}
        known = [value for matrix in cosines.values() for value in matrix[np.isfinite(matrix)].tolist()]
        low = -1.0 if min(known, default=0.0) < 0 else 0.0
        every = "" if stride == 1 else f"Every {_ordinal(stride)} token is shown."
        block = blocks.heat_map(
            f"kernel-map-{k}-{direction}", name if direction == "forward" else f"{name}, gradient", cosines, x="token",
            y="token", limits=(low, 1.0), step=(stride, stride), caption=every, value="cosine",
            down=True,
        )  # fmt: skip
        out.append({**block, "group": k, "source": 0 if direction == "forward" else 1})
    return out


def _table(items: Mapping[str, Kernels]) -> list[Block]:
    rows = []
    for name, item in items.items():
        c = item.curves
        if c is None:
            continue
        rows.append(
            [
                name, str(c.n_layers), str(c.n_tokens), c.source, number(_last(c.forward.get("mean_cosine"))),
                number(_last(c.forward.get("effective_rank"))),
                "none" if c.collapse_depth is None else str(c.collapse_depth),
                "none" if c.rank_collapse_depth is None else str(c.rank_collapse_depth),
            ]
        )  # fmt: skip
    header = ["network", "layers", "tokens", "input", "mean cosine at the top", "effective rank at the top",
              "distances vanish from depth", "rank 1 from depth"]  # fmt: skip
    return [blocks.table("Rank collapse", header, rows)] if rows else []


def kernel_findings(items: Mapping[str, Kernels]) -> list[Block]:
    """Cards for networks whose tokens become one."""
    out = []
    for name, item in items.items():
        c = item.curves
        depth = None if c is None else c.collapse_depth if c.rank_collapse_depth is None else c.rank_collapse_depth
        if c is not None and depth is not None:
            said = f"from depth {depth} of {c.n_layers} on all tokens are one to the kernel"
            out.append(blocks.card("warning", name, "rank collapse", [said], _CURE))
    return out


def _last(column: Sequence[Number] | None) -> Number:
    return column[-1] if column else None


def _ordinal(n: int) -> str:
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10 if n % 100 not in (11, 12, 13) else 0, 'th') }"


def merged(items: Sequence[tuple[str, Trace | Kernels]]) -> dict[str, Kernels]:
    """Numbers and matrices of one configuration, which come from two files, as one; other names that clash get a #k."""
    apart: list[tuple[str, Kernels]] = []
    for name, found in items:
        item = of_trace(found) if isinstance(found, Trace) else found
        at = next((k for k, (other, own) in enumerate(apart) if other == name and _halves(own, item)), None)
        if at is None:
            apart.append((name, item))
            continue
        first, second = (apart[at][1], item) if item.curves is None else (item, apart[at][1])
        apart[at] = name, Kernels(first.curves, second.forward or first.forward, second.gradient or first.gradient)
    return numbered(apart)


def _halves(one: Kernels, other: Kernels) -> bool:
    return (one.curves is None) != (other.curves is None)


PART = Part(
    types=(Trace, Kernels),
    sections=lambda items, _: [kernel_section(items)],
    cards=kernel_findings,
    together=merged,
    readers={SCHEMA: lambda _, data: dict(of_json(data))},
    arrays=lambda path: dict(of_arrays(path)),
)
