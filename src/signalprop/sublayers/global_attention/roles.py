"""Self-attention to all tokens with heads of another width than other layers have (Gemma 4): what it is."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING

from pydantic import Field

from signalprop.errors import InputError
from signalprop.network.kinds import Kind, KindSettings, Role
from signalprop.sublayers.attention.roles import Settings as Usual

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture
    from signalprop.network.architecture_fields import ArchitectureFields
    from signalprop.network.parametrization import Parametrization

PREFIX = "global_"
_Width = Field(0, ge=0, le=1_000_000_000)


class Settings(KindSettings):
    """What its heads have in the place of the architecture's; scores have the architecture's scale and QK-norm.

    Attributes:
        d_head, n_kv_heads: features of a head, heads of keys and values; 0: the architecture's.
        rotary_base, rotary_fraction: default: the architecture's. proportional: the frequencies that turn are the
            fastest ones of all of a head's, not ones from 1 to 1 / rotary_base; feature i turns with
            feature i + d_head / 2.
        value_norm: values are RMS-normalised per head, without gains.
        shared: keys before their norm and rotation are the values, too, without a map of values.
    """

    kind = "global_attention"
    d_head: int = _Width
    n_kv_heads: int = _Width
    rotary_base: float | None = Field(None, ge=1, le=1e30)
    rotary_fraction: float | None = Field(None, gt=0, le=1)
    proportional: bool = False
    value_norm: bool = False
    shared: bool = False


@lru_cache(maxsize=32)
def alone(a: Architecture) -> Architecture:
    """The architecture of which global attention would be the usual attention."""
    s = Settings.of(a)
    kv, base = s.n_kv_heads or a.n_kv_heads, s.rotary_base or a.rotary_base
    if a.n_heads % kv:
        raise InputError(f"global_attention.n_kv_heads is {kv}; expected a divisor of n_heads {a.n_heads}")
    if s.shared and a.qkv_bias:
        raise InputError("global_attention.shared with qkv_bias: a key's bias as a value is not derived; leave one out")
    fraction = s.rotary_fraction or a.rotary_fraction
    return a.replace(
        branches=("attention",), settings={"attention": Usual(value_norm=s.value_norm)}, parallel=False,
        shared_norm=False, branch_scale=1.0, d_head=s.d_head or a.d_head, n_kv_heads=kv, rotary_fraction=fraction,
        rotary_base=base**fraction if s.proportional else base, attention_scale=a.score_scale,
    )  # fmt: skip


def as_usual(p: Parametrization) -> Parametrization:
    """The table as one of `alone`: the weights of global attention stand where those of attention do."""
    a = p.architecture
    renamed = {role.removeprefix(PREFIX): role for role in (role.name for role in ROLES)}
    if Settings.of(a).shared:
        renamed["value"] = f"{PREFIX}key"
    weights, biases = ({**x, **{to: x[role] for to, role in renamed.items()}} for x in (p.weights, p.biases))
    return dataclasses.replace(p, architecture=alone(a), weights=weights, biases=biases)


def _heads(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, a.n_heads * (Settings.of(a).d_head or a.d_head)


def _shared_heads(a: ArchitectureFields) -> tuple[int, int]:
    s = Settings.of(a)
    return a.d_model, (s.n_kv_heads or a.n_kv_heads) * (s.d_head or a.d_head)


def _biased(a: ArchitectureFields) -> bool:
    return bool(a.qkv_bias)


ROLES = (
    Role(f"{PREFIX}query", _heads, biased=_biased, reads=True),
    Role(f"{PREFIX}key", _shared_heads, biased=_biased, reads=True),
    Role(f"{PREFIX}value", _shared_heads, exists=lambda a: not Settings.of(a).shared, biased=_biased, reads=True),
    Role(f"{PREFIX}output", lambda a: _heads(a)[::-1], writes=True),
)
KIND = Kind(
    name="global_attention",
    roles=ROLES,
    words="global attention",
    short="global",
    counted="attention",
    attends=True,
    settings=Settings,
)
