"""What is wrong with the tensors of a checkpoint's files, in the words of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from signalprop.diagnosis import sentences
from signalprop.diagnosis.stored_values import TensorWeights
from signalprop.results.findings import Finding
from signalprop.results.text import named

_READ = "tested: the file was read"
_Layers = dict[tuple[str, int], list[TensorWeights]]  # by stack and layer


def findings_in(
    rows: Sequence[TensorWeights], digests: Mapping[str, str], configured: Mapping[str, int]
) -> Iterator[Finding]:
    """All findings, the most severe first.

    Args:
        digests: of the bytes of every tensor. configured: how many layers a stack has by the configuration.
    """
    layers: _Layers = {}
    for row in rows:
        if row.layer is not None:
            layers.setdefault((row.stack or "", row.layer), []).append(row)
    for row in rows:
        if row.nan + row.infinite:
            text = sentences.not_finite(row.name, row.nan, row.infinite, row.n, row.first_bad)
            yield _fault("not finite", text, () if row.layer is None else (row.layer,), row.name)
    yield from _norms(rows)
    yield from _out_of_place(layers, configured)
    yield from _equal(layers, digests)


def _fault(name: str, text: str, layers: tuple[int, ...], *tensors: str, **more: Any) -> Finding:
    return sentences.fault(name=name, text=text, layers=layers, tensors=tensors, cause=_READ, **more)


def _norms(rows: Sequence[TensorWeights]) -> Iterator[Finding]:
    """Gains of norms that are all 0 where the others of the model are not: some families store gains around 0."""
    gains = [r for r in rows if len(r.shape) == 1 and "norm" in r.name and not r.name.endswith("bias")]
    gains += [r for r in rows if len(r.shape) == 1 and ".ln" in f".{r.name}" and r.name.endswith("weight")]
    zero = [(row.layer, row.name) for row in gains if row.zeros == row.n]
    if len(zero) < len(gains):
        yield from sentences.norms_of_zeros(zero, _READ)


def _out_of_place(layers: _Layers, configured: Mapping[str, int]) -> Iterator[Finding]:
    """Layers that the configuration leaves out, and layers that the files do not hold."""
    for stack, n in configured.items():
        held = {layer for name, layer in layers if name == stack}
        beyond, missing = sorted(k for k in held if k >= n), sorted(set(range(n)) - held)
        if beyond:
            yield _fault(
                "layers left out",
                f"the configuration has {n} layers and leaves out {named(tuple(beyond))}, which the files hold",
                tuple(beyond), severity="warning",
            )  # fmt: skip
        if missing:
            yield _fault(
                "layers missing", f"{named(tuple(missing))}: the configuration has {n} layers, and no tensor is theirs",
                tuple(missing),
            )  # fmt: skip


def _equal(layers: _Layers, digests: Mapping[str, str]) -> Iterator[Finding]:
    """Layers whose tensors are equal bit by bit."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for (stack, layer), rows in layers.items():
        if any(len(row.shape) > 1 for row in rows):
            key = tuple(sorted((row.name.replace(f".{layer}.", ".*."), digests[row.name]) for row in rows))
            found.setdefault((stack, key), []).append(layer)
    for same in found.values():
        if len(same) > 1:
            yield _fault("equal layers", sentences.equal_layers(tuple(same)), tuple(same), severity="warning")
