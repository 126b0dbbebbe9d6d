"""What a scheme is, and the registry that finds it by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import wraps
from types import NoneType
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError, unknown
from signalprop.families import find
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture, Config, architecture_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kinds_in
from signalprop.network.layout import stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import ROLES, Parametrization, blank, fan, layout
from signalprop.schemes.options import check_options

__all__ = [
    "SCHEMES",
    "Scheme",
    "fill",
    "layers_of_stack",
    "register",
    "scheme",
    "xavier_std",
]

SCHEMES: dict[str, type[Scheme]] = {}
S = TypeVar("S", bound="type[Scheme]")
Rule: TypeAlias = "Callable[[Scheme, Architecture, InputStatistics | None], Parametrization]"


def _of_network(rule: Rule) -> Rule:
    """A scheme's rule, with what it is given checked."""

    @wraps(rule)
    def call(made_by: Any, architecture: Any, inputs: Any = None) -> Parametrization:
        if not isinstance(inputs, (InputStatistics, NoneType)):
            raise InputError(f"a scheme takes InputStatistics as inputs; it was given the {type(inputs).__name__}")
        return rule(made_by, architecture_of(architecture), inputs)

    return call


@dataclass(frozen=True)
class Scheme(ABC):
    """A function (Architecture, InputStatistics) -> Parametrization. Its fields are its options, which types check.

    Class attributes: `name` (in the registry), `paper` (where it is published), `summary` (one line for tables).
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            cls.__call__ = _of_network(vars(cls)["__call__"])  # type: ignore[method-assign,assignment]

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        """The table of numbers that this scheme gives to an architecture (`inputs`: default: Zipf's law).

        A preset's name and a configuration of Hugging Face stand for their architectures.
        """

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return asdict(self)


def register(cls: S) -> S:
    """Class decorator: make a scheme findable by its name. It stands above `@dataclass(frozen=True)`.

    Raises:
        InputError: name, paper or summary is missing, or another scheme has the name. The same class may be defined
            anew (a notebook cell that is run twice).
    """
    if not (isinstance(cls, type) and issubclass(cls, Scheme)):
        raise InputError(f"register takes a class of Scheme; it was given the {type(cls).__name__} {cls!r:.60}")
    lacking = [item for item in ("name", "paper", "summary") if not isinstance(getattr(cls, item, None), str)]
    if lacking:
        raise InputError(f"scheme {cls.__name__} has no {', '.join(lacking)}; give it as a class attribute")
    other = SCHEMES.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InputError(f"there are two schemes named {cls.name!r}; give one another name")
    SCHEMES[cls.name] = cls
    return cls


def scheme(name: str, /, **options: Any) -> Scheme:
    """The scheme of a name, with options.

    Raises:
        InputError: unknown name or option, or a value that the scheme refuses; the message lists what exists.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        raise unknown("scheme", name, sorted(SCHEMES))
    cls = SCHEMES[name]
    known = [item.name for item in fields(cls)]
    for key in options:
        if key not in known:
            raise InputError(f"scheme {name!r} has no option {key!r}; options: {', '.join(known) or 'none'}")
    return cls(**options)


@typed
def fill(
    architecture: Architecture, made_by: Scheme, std: Mapping[str, ArrayLike], **columns: ArrayLike
) -> Parametrization:
    """A table with the given standard deviations, and other columns.

    Args:
        architecture: that the rows describe. made_by: the scheme, whose name and options the table keeps.
        std: by role (one of `ROLES`), every one that the rows have: a number, or one per sublayer.
        columns: others by name (`skip`, `branch`, `norm_gain`, ...), a number or one per sublayer.

    Raises:
        InputError: a kind of sublayer has a role that `std` does not name, or a bad column.
    """
    table = blank(architecture, made_by.name, **made_by.options())
    for kind in kinds_in(table):
        for role in kind.role_names(architecture):
            if role not in std:
                raise InputError(
                    f"scheme {made_by.name!r} has no rule for {role} of {kind.words}; choose another scheme, "
                    "such as xavier, lns or deepnorm"
                )
    return table.with_columns(**{f"weight__{role}": value for role, value in std.items()}, **columns)


@typed
def xavier_std(architecture: Architecture, role: str) -> float:
    """Glorot and Bengio's standard deviation sqrt(2 / (fan_in + fan_out)) of a `role` in an `architecture`.

    Where a model puts another factor on its scores than 1/sqrt(d_head), queries make up for it: T5, which has none,
    would otherwise start with scores of variance d_head.

    Raises:
        InputError: there is no such role.
    """
    if role not in ROLES:
        raise unknown("role", role, ROLES)
    fan_in, fan_out = fan(architecture, role)
    std = math.sqrt(2 / (fan_in + fan_out))
    return std / (architecture.score_scale * math.sqrt(architecture.d_head)) if role == "query" else std


@typed
def layers_of_stack(architecture: Architecture) -> FloatArray:
    """Number of layers of the stack that each sublayer of an `architecture` belongs to, shape (sublayers,)."""
    a = architecture
    out = np.empty(len(layout(a).kind))
    for (_, rows), n_layers in zip(stacks_of(layout(a)), (a.n_layers, a.n_decoder_layers), strict=False):
        out[rows.start : rows.stop] = n_layers
    return out


def default_scheme(architecture: Architecture) -> str:
    """Name of the scheme of an architecture that is given without one: that of its family, else Xavier's."""
    return "xavier" if find(architecture.family) is None else "huggingface"


def parametrized(
    subject: str | Architecture | Config | Parametrization, scheme_name: str | None = None, **options: Any
) -> Parametrization:
    """The parametrization of a preset, or of an architecture, by a scheme (default: `default_scheme`).

    Args:
        subject: a preset's name, an Architecture or a configuration of Hugging Face, or a Parametrization, which stays
            as it is. options: of the scheme.
    """
    if isinstance(subject, Parametrization):
        if scheme_name is not None:
            raise InputError(
                "a Parametrization or a model already has its numbers; leave the scheme out, or give an Architecture "
                "(of a model: sp.read_parametrization(model).architecture)"
            )
        return subject
    a = architecture_of(subject)
    made_by = scheme(default_scheme(a) if scheme_name is None else scheme_name, **options)
    return made_by(a, default_statistics(a))
