"""What the page shows of settings: curves, a line of numbers each, what stands out, where it is not right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.kernels.grid import grid_for
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import Fidelity, cheapest, predict
from signalprop.report import findings
from signalprop.report.html import Item, document, render, signal
from signalprop.report.html.blocks import Block
from signalprop.report.html.curves import Curve
from signalprop.results.profile import Profile
from signalprop_lab.explorer.settings import Settings, labels

MOST = 7  # curves at once: as many as there are colours
# Sublayers times squared length up to which token kernels take seconds (docs/reporting.md).
_LARGEST_KERNELS = 6_500_000
# Sublayers times (squared length plus what a sublayer costs at any length) up to which they take 50 ms.
_QUICK_KERNELS, _PER_SUBLAYER = 250_000, 15_000


class Predicted(NamedTuple):
    """A prediction, the table it was made from, and what to know about it."""

    profile: Profile
    table: Parametrization
    notes: tuple[str, ...]


class _Network(NamedTuple):
    """The numbers of a network, its data, the fidelity that is right for it, and how long rows are."""

    table: Parametrization
    inputs: InputStatistics
    needed: Fidelity
    followed: int

    @property
    def size(self) -> int:
        """Sublayers times the square of the positions that token kernels follow."""
        return self.table.n_sublayers * self.followed**2


@lru_cache(maxsize=64)
def _network(settings: Settings) -> _Network:
    table = settings.table()
    inputs = default_statistics(table.architecture)
    grid = grid_for(table, inputs)
    followed = table.architecture.seq_len if grid is None else len(grid.n)
    return _Network(table, inputs, cheapest(table, inputs)[0], followed)


@lru_cache(maxsize=64)
def predicted(settings: Settings) -> Predicted:
    """The prediction for settings; kept, so that pinned curves cost nothing."""
    network = _network(settings)
    table, a = network.table, network.table.architecture
    if settings.fidelity == "auto" and network.needed == "kernel" and network.size > _LARGEST_KERNELS:
        longest = int((_LARGEST_KERNELS / table.n_sublayers) ** 0.5)
        raise InputError(
            f"token kernels of {a.n_layers} layers and {a.seq_len} tokens are too slow for this page; take at most "
            f"{longest} tokens, fidelity moments, or the copied command"
        )
    try:
        profile = predict(table, network.inputs, fidelity=settings.fidelity)
    except InputError as error:
        if settings.fidelity == "moments" and network.needed == "kernel":  # in the words of the page's own control
            raise InputError(f"{error}: choose fidelity auto") from None
        raise
    return Predicted(profile, table, (*_moved(table, settings), *profile.notes))


def takes_long(settings: Settings) -> bool:
    """Whether a prediction takes longer than a redraw may: token kernels of more than a few layers and tokens."""
    if settings.fidelity == "moments":
        return False
    network = _network(settings)
    return network.needed == "kernel" and network.size + _PER_SUBLAYER * network.table.n_sublayers > _QUICK_KERNELS


def _moved(table: Parametrization, settings: Settings) -> list[str]:
    """What to say where the scheme puts the norms elsewhere than the control says."""
    places = sorted({PLACEMENTS[k] for k in table.placement})
    if places == [settings.norm_placement]:
        return []
    return [f"{settings.scheme} decides where the norms stand: {' and '.join(places)} (not {settings.norm_placement})"]


def shown(current: Settings, pinned: Sequence[Settings], *, draft: bool = False) -> Block:
    """Everything that the page shows of the current settings and of the pinned ones, JSON-ready.

    Args:
        draft: what takes long is to follow: `pending` says that moments stand for the token kernels until then. Where
            there are no moments, there is nothing but that word.
    """
    several, names = _named(current, pinned)
    pending = draft and takes_long(current)
    if pending:
        several[0] = current.model_copy(update={"fidelity": "moments"})
        try:
            predicted(several[0])
        except InputError:
            return {"pending": True}
    found = [predicted(item) for item in several]
    curves = [
        Curve(name, f"predicted ({item.profile.fidelity})", item.profile)
        for name, item in zip(names, found, strict=True)
    ]
    return {
        "pending": pending,
        "section": signal.signal_section(curves),
        "table": signal.glance_block(curves),
        "label": names[0],
        "warnings": findings.warnings(found[0].profile),
        "notes": list(found[0].notes),
        "python": current.python(),
        "command": current.command(),
    }


def report(current: Settings, pinned: Sequence[Settings]) -> str:
    """The report of all curves, with the table of every network: one self-contained HTML page."""
    several, names = _named(current, pinned)
    found = [(name, predicted(item)) for name, item in zip(names, several, strict=True)]
    items: list[tuple[str, Item]] = [(name, item.profile) for name, item in found]
    return render(document([*items, *((name, item.table) for name, item in found)]))


def _named(current: Settings, pinned: Sequence[Settings]) -> tuple[list[Settings], list[str]]:
    """The current settings and the pinned ones, each once, with their names."""
    several = [current, *dict.fromkeys(pinned)]
    if len(several) > MOST:
        raise InputError(f"{len(several)} curves at once are too many to tell apart; unpin some, {MOST} fit")
    names = labels(several)
    return several, [names[0] if len(several) == 1 else f"{names[0]} (now)", *names[1:]]
