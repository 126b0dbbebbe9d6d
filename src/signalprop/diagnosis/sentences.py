"""Sentences that both a diagnosis and the reading of a checkpoint's files give, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from signalprop.results.findings import Finding
from signalprop.results.text import named

PASSES = "tested: by the passes of a short text"


def not_finite(name: str, nan: int, infinite: int, n: int, first: Sequence[int], kind: str = "parameter") -> str:
    """A tensor that holds NaN or infinite numbers; first: index of the first."""
    what = " and ".join(f"{count:,} {word}" for count, word in ((nan, "NaN"), (infinite, "infinite numbers")) if count)
    return f"{name} ({kind}) holds {what} among {n:,}, the first at {list(first)}"


def norm_of_zeros(layers: tuple[int, ...], paths: Sequence[str]) -> str:
    """Norms whose gains are all 0; layers: () of the final norm."""
    if not layers:
        only = "every word has the same logit, and no gradient passes"
        return f"the gains of the final norm ({paths[0]}) are all 0: {only}"
    return (
        f"{named(layers)}: the gains of {', '.join(paths[:4])} are all 0, so that what reads them reads its bias alone "
        "or nothing, and gets no gradient"
    )


def equal_layers(layers: tuple[int, ...]) -> str:
    """Layers with the same numbers, that are not the same tensors."""
    return f"{named(layers)} hold the same numbers in every weight"


def fault(**fields: Any) -> Finding:
    """What is broken, by what a model holds or what its passes show; fields: of a Finding."""
    return Finding(**{"severity": "fault", "cause": PASSES} | fields)
