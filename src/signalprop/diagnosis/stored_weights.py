"""The weights of a checkpoint, read from its files in constant memory: no model is built, PyTorch is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from signalprop.diagnosis.result import Number, known, number
from signalprop.diagnosis.stored_findings import findings_in
from signalprop.diagnosis.stored_values import RoleWeights, StoredWeights, TensorWeights
from signalprop.diagnosis.tensor_statistics import statistics, values_of
from signalprop.diagnosis.weight_names import layers_of
from signalprop.errors import InputError
from signalprop.files.tensor_files import StoredTensor, stored_tensors
from signalprop.files.validation import Value
from signalprop.results.findings import Findings

Progress = Callable[[int, int], None]


class Difference(Value):
    """Of two tensors: sums of squares of the difference and of the other one; whether they are equal bit by bit."""

    moved: Number
    size: Number
    equal: bool


def read_weights(
    source: str | Path,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> StoredWeights:
    """Statistics of all floating-point tensors of a checkpoint; memory does not grow with it.

    Args:
        source: a directory with safetensors (one file, or shards with an index), or a .safetensors file.
        against: another one; then also what has changed from there to here.
        progress: called with (megabytes read, all).
    """
    stored = stored_tensors(source)
    there = {} if against is None else {tensor.name: tensor for tensor in stored_tensors(against)}
    for tensor in stored:
        other = there.get(tensor.name, tensor)
        if other.shape != tensor.shape:
            raise InputError(
                f"{tensor.name} has shape {list(tensor.shape)} in {source}, {list(other.shape)} in {against}; expected "
                "checkpoints of one architecture"
            )
    if there and not any(tensor.name in there for tensor in stored):
        raise InputError(
            f"{source} and {against} have no tensor of one name; expected two checkpoints of one architecture"
        )
    readable = [tensor for tensor in stored if tensor.readable]
    both = {tensor.name for tensor in readable if tensor.name in there and there[tensor.name].readable}
    seen = _counter(progress, sum(t.n_bytes * (2 if t.name in both else 1) for t in readable))
    rows: list[TensorWeights] = []
    digests: dict[str, str] = {}
    differences: dict[str, Difference] = {}
    for tensor in readable:
        row, digests[tensor.name] = statistics(tensor, seen)
        if tensor.name in both:
            moved = difference(tensor, there[tensor.name], seen)
            row = row.model_copy(update={"change": _relative([moved]), "equal": moved.equal})
            differences[tensor.name] = moved
        rows.append(row)
    return StoredWeights(
        model=str(source),
        n=sum(row.n for row in rows),
        tensors=tuple(rows),
        roles=_by_role(rows, differences),
        left_out={tensor.name: tensor.dtype for tensor in stored if not tensor.readable},
        against=None if against is None else str(against),
        only_here=tuple(t.name for t in stored if t.name not in there) if against is not None else (),
        only_there=tuple(sorted(set(there) - {t.name for t in stored})),
        findings=Findings(
            findings_in(rows, digests, layers_of(Path(source), {row.stack for row in rows if row.stack}))
        ),
    )


def _counter(progress: Progress | None, n_bytes: int) -> Callable[[int], None]:
    """Bytes to whole megabytes, each reported once."""
    done = 0

    def seen(more: int) -> None:
        nonlocal done
        before, done = done, done + more
        if progress is not None:
            for megabyte in range(before // 10**6, done // 10**6):
                progress(megabyte + 1, max(n_bytes // 10**6, 1))

    return seen


def difference(tensor: StoredTensor, other: StoredTensor, seen: Callable[[int], None] | None = None) -> Difference:
    """What has changed from `other` to `tensor`, which are of one shape, in one pass over both."""
    moved = size = 0.0
    equal = tensor.dtype == other.dtype
    with np.errstate(all="ignore"):
        for here, there in zip(tensor.pieces(), other.pieces(), strict=True):
            if seen is not None:
                seen(here.nbytes)
            equal = equal and here.tobytes() == there.tobytes()
            before = values_of(there, other.dtype).astype(np.float64)
            size += float(before @ before)
            if not equal:
                before -= values_of(here, tensor.dtype)
                moved += float(before @ before)
    return Difference(moved=number(moved), size=number(size), equal=equal)


def _relative(found: Sequence[Difference]) -> Number:
    """Norm of the difference over the norm of the other side."""
    moved, size = known(d.moved for d in found), known(d.size for d in found)
    if len(moved) < len(found) or len(size) < len(found):
        return None
    return number(math.sqrt(sum(moved) / sum(size))) if sum(size) > 0 else 0.0 if sum(moved) == 0 else None


def _by_role(rows: list[TensorWeights], differences: Mapping[str, Difference]) -> tuple[RoleWeights, ...]:
    def key(row: TensorWeights) -> tuple[str, str]:
        return row.stack or "", row.role

    out = []
    for _, group in groupby(sorted(rows, key=lambda row: (*key(row), -1 if row.layer is None else row.layer)), key):
        members = list(group)
        layers = [list(same) for _, same in groupby(members, lambda row: row.layer)]
        moved = [differences[row.name] for row in members if row.name in differences]
        extremes = [abs(x) for row in members for x in (row.least, row.most) if x is not None]
        out.append(
            RoleWeights(
                role=members[0].role,
                stack=members[0].stack,
                tensors=len(members),
                n=sum(row.n for row in members),
                zeros=sum(row.zeros for row in members),
                not_finite=sum(row.nan + row.infinite for row in members),
                largest=max(extremes, default=None),
                layers=tuple(same[0].layer for same in layers),
                rms=tuple(_rms(same) for same in layers),
                change=_relative(moved) if moved else None,
                equal=sum(d.equal for d in moved) if moved else None,
            )
        )
    return tuple(out)


def _rms(rows: list[TensorWeights]) -> Number:
    """Of all finite numbers of some tensors together."""
    counted = [(row.n - row.nan - row.infinite, row.rms) for row in rows if row.rms is not None]
    n = sum(count for count, _ in counted)
    return number(math.sqrt(sum(count * rms**2 for count, rms in counted) / n)) if n else None
