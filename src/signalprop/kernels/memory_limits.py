"""What token kernels cannot show, and what does not fit into memory."""

from __future__ import annotations

from signalprop.errors import InputError
from signalprop.files.limits import check_fits
from signalprop.network.parametrization import Parametrization

_MATRICES = 35  # of tokens x tokens that are held at once, at least: 35 for 4 layers, 64 for 32


def check_fits_of(parametrization: Parametrization, rows: int | None = None) -> None:
    """Refuse what cannot fit into memory, and sweeps.

    Raises:
        InputError: the parametrization is a sweep, or it has too many tokens.
    """
    a = parametrization.architecture
    tokens = max(a.seq_len, a.target_len or 0)
    check_fits(
        8 * _MATRICES * (rows or tokens) ** 2,
        f"a token kernel of {tokens:,} tokens",
        "take fewer tokens (seq_len), or fidelity moments",
    )
    if parametrization.skip.ndim != 1:
        raise InputError("fidelity 'kernel' takes one parametrization at a time; use moments for a sweep")


def check_covered(parametrization: Parametrization) -> None:
    """Refuse what a single token kernel cannot show.

    Raises:
        InputError: as `check_fits_of`, or the architecture is an encoder-decoder, which has two.
    """
    if parametrization.architecture.kind == "encoder-decoder":
        raise InputError("an encoder-decoder has two token kernels; take an encoder or a decoder, or predict it")
    if parametrization.architecture.several_streams:
        raise InputError("several residual streams have a token kernel for each pair; predict them with predict")
    check_fits_of(parametrization)
