"""The weights of a checkpoint as plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from signalprop.diagnosis.stored_values import RoleWeights, StoredWeights, TensorWeights
from signalprop.results.text import number, ranges, text_table

_ROWS = 12


def weights_text(w: StoredWeights) -> str:
    """What is wrong, what has changed, and a table of roles."""
    dtypes = sorted({tensor.dtype for tensor in w.tensors})
    head = f"{w.model}: {w.n:,} weights in {len(w.tensors):,} tensors ({', '.join(dtypes) or 'none'})"
    parts = [head, _said(w), _faults(w.tensors), _changes(w), _roles(w)]
    if w.left_out:
        parts.append(f"left out: {len(w.left_out)} tensors without floating-point numbers ({_some(list(w.left_out))})")
    return "\n".join(part for part in parts if part)


def _said(w: StoredWeights) -> str:
    """Findings, in the words of a diagnosis."""
    lines = [f"{one.severity.upper():<8}{one.name}: {one.text}" for one in w.findings]
    more = [f"and {len(lines) - _ROWS} more findings (--json has all)"] if len(lines) > _ROWS else []
    return "\n".join([*lines[:_ROWS], *more])


def _faults(tensors: Sequence[TensorWeights]) -> str:
    """The worst tensors first."""
    wrong = sorted((t for t in tensors if t.faults), key=lambda t: -t.nan - t.infinite)
    lines = [f"  {tensor.name}: {', '.join(tensor.faults)}" for tensor in wrong[:_ROWS]]
    more = [f"  and {len(wrong) - _ROWS} more tensors (--json has all)"] if len(wrong) > _ROWS else []
    return "\n".join(["wrong:", *lines, *more]) if wrong else "all numbers are finite"


def _changes(w: StoredWeights) -> str:
    if w.against is None:
        return ""
    compared = [t for t in w.tensors if t.equal is not None]
    moved = sorted((t for t in compared if not t.equal), key=lambda t: -math.inf if t.change is None else -t.change)
    lines = [f"against {w.against}: {len(compared) - len(moved)} of {len(compared)} tensors are equal bit by bit"]
    lines += _unchanged(compared)
    lines += [f"  only here: {_some(w.only_here)}"] * bool(w.only_here)
    lines += [f"  only there: {_some(w.only_there)}"] * bool(w.only_there)
    lines += [f"  {tensor.name}: changed by {number(tensor.change)} of its norm" for tensor in moved[:5]]
    return "\n".join(lines)


def _unchanged(tensors: Sequence[TensorWeights]) -> list[str]:
    """Which layers are unchanged, and which have changed in part."""
    layers: dict[tuple[str, int], list[bool]] = {}
    for t in tensors:
        if t.layer is not None:
            layers.setdefault((t.stack or "", t.layer), []).append(bool(t.equal))
    lines = []
    stacks = dict.fromkeys(stack for stack, _ in layers)
    for stack in stacks:
        held = {layer: equal for (name, layer), equal in layers.items() if name == stack}
        still = tuple(sorted(layer for layer, equal in held.items() if all(equal)))
        part = tuple(sorted(layer for layer, equal in held.items() if any(equal) and not all(equal)))
        said = [f"unchanged: {ranges(still) if still else 'none'} of {len(held)} layers"]
        said += [f"changed in part: {ranges(part)}"] * bool(part)
        lines.append(f"  {_in(stack, several=len(stacks) > 1)}{'; '.join(said)}")
    return lines


def _roles(w: StoredWeights) -> str:
    rows = sorted(w.roles, key=lambda role: (-role.not_finite, -role.n))
    head = ["role", "weights", "rms", "first", "last", "max/rms", "zeros"]
    head += ["change"] * (w.against is not None)
    n = _ROWS if w.against is None else _ROWS - 6  # a comparison takes lines, too
    several = len({role.stack for role in rows if role.stack}) > 1
    cells = [[_in(role.stack, several=several) + role.role, *_cells(role)] for role in rows[:n]]
    cells = (
        cells if w.against is None else [[*row, number(role.change)] for row, role in zip(cells, rows, strict=False)]
    )
    table = text_table(head, cells)
    left = sum(role.tensors for role in rows[n:])
    more = f"\nleft out: {len(rows) - n} smaller roles with {left} tensors (--json has all)" if left else ""
    return f"\n{table}{more}" if rows else ""


def _in(stack: str | None, *, several: bool) -> str:
    """A stack before its layers or roles; nothing where a checkpoint has only one."""
    return f"{stack} " if several and stack else ""


def _cells(role: RoleWeights) -> list[str]:
    known = [rms for rms in role.rms if rms is not None]
    rms = math.sqrt(sum(x * x for x in known) / len(known)) if known else None
    ratio = role.largest / rms if rms and role.largest is not None else None
    return [
        f"{role.n:,}",
        number(rms),
        number(role.rms[0]),
        number(role.rms[-1]),
        number(ratio),
        f"{100 * role.zeros / role.n:.3g} %",
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
