"""Where a model's probe points are: the tensor of each, seen at a module, every tensor once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from signalprop.attachment.mapping import describe, find
from signalprop.attachment.rows import AttachedEnds, AttachedRow
from signalprop.errors import InputError
from signalprop.hooks import Site
from signalprop.network.layout import Layout


@dataclass(frozen=True)
class Plan:
    """The sites of a model without repetition, and for every sublayer the index of each point's site.

    `stream_out` is -1 at the attention row of a parallel layer whose sum the model does not form.
    """

    layout: Layout
    sites: tuple[Site, ...]
    stream_in: tuple[int, ...]
    branch: tuple[int, ...]
    stream_out: tuple[int, ...]

    def where(self, index: int) -> str:
        """Sublayer and probe point of a site, in words; below 0 the sum after sublayer -1 - index."""
        for name in ("stream_in", "branch", "stream_out"):
            points: tuple[int, ...] = getattr(self, name)
            if index in points and index >= 0:
                return f"{describe(self.layout, points.index(index))}, {name}"
        return f"{describe(self.layout, -1 - index)}, stream_out"


def plan_of(model: nn.Module, table: Layout, rows: Sequence[AttachedRow], ends: AttachedEnds) -> Plan:
    """Where the probe points of every sublayer are, each tensor once."""
    sites: dict[tuple[int, str, int], int] = {}
    ordered: list[Site] = []

    def site(module: nn.Module, side: str, row: int, call: int = 0, calls: int = 1) -> int:
        key = (id(module), side, call)
        if key not in sites:
            sites[key] = len(ordered)
            ordered.append(Site(module, side, call, calls, int(table.stack[row])))
        return sites[key]

    def needed(row: int, name: str, why: str) -> nn.Module:
        module: nn.Module | None = getattr(rows[row], name)
        if module is None:
            raise InputError(f"{rows[row].label}: the mapping names no {name!r}; {why}")
        return module

    stream_in: list[int] = []
    branch: list[int] = []
    stream_out: list[int] = []
    for i, row in enumerate(rows):
        first = i == 0 or row.stack != rows[i - 1].stack
        seen = row.enters
        if row.parallel:
            entry = stream_in[-1]
        elif seen is not None:
            entry = site(find(model, seen.path, row.label), seen.side, i, seen.call, seen.calls)
        elif row.reads is not None:
            entry = site(row.reads, "input", i)
        elif not first and rows[i - 1].placement == "post":
            entry = site(needed(i - 1, "norm", "placement post needs it"), "output", i - 1)
        elif row.placement in ("pre", "sandwich"):
            entry = site(needed(i, "norm", f"placement {row.placement} needs it"), "input", i)
        else:
            why = "needs a module whose first argument is the stream that enters this sublayer"
            entry = site(needed(i, "reads", f"placement {row.placement} {why}"), "input", i)
        stream_in.append(entry)
        before = len(ordered)
        branch.append(site(row.branch, "output", i, row.call, row.calls))
        if len(ordered) == before:
            raise InputError(
                f"{row.label}: its branch is the module of another point; sublayers that share a module "
                "need a different `call` each"
            )
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].stack != row.stack
        final = ends.final_norm if i + 1 == len(rows) else ends.encoder_final_norm
        seen = row.leaves
        if seen is not None:
            leave = site(find(model, seen.path, row.label), seen.side, i, seen.call, seen.calls)
        elif row.stream_out is not None:
            leave = site(row.stream_out, "output", i)
        elif row.placement == "post":
            leave = site(needed(i, "norm", "placement post needs it"), "output", i)
        elif not last and rows[i + 1].parallel:
            leave = -1 if row.writes is None else site(row.writes, "output", i)
        elif not last:
            leave = stream_in[i + 1]
        elif final is not None:
            leave = site(final, "input", i)
        else:
            why = "without a final norm the last sublayer needs a module whose output is the stream after it"
            leave = site(needed(i, "writes", why), "output", i)
        stream_out.append(leave)
    return Plan(table, tuple(ordered), tuple(stream_in), tuple(branch), tuple(stream_out))
