"""The parametrization of a network that is named without a scheme."""

from __future__ import annotations

from typing import Any

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.families import find
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.schemes.base import scheme


def default_scheme(architecture: Architecture) -> str:
    """Name of the scheme of an architecture that is given without one: its family's own, else Xavier's."""
    return "xavier" if find(architecture.family) is None else "huggingface"


def parametrized(
    subject: str | Architecture | Parametrization, scheme_name: str | None = None, **options: Any
) -> Parametrization:
    """The parametrization of a preset, or of an architecture, by a scheme (default: `default_scheme`).

    Args:
        subject: a preset's name, an Architecture, or a Parametrization, which stays as it is. options: of the scheme.
    """
    if isinstance(subject, Parametrization):
        if scheme_name is not None:
            raise InputError("a Parametrization already has its numbers; leave the scheme out, or give an Architecture")
        return subject
    a = Architecture.preset(subject) if isinstance(subject, str) else subject
    made_by = scheme(default_scheme(a) if scheme_name is None else scheme_name, **options)
    return made_by(a, default_statistics(a))
