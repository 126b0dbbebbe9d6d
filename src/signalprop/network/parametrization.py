"""The Parametrization: every number that acts on the signal, sublayer by sublayer. A plain table, stored by column.

It is the only thing that predict, simulate, build and count read, so that prediction and model cannot drift apart.
Columns are NumPy arrays whose last axis counts sublayers; leading axes, if any, make it a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from signalprop.errors import InputError, check_index
from signalprop.files.documents import Document, fields_of
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import LARGEST, Distribution
from signalprop.network.embedding_and_head import Embedding as Embedding
from signalprop.network.embedding_and_head import Head as Head
from signalprop.network.kinds import ROLE, kind_of, roles_in
from signalprop.network.layout import KINDS as KINDS
from signalprop.network.layout import PLACEMENTS as PLACEMENTS
from signalprop.network.layout import ROLES as ROLES
from signalprop.network.layout import STACKS, IntColumn, roles_of
from signalprop.network.layout import fan as fan
from signalprop.network.layout import layout as layout
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization_document import LEARNING_RATES as LEARNING_RATES
from signalprop.network.parametrization_document import PLAIN as _PLAIN
from signalprop.network.parametrization_document import SCHEMA as SCHEMA
from signalprop.network.parametrization_document import UNSHAPED, ParametrizationDocument, check_norm_biases, check_rows
from signalprop.network.parametrization_document import Shaping as Shaping
from signalprop.network.parametrization_document import Trainable as Trainable
from signalprop.network.parametrization_text import RARE, records, table_text
from signalprop.network.shown import Shown, report_module

__all__ = ["ROLES", "Embedding", "Head", "Parametrization"]

_LINES = 12  # of a table that print shows


@typed
@dataclass(frozen=True, eq=False)
class Parametrization(Document, Shown):
    """One row per sublayer (encoder first), plus embedding and head.

    Attributes:
        architecture: what the network is. scheme, options: the scheme of the table, and its options.
        stack, layer, kind: of each sublayer: index into STACKS, layer within its stack, index into KINDS.
        placement: index into PLACEMENTS. parallel: the sublayer reads the same stream as the one before it.
        weights: standard deviation of each role's weight, 0 where a role does not exist. biases: likewise.
        distribution: of the weights. skip, branch: lambda, beta of stream_out = skip * stream_in + branch * f(it).
        branch_trainable, skip_trainable: `fixed`, or a trainable `scalar` or per-`channel` vector that starts at
            `branch` (at `skip`).
        norm_gain: root mean square of the gain of the norm that the placement names (1 unless initialised otherwise
            or trained); post_norm_gain: of the second norm of a sandwich.
        norm_slope: alpha of a norm `dyt` or `derf`, gain * f(alpha x); other norms have none.
        norm_scale: fixed factor on that norm's output, beside its gain (LayerNorm Scaling). norm_bias: root mean square
            over features of that norm's bias, the same for all tokens, and independent of all else.
        score_scale: factor on the scalar product of query and key, QK-norm gains included.
        value_skip, attention_gain: the value of a token and the attention's average of values are added with these
            weights: `value_skip * V + attention_gain * A V` (0 and 1 in ordinary attention).
        attention_trainable: both are trainable scalars.
        shaping: how self-attentions are shaped; shape_in, shape_out: for E-SPA the decays e^-gamma of the token kernel
            before and after, for U-SPA its off-diagonal rho; shape_gain: the diagonal of an E-SPA matrix beside a skip,
            0 for the exact one.
        learning_rates: factor on the learning rate per weight role, and of the sublayer's `vectors` (biases, gains,
            trainable multipliers), for Adam-like optimizers. embedding, head: the other two rows.

    Raises:
        InputError: a column of another length, a number that is not finite or beyond 1e30, or a negative standard
            deviation (the message says which sublayer).
    """

    architecture: Architecture
    scheme: str
    stack: IntColumn
    layer: NDArray[np.int32]
    kind: IntColumn
    placement: IntColumn
    parallel: NDArray[np.bool_]
    weights: Mapping[str, FloatArray]
    biases: Mapping[str, FloatArray]
    skip: FloatArray
    branch: FloatArray
    norm_gain: FloatArray
    norm_scale: FloatArray
    norm_bias: FloatArray
    post_norm_gain: FloatArray
    norm_slope: FloatArray
    score_scale: FloatArray
    value_skip: FloatArray
    attention_gain: FloatArray
    shape_in: FloatArray
    shape_out: FloatArray
    shape_gain: FloatArray
    learning_rates: Mapping[str, FloatArray]
    embedding: Embedding
    head: Head
    distribution: Mapping[str, Distribution] = field(default_factory=lambda: dict.fromkeys(ROLES, "normal"))
    branch_trainable: Trainable = "fixed"
    skip_trainable: Trainable = "fixed"
    attention_trainable: bool = False
    shaping: Shaping = UNSHAPED
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.skip.shape[-1:] != self.kind.shape:
            raise InputError(f"skip has shape {self.skip.shape}; the table has {self.n_sublayers} rows")
        passed = set[tuple[int, bool]]()  # many roles share a column
        for name, column in self.columns().items():
            if column.shape != self.skip.shape:
                raise InputError(f"{name} has shape {column.shape}, skip {self.skip.shape}; expected the same")
            sign = name.startswith(("weight.", "bias.", "learning_rate.", "norm_bias"))
            if (id(column), sign) in passed:
                continue
            passed.add((id(column), sign))
            least = 0.0 if sign else -LARGEST
            if not (column.min() >= least and column.max() <= LARGEST):  # a NaN is not good either
                where = tuple(np.argwhere(~((column >= least) & (column <= LARGEST)))[0])
                what = "factor" if name.startswith("learning_rate") else "standard deviation"
                wanted = f"a {what} from 0 to {LARGEST:g}" if sign else f"a number up to {LARGEST:g}"
                raise InputError(f"{name} of sublayer {where[-1]} is {column[where]}; expected {wanted}")
        check_norm_biases(self.architecture, self.placement, self.norm_bias)

    @property
    def n_sublayers(self) -> int:
        """Rows of the table."""
        return int(self.kind.shape[-1])

    def columns(self) -> dict[str, FloatArray]:
        """Every numeric column by name (`weight.query`, `bias.query`, `skip`, `learning_rate.query`, ...)."""
        out: dict[str, FloatArray] = {}
        for role in ROLES:
            out[f"weight.{role}"] = self.weights[role]
            out[f"bias.{role}"] = self.biases[role]
        for name in _PLAIN:
            out[name] = getattr(self, name)
        for name in LEARNING_RATES:
            out[f"learning_rate.{name}"] = self.learning_rates[name]
        return out

    @property
    def norm_output(self) -> FloatArray:
        """Root mean square of what the placement's norm outputs: norm_gain * norm_scale, (..., sublayers)."""
        return self.norm_gain * self.norm_scale

    @property
    def norm_shift(self) -> FloatArray:
        """Mean square over features of what that norm adds: (norm_bias * norm_scale)^2, (..., sublayers)."""
        return (self.norm_bias * self.norm_scale) ** 2

    @typed
    def kind_name(self, index: int) -> str:
        """Kind of sublayer `index`, from 0, by name.

        Raises:
            InputError: there is no such sublayer.
        """
        return KINDS[int(self.kind[check_index("sublayer", index, self.n_sublayers)])]

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per sublayer, as in the JSON form. Not for sweeps."""
        self._refuse_sweep("rows")
        masks = roles_of(self.architecture, self.kind)
        lists = {name: column.tolist() for name, column in self.columns().items()}
        out = []
        for i in range(self.n_sublayers):
            used = [role for role in ROLES if masks[role][i]]
            row: dict[str, Any] = {
                "index": i,
                "stack": STACKS[self.stack[i]],
                "layer": int(self.layer[i]),
                "kind": KINDS[self.kind[i]],
                "norm": PLACEMENTS[self.placement[i]],
                "weights": {role: lists[f"weight.{role}"][i] for role in used},
                "skip": lists["skip"][i],
                "branch": lists["branch"][i],
                "norm_gain": lists["norm_gain"][i],
            }
            biases = {role: lists[f"bias.{role}"][i] for role in used if lists[f"bias.{role}"][i] != 0}
            if biases:
                row["biases"] = biases
            if self.parallel[i]:
                row["parallel"] = True
            if row["norm"] == "sandwich" or lists["post_norm_gain"][i] != 1:
                row["post_norm_gain"] = lists["post_norm_gain"][i]
            if kind_of(self, i).attends or lists["score_scale"][i] != self.architecture.score_scale:
                row["score_scale"] = lists["score_scale"][i]
            for name in RARE:
                if lists[name][i] != _PLAIN[name]:
                    row[name] = lists[name][i]
            rates = {name: lists[f"learning_rate.{name}"][i] for name in (*used, "vectors")}
            if any(rate != 1 for rate in rates.values()):
                row["learning_rates"] = rates
            out.append(row)
        return out

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_json` gives the same Parametrization back."""
        return {
            "schema": SCHEMA,
            "architecture": self.architecture.model_dump(mode="json", exclude_defaults=True),
            "scheme": self.scheme,
            "options": dict(self.options),
            "embedding": self.embedding.model_dump(mode="json"),
            "head": self.head.model_dump(mode="json"),
            "distribution": {role: self.distribution[role] for role in roles_in(self)},
            "branch_trainable": self.branch_trainable,
            "skip_trainable": self.skip_trainable,
            "attention_trainable": self.attention_trainable,
            "shaping": self.shaping.model_dump(mode="json"),
            "sublayers": self.rows(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Parametrization:
        """Read what `to_json` wrote (`data`).

        Raises:
            InputError: another schema version, a missing or unknown field, a value out of range, or sublayers that the
                architecture does not have.
        """
        document = ParametrizationDocument(**fields_of(data, SCHEMA, "a parametrization"))
        a, rows = document.architecture, document.sublayers
        table = layout(a)
        if len(rows) != len(table.kind):
            raise InputError(f"sublayers has {len(rows)} rows; the architecture has {len(table.kind)} sublayers")
        given = document.distribution.keys()
        needed = [role for role in roles_in(table) if ROLE[role].exists(a)]
        if not set(needed) <= given <= set(ROLES):
            raise InputError(f"distribution is of {', '.join(sorted(given))}; expected {', '.join(needed)}")
        check_rows(rows, a, table)
        return cls(
            architecture=a,
            scheme=document.scheme,
            options=document.options,
            stack=table.stack,
            layer=table.layer,
            kind=table.kind,
            placement=np.array([PLACEMENTS.index(row.norm) for row in rows], np.int8),
            parallel=table.parallel,
            weights={role: np.array([row.weights.get(role, 0.0) for row in rows]) for role in ROLES},
            biases={role: np.array([row.biases.get(role, 0.0) for row in rows]) for role in ROLES},
            score_scale=np.array([a.score_scale if row.score_scale is None else row.score_scale for row in rows]),
            **{name: np.array([getattr(row, name) for row in rows]) for name in _PLAIN if name != "score_scale"},
            learning_rates={
                name: np.array([row.learning_rates.get(name, 1.0) for row in rows]) for name in LEARNING_RATES
            },
            embedding=document.embedding,
            head=document.head,
            distribution={role: document.distribution.get(role, "normal") for role in ROLES},
            branch_trainable=document.branch_trainable,
            skip_trainable=document.skip_trainable,
            attention_trainable=document.attention_trainable,
            shaping=document.shaping,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parametrization):
            return NotImplemented
        mine, theirs = self.columns(), other.columns()
        there = {*roles_in(self), *roles_in(other)}  # of roles of other kinds nobody draws anything
        if any(self.distribution.get(role) != other.distribution.get(role) for role in there):
            return False
        return all(np.array_equal(mine[name], theirs[name]) for name in mine) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name))
            if isinstance(getattr(self, item.name), np.ndarray)
            else getattr(self, item.name) == getattr(other, item.name)
            for item in fields(self)
            if item.name not in ("weights", "biases", "learning_rates", "distribution")
        )

    __hash__ = None  # type: ignore[assignment]

    def with_columns(self, **columns: ArrayLike) -> Parametrization:
        """A copy with some columns replaced; names as in `columns()`, `.` written `__` (`weight__query=0.02`).

        A scalar fills the column; where a sublayer does not have the role, weights and biases stay 0, learning rates 1.
        A value with leading axes makes a sweep: the other columns are repeated along them.

        Raises:
            InputError: an unknown column, or a value of another shape or out of range.
        """
        try:
            values = {name: np.asarray(value, np.float64) for name, value in columns.items()}
            shape = np.broadcast_shapes(self.skip.shape, *(value.shape for value in values.values()))
        except (TypeError, ValueError) as error:
            raise InputError(f"columns must be numbers, one or {self.n_sublayers} each: {error}") from None
        masks = roles_of(self.architecture, self.kind)
        columns_now = self.columns().items()
        filled = {name: x if x.shape == shape else np.broadcast_to(x, shape) for name, x in columns_now}
        for name, value in values.items():
            column = name.replace("__", ".", 1)
            if column not in filled:
                there = {*roles_in(self), *_PLAIN, "vectors"}
                known = ", ".join(known for known in filled if known.rpartition(".")[2] in there)
                raise InputError(f"no column {name!r}; columns: {known}")
            group, _, role = column.partition(".")
            none = 1.0 if group == "learning_rate" else 0.0
            filled[column] = np.where(masks[role], value, none) if role in masks else np.broadcast_to(value, shape)
        return self._with(filled)

    @typed
    def members(self, which: slice) -> Parametrization:
        """Some members of a sweep: the slice `which` of its first axis."""
        return self._with({name: column[which] for name, column in self.columns().items()})

    def _with(self, columns: Mapping[str, FloatArray]) -> Parametrization:
        """A copy with all numeric columns replaced, by their names in `columns()`."""
        plain: Any = {name: columns[name] for name in _PLAIN}
        return replace(
            self,
            weights={role: columns[f"weight.{role}"] for role in ROLES},
            biases={role: columns[f"bias.{role}"] for role in ROLES},
            learning_rates={name: columns[f"learning_rate.{name}"] for name in LEARNING_RATES},
            **plain,
        )

    @staticmethod
    @typed
    def sweep(items: Sequence[Parametrization]) -> Parametrization:
        """Stack parametrizations (`items`) of one architecture into a sweep: numeric columns get a leading axis.

        Raises:
            InputError: none given, or their architectures, placements, embeddings, heads or shapings differ.
        """
        if not items:
            raise InputError("a sweep needs at least one parametrization")
        first = items[0]
        for item in items[1:]:
            for what in ("architecture", "embedding", "head", "shaping"):
                if getattr(item, what) != getattr(first, what):
                    raise InputError(f"a sweep needs items of one {what}; predict the others alone")
            if not np.array_equal(item.placement, first.placement):
                raise InputError("a sweep needs items of one norm placement; predict the others alone")
        columns = [item.columns() for item in items]
        return first._with({name: np.stack([c[name] for c in columns]) for name in columns[0]})

    def _rows(self) -> list[dict[str, Any]]:
        self._refuse_sweep("a data frame")
        return records({x: getattr(self, x) for x in ("stack", "kind", "placement", "layer")} | self.columns())

    @typed
    def table(self, most: int | None = None) -> str:
        """The table as text, whole or in `most` lines; consecutive layers with equal numbers share an entry."""
        self._refuse_sweep("table")
        given = self.embedding, self.head, self.shaping, self.distribution
        return table_text(self.scheme, self.architecture, self.rows(), *given, most)

    def __repr__(self) -> str:
        return f"<Parametrization: {self.scheme}; {self.skip.shape[-1]} sublayers, d_model {self.architecture.d_model}>"

    def _figure(self) -> Any:
        return report_module("parametrizations").figure(self) if self.skip.ndim == 1 else None

    def __str__(self) -> str:
        return self.table(_LINES) if self.skip.ndim == 1 else f"sweep {self.skip.shape[:-1]} of {self.scheme}"

    def _refuse_sweep(self, what: str) -> None:
        if self.skip.ndim != 1:
            raise InputError(f"{what} needs a single parametrization, this is a sweep of shape {self.skip.shape[:-1]}")


def blank(architecture: Architecture, scheme: str, **options: Any) -> Parametrization:
    """A table of zeros and ones for a scheme to fill with `with_columns` and `dataclasses.replace`."""
    rows = layout(architecture)
    n = len(rows.kind)
    zero, one = np.zeros(n), np.ones(n)
    plain: dict[str, Any] = {name: np.full(n, value) for name, value in _PLAIN.items()}
    for column in (zero, one, *plain.values()):  # roles share them
        column.setflags(write=False)
    return Parametrization(
        architecture=architecture,
        scheme=scheme,
        options=options,
        stack=rows.stack,
        layer=rows.layer,
        kind=rows.kind,
        placement=rows.placement,
        parallel=rows.parallel,
        weights=dict.fromkeys(ROLES, zero),
        biases=dict.fromkeys(ROLES, zero),
        **plain | {"score_scale": np.full(n, architecture.score_scale)},
        learning_rates=dict.fromkeys(LEARNING_RATES, one),
        embedding=Embedding(token=0.0, scale=architecture.embedding_scale),
        head=Head(weight=0.0),
    )
