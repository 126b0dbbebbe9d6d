"""Text and JSON of kernel traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from signalprop.kernels.trace import COLLAPSED_DISTANCE, COLLAPSED_RANK, Trace
from signalprop.results.text import headed, number, spread, text_table


def table(traces: Mapping[str, Trace], *, rows: int | None = None) -> str:
    """One line per configuration and depth, in 80 columns: cosines, effective rank, diagonal, the gradient's diagonal.

    A cosine beyond 0.999 is written as 1 minus what it lacks. Of several sequences the means.

    Args:
        rows: at most so many, one per configuration at least: depths evenly spread, the last one included. None: all.
    """
    with_gradient = any(item.gradient is not None for item in traces.values())
    header = ["configuration", "depth", "mean cos", "lag 1", "min cos", "rank", "diagonal"] + [
        "gradient"
    ] * with_gradient
    lines = []
    for name, item in traces.items():
        forward = item.forward
        depths = (
            item.at
            if rows is None
            else spread(item.at, max(rows // len(traces), 1) + 1)[-max(rows // len(traces), 1) :]
        )
        for line, depth in enumerate(depths):
            row = [name if line == 0 else "", str(depth), cosine(float(forward.distance[depth]))]
            row.append(_decimals(forward.lags[1][depth], 4) if 1 in forward.lags else number(None))
            row += [_decimals(forward.min_cosine[depth], 4), _decimals(forward.effective_rank[depth], 2)]
            row.append(number(float(forward.diagonal_mean[depth])))
            if with_gradient:
                row.append("-" if item.gradient is None else number(float(item.gradient.diagonal_mean[depth])))
            lines.append(row)
    return text_table(header, lines)


def summary(traces: Mapping[str, Trace]) -> list[str]:
    """What was read, whether dropout is on, and the finding: which networks make their tokens equal, and where."""
    lines = [headed("input", source) for source in dict.fromkeys(_read(item) for item in traces.values())]
    dropping = [name for name, item in traces.items() if _drops(item)]
    if dropping:
        lines.append(headed("dropout", f"on in {', '.join(dropping)}: it raises the diagonal alone, so cosines fall"))
    found = {name: _collapse(item) for name, item in traces.items() if item.n_tokens > 1}
    if not found:
        return [*lines, headed("finding", "one token has no rank to lose")]
    collapsed = [f"{name} from layer {depth}" for name, depth in found.items() if depth is not None]
    distinct = [name for name, depth in found.items() if depth is None]
    said = [f"rank collapse: {'; '.join(collapsed)}"] if collapsed else []
    said += [f"no rank collapse: {'; '.join(distinct)}"] if distinct else []
    return [*lines, headed("finding", ". ".join(said))]


def _collapse(item: Trace) -> int | None:
    """The first layer after which the tokens of a network are equal: by their effective rank, else by their cosines."""
    return item.collapse_depth if item.rank_collapse_depth is None else item.rank_collapse_depth


def to_json(traces: Mapping[str, Trace], schema: str) -> dict[str, Any]:
    """All numbers at all depths, by configuration."""
    return {
        "schema": schema,
        "collapse": {"distance": COLLAPSED_DISTANCE, "effective_rank": COLLAPSED_RANK},
        "configurations": [{"name": name, **item.to_json()} for name, item in traces.items()],
    }


def cosine(distance: float) -> str:
    """A cosine from what it lacks to 1; 1 where double precision has no number between."""
    if 2**-53 < distance < 1e-3:
        return f"1-{distance:.1e}"
    return "1" if distance <= 2**-53 else number(None) if distance != distance else f"{1 - distance:.4f}"


def _decimals(value: float, digits: int) -> str:
    """A number; a dash if there is none, as of cosines of one token."""
    return number(None) if value != value else f"{value:.{digits}f}"


def _drops(item: Trace) -> bool:
    a = item.parametrization.architecture
    return bool(a.dropout or a.attention_dropout or a.embedding_dropout)


def _read(item: Trace) -> str:
    several = f", {item.sequences} sequences" if item.sequences > 1 else ""
    return f"{item.source or 'statistics'}{several}, {item.n_tokens} tokens"
