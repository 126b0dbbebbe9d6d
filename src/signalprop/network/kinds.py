"""Kinds of sublayers as values. Every folder of `signalprop/sublayers` is one; being there registers it.

A kind says here what it is: its weights, its names in print, what it reads. What it does to a signal is in the other
files of its folder, which are imported when they are first used: `module`, `cost`; and, where there is a closed form of
it, `signal`. Without one token kernels are drawn by its module (`sublayers/drawn.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.validation import Value
from signalprop.network.architecture_fields import ArchitectureFields

KindColumn = NDArray[np.int8]


class HasKinds(Protocol):
    """Rows of sublayers that know their kind: a Layout, or a Parametrization."""

    @property
    def kind(self) -> KindColumn:
        """Of each sublayer: index into KINDS."""


class KindSettings(Value):
    """What an architecture says of its sublayers of a kind beside its fields; `kind` is the kind's name."""

    kind: ClassVar[str]

    @classmethod
    def of(cls, a: ArchitectureFields) -> Self:
        """Of an architecture; the defaults where it has no such sublayers."""
        return cast(Self, a.settings.get(cls.kind) or _usual(cls))


@cache
def _usual(settings: type[KindSettings]) -> KindSettings:
    return settings.model_validate({})


def always(_: ArchitectureFields) -> bool:
    """Of a role that every network with its kind has."""
    return True


def never(_: ArchitectureFields) -> bool:
    """Of a role whose map has no bias in any network."""
    return False


def with_biases(a: ArchitectureFields) -> bool:
    """Of a role whose map has a bias where the architecture's maps have."""
    return a.bias


