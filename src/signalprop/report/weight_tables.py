"""The weights of a checkpoint as plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill

from signalprop.diagnosis.stored_values import RoleWeights, StoredWeights, TensorWeights
from signalprop.network.shown import COLUMNS
from signalprop.results.text import number, ranges, text_table

_ROWS = 12


def weights_text(w: StoredWeights) -> str:
    """What is wrong, how it was initialised, what has changed, and a table of roles."""
    dtypes = sorted({tensor.dtype for tensor in w.tensors})
    head = f"{w.model}: {w.n:,} weights in {len(w.tensors):,} tensors ({', '.join(dtypes) or 'none'})"
    parts = [head, _said(w), _faults(w.tensors), _initialisation(w), _changes(w), _roles(w)]
    if w.left_out:
        parts.append(f"left out: {len(w.left_out)} tensors without floating-point numbers ({_some(list(w.left_out))})")
    return "\n".join(part for part in (*parts, *w.notes) if part)


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


def _initialisation(w: StoredWeights) -> str:
    found = w.initialisation
    if found is None:
        return ""
    second = next(((name, error) for name, error in found.others.items() if error is not None), None)
    after = f"; then {second[0]}, off by {100 * math.expm1(second[1]):.3g} %" if second else ""
    schemes, off = " = ".join(found.schemes), 100 * math.expm1(found.error)
    if found.fresh:
        said = f"initialisation: as drawn by {schemes} (standard deviations within {off:.2g} %{after})"
    else:
        said = f"initialisation: trained away from all schemes; nearest {schemes} (off by {off:.3g} %{after})"
    return fill(said, COLUMNS)


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
    for stack in dict.fromkeys(stack for stack, _ in layers):
        held = {layer: equal for (name, layer), equal in layers.items() if name == stack}
        still = tuple(sorted(layer for layer, equal in held.items() if all(equal)))
        part = tuple(sorted(layer for layer, equal in held.items() if any(equal) and not all(equal)))
        said = [f"unchanged: {ranges(still) if still else 'none'} of {len(held)} layers"]
        said += [f"changed in part: {ranges(part)}"] * bool(part)
        lines.append(f"  {f'{stack} ' * bool(stack)}{'; '.join(said)}")
    return lines


def _roles(w: StoredWeights) -> str:
    rows = sorted(w.roles, key=lambda role: (-role.not_finite, -role.n))
    head = ["role", "weights", "rms", "first", "last", "max/rms", "zeros"]
    head += ["change"] * (w.against is not None)
    n = _ROWS if w.against is None else _ROWS - 6  # a comparison takes lines, too
    table = text_table(head, [_cells(role, w.against is not None) for role in rows[:n]])
    left = sum(role.tensors for role in rows[n:])
    more = f"\nleft out: {len(rows) - n} smaller roles with {left} tensors (--json has all)" if left else ""
    return f"\n{table}{more}" if rows else ""


def _cells(role: RoleWeights, compared: bool) -> list[str]:
    known = [rms for rms in role.rms if rms is not None]
    rms = math.sqrt(sum(x * x for x in known) / len(known)) if known else None
    ratio = role.largest / rms if rms and role.largest is not None else None
    return [
        role.role if role.stack in (None, "decoder", "encoder") else f"{role.stack} {role.role}",
        f"{role.n:,}",
        number(rms),
        number(role.rms[0]),
        number(role.rms[-1]),
        number(ratio),
        f"{100 * role.zeros / role.n:.3g} %",
        *([number(role.change)] if compared else []),
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
