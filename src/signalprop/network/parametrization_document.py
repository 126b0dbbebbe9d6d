"""The JSON form of a Parametrization, field by field, and what its rows must say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from signalprop.errors import InputError
from signalprop.files.validation import Value
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.embedding_and_head import Distribution, Embedding, Head
from signalprop.network.layout import KINDS, PLACEMENTS, ROLES, STACKS, IntColumn, Layout, Stack, roles_of
from signalprop.network.moments import FloatArray

SCHEMA = "signalprop/parametrization/1"
Trainable = Literal["fixed", "scalar", "channel"]
LEARNING_RATES = (*ROLES, "vectors")
# Numeric columns besides weights, biases and learning rates, with the value that leaves the signal alone.
PLAIN = {
    "skip": 1.0,
    "branch": 1.0,
    "norm_gain": 1.0,
    "norm_scale": 1.0,
    "norm_bias": 0.0,
    "post_norm_gain": 1.0,
    "norm_slope": 0.5,
    "score_scale": 1.0,
    "value_skip": 0.0,
    "attention_gain": 1.0,
    "shape_in": 0.0,
    "shape_out": 0.0,
    "shape_gain": 0.0,
}


class Shaping(Value):
    """How the self-attentions of a table are shaped: `D softmax(scores + B)` instead of a softmax of scores.

    Attributes:
        kind: `e-spa` and `u-spa` (He et al. 2023), `none`. The rows' numbers are the columns `shape_in`, `shape_out`
            and `shape_gain`; `signalprop.kernels.causal_shaping` makes B and D of them.
        repeats: pair-repeat probability of tokens that E-SPA keeps the diagonal at 1 for.
    """

    kind: Literal["none", "e-spa", "u-spa"] = "none"
    repeats: Annotated[float, Field(ge=0, lt=1)] = 0.0


UNSHAPED = Shaping()


class SublayerRow(BaseModel):
    """A sublayer in the JSON form."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, defer_build=True)
    index: int
    stack: Stack
    layer: int
    kind: str
    norm: Placement
    parallel: bool = False
    weights: dict[str, float]
    biases: dict[str, float] = Field(default_factory=dict)
    skip: float
    branch: float
    norm_gain: float
    norm_scale: float = 1.0
    norm_bias: float = 0.0
    post_norm_gain: float = 1.0
    norm_slope: float = 0.5
    score_scale: float | None = None
    value_skip: float = 0.0
    attention_gain: float = 1.0
    shape_in: float = 0.0
    shape_out: float = 0.0
    shape_gain: float = 0.0
    learning_rates: dict[str, float] = Field(default_factory=dict)


class ParametrizationDocument(Value):
    """The JSON form."""

    model_config = ConfigDict(title="parametrization")
    schema_: Literal["signalprop/parametrization/1"] = Field(alias="schema")
    architecture: Architecture
    scheme: str
    options: dict[str, Any]
    embedding: Embedding
    head: Head
    distribution: dict[str, Distribution]
    branch_trainable: Trainable
    skip_trainable: Trainable = "fixed"
    attention_trainable: bool = False
    shaping: Shaping = UNSHAPED
    sublayers: list[SublayerRow]


def check_norm_biases(a: Architecture, placement: IntColumn, norm_bias: FloatArray) -> None:
    """That only norms that read or make the stream have a bias (`norm_bias`, (..., sublayers))."""
    on_stream = np.array([name in ("pre", "sandwich", "post") for name in PLACEMENTS])[placement]
    wrong = (norm_bias != 0) & ~(on_stream & (a.streams is None))
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0])
        raise InputError(
            f"norm_bias of sublayer {where[-1]} is {norm_bias[where]}; expected 0: biases are derived for norms that "
            "read or make one residual stream (pre, sandwich, post)"
        )


def check_rows(rows: Sequence[SublayerRow], a: Architecture, table: Layout) -> None:
    """That rows are the sublayers of an architecture, in order, with the weights that these have."""
    masks = roles_of(a, table.kind)
    for i, row in enumerate(rows):
        found = (row.index, row.stack, row.layer, row.kind, row.parallel)
        wanted = (i, STACKS[table.stack[i]], int(table.layer[i]), KINDS[table.kind[i]], bool(table.parallel[i]))
        if found != wanted:
            raise InputError(
                f"sublayer {i} has (index, stack, layer, kind, parallel) {found}; the architecture has {wanted}"
            )
        roles = {role for role in ROLES if masks[role][i]}
        if row.weights.keys() != roles or not row.biases.keys() <= roles:
            raise InputError(
                f"sublayer {i} has weights {sorted(row.weights)} and biases {sorted(row.biases)}; "
                f"expected {sorted(roles)}"
            )
        if not row.learning_rates.keys() <= {*LEARNING_RATES}:
            raise InputError(
                f"sublayer {i} has learning rates of {sorted(row.learning_rates)}; "
                f"expected some of {sorted(roles)} and vectors"
            )
