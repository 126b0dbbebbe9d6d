"""Text and JSON of kernel traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from signalprop.kernels.kernel_statistics import KernelSeries
from signalprop.kernels.trace import COLLAPSED_DISTANCE, COLLAPSED_RANK, Trace
from signalprop.results.text import number, text_table


def table(traces: Mapping[str, Trace]) -> str:
    """One line per configuration and depth: cosines, effective rank, raw diagonal, and the gradient's diagonal.

    A cosine beyond 0.999 is written as 1 minus what it lacks. Of several sequences the means.
    """
    lags = sorted(set.intersection(*(set(item.forward.lags) for item in traces.values())))
    lags = [lag for lag in lags if lag in (1, _far(lags))]
    with_gradient = any(item.gradient is not None for item in traces.values())
    header = ["configuration", "depth", "mean cos", *(f"lag {lag}" for lag in lags), "min cos", "rank"]
    header += ["diagonal", "min", "max"] + ["gradient"] * with_gradient
    rows = []
    for name, item in traces.items():
        forward = item.forward
        for line, depth in enumerate(item.at):
            row = [name if line == 0 else "", str(depth), cosine(float(forward.distance[depth]))]
            row += [_decimals(forward.lags[lag][depth], 4) for lag in lags]
            row += [_decimals(forward.min_cosine[depth], 4), _decimals(forward.effective_rank[depth], 2)]
            row += [number(float(column[depth])) for column in _diagonal(forward)]
            if with_gradient:
                row.append("-" if item.gradient is None else number(float(item.gradient.diagonal_mean[depth])))
            rows.append(row)
    return text_table(header, rows)


def summary(traces: Mapping[str, Trace]) -> list[str]:
    """What was read, whether dropout is on, and where each network's rank collapses."""
    lines = []
    for source in dict.fromkeys(_read(item) for item in traces.values()):
        lines.append(f"{'input':<20}{source}")
    dropping = [name for name, item in traces.items() if _drops(item)]
    if dropping:
        lines.append(f"{'dropout':<20}on in {', '.join(dropping)}: it raises the diagonal alone, so cosines fall")
    for name, item in traces.items():
        depth, by_rank = item.collapse_depth, item.rank_collapse_depth
        if item.n_tokens == 1:
            said = "one token has no rank to lose"
        elif depth is None and by_rank is None:
            said = f"none in {len(item.forward.distance) - 1} layers"
        else:
            where = [] if by_rank is None else [f"effective rank below {COLLAPSED_RANK} from depth {by_rank}"]
            where += [] if depth is None else [f"1 - mean cos below {COLLAPSED_DISTANCE:g} from depth {depth}"]
            said = ", ".join(where)
        lines.append(f"{'rank collapse':<20}{name}: {said}")
    return lines


def to_json(traces: Mapping[str, Trace], schema: str) -> dict[str, Any]:
    """All numbers at all depths, by configuration."""
    return {
        "schema": schema,
        "collapse": {"distance": COLLAPSED_DISTANCE, "effective_rank": COLLAPSED_RANK},
        "configurations": [{"name": name, **item.to_json()} for name, item in traces.items()],
    }


def cosine(distance: float) -> str:
    """A cosine from what it lacks to 1."""
    if 0 < distance < 1e-3:
        return f"1-{distance:.1e}"
    return "1" if distance == 0 else number(None) if distance != distance else f"{1 - distance:.4f}"


def _far(lags: list[int]) -> int:
    """The lag of 50 tokens, or the largest one below."""
    return max((lag for lag in lags if lag <= 50), default=1)


def _decimals(value: float, digits: int) -> str:
    """A number; a dash where there is none, as of cosines of one token."""
    return number(None) if value != value else f"{value:.{digits}f}"


def _diagonal(series: KernelSeries) -> tuple[Any, ...]:
    return series.diagonal_mean, series.diagonal_min, series.diagonal_max


def _drops(item: Trace) -> bool:
    a = item.parametrization.architecture
    return bool(a.dropout or a.attention_dropout or a.embedding_dropout)


def _read(item: Trace) -> str:
    several = f", {item.sequences} sequences" if item.sequences > 1 else ""
    return f"{item.source or 'statistics'}{several}, {item.n_tokens} tokens"