@dataclass(frozen=True)
class Role:
    """One weight of a kind of sublayer.

    Attributes:
        name: in tables and files; kinds may share a Role, but two Roles of one name are refused.
        fan: (fan_in, fan_out) in an architecture. exists: whether an architecture has it.
        biased: whether the built network's map has a bias.
        copies: how many equal ones it holds, as (copies, outputs, inputs) (experts), and how many of them a token
            meets; None: it is one map.
        reads: it reads the stream. writes: it ends the branch: multipliers can be put on it, and schemes that scale the
            maps onto the stream with depth scale this one.
    """

    name: str
    fan: Callable[[ArchitectureFields], tuple[int, int]]
    exists: Callable[[ArchitectureFields], bool] = always
    biased: Callable[[ArchitectureFields], bool] = with_biases
    copies: Callable[[ArchitectureFields], tuple[int, int]] | None = None
    reads: bool = False
    writes: bool = False

    def entries(self, a: ArchitectureFields) -> int:
        """Numbers of the weight, all copies together."""
        inputs, outputs = self.fan(a)
        return inputs * outputs * self.held(a)[0]

    def held(self, a: ArchitectureFields) -> tuple[int, int]:
        """How many maps it is, and how many of them a token passes."""
        return (1, 1) if self.copies is None else self.copies(a)


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of sublayer.

    Attributes:
        name: in tables and files, and that of its folder. folder: another one, where it is a variant of the kind there,
            whose functions are given its `name`.
        roles: its weights, in the order in which they are drawn and shown.
        words, short: its name in a sentence, and in a narrow column.
        counted: the part of a network that its parameters and operations count to; default: its name.
        attends: it has queries and keys, so its scores have a scale. reads_memory: it reads the encoder's output.
        activates: the architecture's activation is in it.
        settings: what an architecture says of its sublayers of this kind beyond the architecture's fields; in
            `Architecture.settings` under the kind's name.
        hard: in which sublayers of a Parametrization the closed form does not hold, so that these are drawn,
            (sublayers,).
        narrower: fields with which its sublayers have fewer heads and what a head has, for draws.
    """

    name: str
    roles: tuple[Role, ...]
    words: str
    short: str
    counted: str = ""
    attends: bool = False
    reads_memory: bool = False
    activates: bool = False
    settings: type[KindSettings] | None = None
    hard: Callable[[Any], NDArray[np.bool_]] | None = None
    narrower: Callable[[ArchitectureFields], dict[str, Any]] | None = None
    folder: str = ""

    @property
    def code(self) -> int:
        """Index into KINDS, as columns of tables hold it."""
        return KINDS.index(self.name)

    @property
    def attends_itself(self) -> bool:
        """Whether a token attends to the tokens of the same stream."""
        return self.attends and not self.reads_memory

    def of(self, rows: HasKinds) -> NDArray[np.bool_]:
        """Which of the rows of a table are of this kind, (sublayers,)."""
        return np.asarray(rows.kind == self.code)

    def role_names(self, architecture: ArchitectureFields) -> tuple[str, ...]:
        """Its weights in an architecture."""
        return tuple(role.name for role in self.roles if role.exists(architecture))

    def numbers(self, a: ArchitectureFields, *, per_token: bool = False) -> int:
        """Weights and biases of its maps in one sublayer; `per_token`: of those that one token passes."""
        count = 0
        for role in self.roles:
            if role.exists(a):
                inputs, outputs = role.fan(a)
                count += role.held(a)[per_token] * (inputs * outputs + outputs * role.biased(a))
        return count

    @cached_property
    def has_copies(self) -> bool:
        """Whether some of its weights hold several equal maps."""
        return any(role.copies is not None for role in self.roles)

    @property
    def closed(self) -> bool:
        """Whether what it does to a signal is known in closed form, not only by draws."""
        return bool(self.roles) and _has_signal(self.folder or self.name)

    def drawn(self, p: HasKinds) -> NDArray[np.bool_]:
        """Which sublayers of a table are of this kind and drawn on token kernels, (sublayers,)."""
        own = self.of(p)
        if self.closed:
            own = own & self.hard(p) if self.hard else np.zeros_like(own)
        return own

    def part(self, name: str) -> Any:
        """A file of its folder as a module: `module`, `cost` or `signal`.

        Raises:
            InputError: `signal` of a kind that is drawn, or any of a branch of which nothing is known.
        """
        if not self.roles:
            raise InputError(
                "give a mapping, which says what every weight is: this network has branches of which only the output "
                "is known, so they can be measured, but not predicted, built or counted"
            )
        if name == "signal" and not self.closed:
            raise InputError(
                f"averages through {self.words} have no closed form: it is drawn, on token kernels of one "
                "parametrization at a time; take fidelity kernel (or auto), or simulate"
            )
        folder = self.folder or self.name
        module = import_module(f"signalprop.sublayers.{folder}.{name}")
        return module if folder == self.name else _variant(module, self.name)


@cache
def _has_signal(folder: str) -> bool:
    return find_spec(f"signalprop.sublayers.{folder}.signal") is not None


@cache
def _variant(module: ModuleType, name: str) -> SimpleNamespace:
    """The functions of a module with their argument `name` given."""
    own = {key: value for key, value in vars(module).items() if isinstance(value, FunctionType) and key[0] != "_"}
    return SimpleNamespace(**{key: partial(value, name=name) for key, value in own.items()})


def _discovered() -> Iterator[Kind]:
    folders = import_module("signalprop.sublayers")  # by name: the rooms above are not imported from here
    for found in iter_modules(folders.__path__):
        if found.ispkg:
            roles = import_module(f"{folders.__name__}.{found.name}.roles")
            yield from getattr(roles, "KINDS", None) or (roles.KIND,)


# What is added to the stream by something of which nothing else is known (`signalprop.streams`).
UNKNOWN = Kind(name="branch", roles=(), words="branch", short="branch")
_BY_NAME: dict[str, Kind] = {kind.name: kind for kind in (*sorted(_discovered(), key=lambda kind: kind.name), UNKNOWN)}
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
    """The kind of that name; KeyError if there is none."""
    return _BY_NAME[name]


def kinds_in(rows: HasKinds) -> list[Kind]:
    """The kinds that a table has."""
    return [_BY_NAME[KINDS[code]] for code in sorted(set(rows.kind.tolist()))]


def roles_in(rows: HasKinds) -> tuple[str, ...]:
    """Roles of the kinds that a table has, whether its architecture has them or not."""
    return tuple(dict.fromkeys(role.name for kind in kinds_in(rows) for role in kind.roles))


def kinds_where(test: Callable[[Kind], bool]) -> list[Kind]:
    """The registered kinds that pass a test."""
    return [kind for kind in _BY_NAME.values() if test(kind)]


def drawn_rows(p: HasKinds) -> NDArray[np.bool_]:
    """Which sublayers of a table are drawn on token kernels, (sublayers,)."""
    return np.asarray(np.any([kind.drawn(p) for kind in kinds_in(p)], 0))


def rows_where(rows: HasKinds, test: Callable[[Kind], bool]) -> NDArray[np.bool_]:
    """Which rows of a table are of a kind that passes a test, (sublayers,)."""
    return np.array([test(kind) for kind in _BY_NAME.values()])[rows.kind]
