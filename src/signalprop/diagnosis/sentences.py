"""Sentences that both a diagnosis and the reading of a checkpoint's files give, in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from signalprop.results.findings import Finding
from signalprop.results.text import named

PASSES = "tested: by the passes of a short text"


def not_finite(name: str, nan: int, infinite: int, n: int, first: Sequence[int], kind: str = "parameter") -> str:
    """A tensor that holds NaN or infinite numbers; first: index of the first."""
    what = " and ".join(f"{count:,} {word}" for count, word in ((nan, "NaN"), (infinite, "infinite numbers")) if count)
    return f"{name} ({kind}) holds {what} among {n:,}, the first at {list(first)}"


def equal_layers(layers: tuple[int, ...]) -> str:
    """Layers with the same numbers, that are not the same tensors."""
    return f"{named(layers)} hold the same numbers in every weight"


def fault(**fields: Any) -> Finding:
    """What is broken, by what a model holds or what its passes show; fields: of a Finding."""
    return Finding(**{"severity": "fault", "cause": PASSES} | fields)


def norms_of_zeros(found: Sequence[tuple[int | None, str]], cause: str) -> Iterator[Finding]:
    """Norms whose gains are all 0, by layer (None: the final norm) and the name of the parameter."""
    for final in (True, False):
        here = [(layer, name) for layer, name in found if (layer is None) == final]
        if not here:
            continue
        names = tuple(name for _, name in here)
        paths = ", ".join(name.removesuffix(".weight") for name in names[:4])
        at = tuple(dict.fromkeys(layer for layer, _ in here if layer is not None))
        yield fault(
            name="norm of zeros", layers=at, tensors=names, cause=cause,
            text=f"{named(at)}: the gains of {paths} are all 0, so whatever reads them reads only the bias or "
            "nothing, and gets no gradient" if at
            else f"the gains of the final norm ({paths}) are all 0: every word has the same logit, and no gradient "
            "passes",
            remedy="gains start at 1 (at 0 where 1 is added to them); load or initialise them again",
        )  # fmt: skip
