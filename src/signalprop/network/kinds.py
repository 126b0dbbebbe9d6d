"""Kinds of sublayers as values. Every folder of `signalprop/sublayers` is one; being there registers it.

A kind says here what it is: its weights, its names in print, what it reads. What it does to a signal stands in the
other files of its folder, which are imported when they are first used: `moments`, `kernel`, `cost`, `module`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.validation import Value

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture

KindColumn = NDArray[np.int8]


class HasKinds(Protocol):
    """Rows of sublayers that know their kind: a Layout, or a Parametrization."""

    @property
    def kind(self) -> KindColumn:
        """Of each sublayer: index into KINDS."""


def _always(_: Architecture) -> bool:
    return True


def _bias(architecture: Architecture) -> bool:
    return architecture.bias


@dataclass(frozen=True)
class Role:
    """One weight of a kind of sublayer.

    Attributes:
        name: in tables and files; kinds may share a Role, but two Roles of one name are refused.
        fan: (fan_in, fan_out) in an architecture. exists: whether an architecture has it.
        biased: whether the built network's map has a bias.
        copies: how many equal ones it holds, as (copies, outputs, inputs) (experts); None: it is one map.
        reads: it reads the stream. writes: it ends the branch: multipliers can be put on it, and schemes that scale the
            maps onto the stream with depth scale this one.
    """

    name: str
    fan: Callable[[Architecture], tuple[int, int]]
    exists: Callable[[Architecture], bool] = _always
    biased: Callable[[Architecture], bool] = _bias
    copies: Callable[[Architecture], int] | None = None
    reads: bool = False
    writes: bool = False


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of sublayer.

    Attributes:
        name: that of its folder, in tables and files. package: the folder, as Python's `__package__`.
        roles: its weights, in the order in which they are drawn and shown.
        words, short: its name in a sentence, and in a narrow column. line: style of its curves.
        counted: the part of a network that its parameters and operations count to; default: its name.
        attends: it has queries and keys, so its scores have a scale. reads_memory: it reads the encoder's output.
        activates: the architecture's activation is in it.
        settings: what an architecture says of its sublayers of this kind beyond its own fields; in
            `Architecture.settings` under the kind's name.
        longest: tokens up to which token kernels go through it without being asked for; None: any number. beyond: what
            averages are worth where there are more, for a note.
    """

    name: str
    package: str
    roles: tuple[Role, ...]
    words: str
    short: str
    line: Literal["-", "--", ":", "-."] = "-"
    counted: str = ""
    attends: bool = False
    reads_memory: bool = False
    activates: bool = False
    settings: type[Value] | None = None
    longest: int | None = None
    beyond: str = ""

    @property
    def code(self) -> int:
        """Index into KINDS, as columns of tables hold it."""
        return KINDS.index(self.name)

    @property
    def attends_itself(self) -> bool:
        """Whether a token attends to the tokens of its own stream."""
        return self.attends and not self.reads_memory

    def of(self, rows: HasKinds) -> NDArray[np.bool_]:
        """Which of the rows of a table are of this kind, (sublayers,)."""
        return np.asarray(rows.kind == self.code)

    def role_names(self, architecture: Architecture) -> tuple[str, ...]:
        """Its weights in an architecture."""
        return tuple(role.name for role in self.roles if role.exists(architecture))

    @property
    def has_copies(self) -> bool:
        """Whether some of its weights hold several equal maps."""
        return any(role.copies is not None for role in self.roles)

    def part(self, name: str) -> Any:
        """A file of its folder as a module: `moments`, `kernel`, `cost` or `module`.

        Raises:
            InputError: nobody knows what is inside.
        """
        if not self.package:
            raise InputError(
                "give mapping=, which says what every weight is: this network has branches of which only the output is "
                "known, so they can be measured, but not predicted, built or counted"
            )
        return import_module(f"{self.package}.{name}")


def _discovered() -> Iterator[Kind]:
    folders = import_module("signalprop.sublayers")  # by name: the rooms above are not imported from here
    for found in iter_modules(folders.__path__):
        if found.ispkg:
            yield import_module(f"{folders.__name__}.{found.name}.roles").KIND


# What is added to the stream by something of which nothing else is known (`signalprop.streams`).
UNKNOWN = Kind(name="branch", package="", roles=(), words="branch", short="branch", line=":")
_BY_NAME: dict[str, Kind] = {kind.name: kind for kind in (*_discovered(), UNKNOWN)}
KINDS: tuple[str, ...] = tuple(_BY_NAME)
ROLE: dict[str, Role] = {}
for _kind in _BY_NAME.values():
    for _role in _kind.roles:
        if ROLE.setdefault(_role.name, _role) is not _role:
            raise ImportError(f"kind {_kind.name!r}: another kind has a role {_role.name!r}; choose another name")
ROLES: tuple[str, ...] = tuple(ROLE)


def kind_of(rows: HasKinds, index: int) -> Kind:
    """The kind of row `index` of a table."""
    return kind_named(KINDS[rows.kind[index]])


def kind_named(name: str) -> Kind:
    """The kind of that name; KeyError where there is none."""
    return _BY_NAME[name]


def kinds_in(rows: HasKinds) -> list[Kind]:
    """The kinds that a table has."""
    return [_BY_NAME[KINDS[code]] for code in np.unique(rows.kind).tolist()]


def kinds_where(test: Callable[[Kind], bool]) -> list[Kind]:
    """The registered kinds that pass a test."""
    return [kind for kind in _BY_NAME.values() if test(kind)]


def rows_where(rows: HasKinds, test: Callable[[Kind], bool]) -> NDArray[np.bool_]:
    """Which rows of a table are of a kind that passes a test, (sublayers,)."""
    return np.array([test(kind) for kind in _BY_NAME.values()])[rows.kind]
