"""Attention within a window whose keys are its values, with or without averages of what came before: what it is.

DeepSeek-V4 (section 2.3). Three kinds share the weights here: this one, `heavily_compressed_attention` and
`compressed_sparse_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from signalprop.errors import InputError
from signalprop.network.kinds import Kind, KindSettings, Role, never

if TYPE_CHECKING:
    from signalprop.network.architecture_fields import ArchitectureFields

NAME = "shared_kv_attention"
HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"


class Settings(KindSettings):
    """Widths beside the architecture's, whose d_head is that of queries, keys and values.

    Attributes:
        window: keys that a token sees at most, the last ones and itself. query_rank: features of the latent vector that
            queries are mapped from, after an RMSNorm. groups, group_rank: heads are mapped to the stream in so many
            groups, each to so many features, and these together.
        d_rotary: features of queries and keys that rotate, and turn back in what the heads give. rotary_base: of their
            frequencies (default: the architecture's).
        sink: logit, one per head, that takes part in the softmax and has no value, where it starts; None: none.
    """

    kind = NAME
    window: int = Field(128, ge=1, le=10_000_000)
    query_rank: int = Field(1024, ge=1, le=10_000_000)
    groups: int = Field(1, ge=1, le=10_000_000)
    group_rank: int = Field(1024, ge=1, le=10_000_000)
    d_rotary: int = Field(64, ge=2, le=10_000_000)
    rotary_base: float | None = Field(None, ge=1, le=1e30)
    sink: float | None = Field(0.0, ge=-1e3, le=1e3)


class Compressed(Settings):
    """The same of attention that sees averages, too.

    Attributes:
        rate: tokens of a run; a token sees the averages of all runs that end before it or with it. What a run's tokens
            weigh in it is a softmax over them, for every feature.
        selects: averages that an indexer leaves to a token at most; 0: all. Only what no more of them does is derived.
    """

    kind = HEAVY
    rate: int = Field(128, ge=1, le=10_000_000)
    selects: int = Field(0, ge=0, le=10_000_000)


class Sparse(Compressed):
    """The same of short runs."""

    kind = SPARSE
    rate: int = Field(4, ge=1, le=10_000_000)


_DEFAULTS: dict[str, type[Settings]] = {NAME: Settings, HEAVY: Compressed, SPARSE: Sparse}


def settings_of(a: ArchitectureFields, name: str = "") -> Settings:
    """Of the kind of that name in an architecture, or of whichever it has: they share their widths."""
    names = [name] if name else [one for one in _DEFAULTS if one in a.settings] or [NAME]
    several = [_DEFAULTS[one].of(a) for one in names]
    found = several[0]
    if names[0] not in a.settings:
        return found
    if found.d_rotary > a.d_head:
        raise InputError(f"{names[0]}.d_rotary is {found.d_rotary}; expected at most d_head {a.d_head}")
    if a.n_heads % found.groups:
        raise InputError(f"{names[0]}.groups is {found.groups}; expected a divisor of n_heads {a.n_heads}")
    for width in ("query_rank", "groups", "group_rank", "d_rotary"):
        if len({getattr(one, width) for one in several}) > 1:
            raise InputError(f"{width} of {names[0]} and {names[1]} differ; expected one value for both")
    return found


def compressed(a: ArchitectureFields, name: str) -> Compressed | None:
    """What a kind says of its averages; None of one that has none."""
    found = settings_of(a, name)
    if not isinstance(found, Compressed):
        return None
    if 0 < found.selects < a.seq_len // found.rate:
        raise InputError(
            f"attention to the {found.selects} averages that an indexer selects of {a.seq_len // found.rate} is not "
            f"derived; give seq_len of at most {found.rate * (found.selects + 1) - 1}"
        )
    return found


def _query_down(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, settings_of(a).query_rank


def _query(a: ArchitectureFields) -> tuple[int, int]:
    return settings_of(a).query_rank, a.n_heads * a.d_head


def _head(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, a.d_head


def _grouped(a: ArchitectureFields) -> tuple[int, int]:
    s = settings_of(a)
    return a.n_heads * a.d_head // s.groups, s.groups * s.group_rank


ROLES = (
    Role("kv_query_down", _query_down, biased=never, reads=True),
    Role("kv_query", _query, biased=never),
    Role("key_value", _head, biased=never, reads=True),
    Role("grouped_output", _grouped, biased=never),
    Role("kv_output", lambda a: (_grouped(a)[1], a.d_model), biased=never, writes=True),
)
RUN = (
    Role("run_value", _head, biased=never, reads=True),
    Role("run_weight", _head, biased=never, reads=True),
)
BEFORE = (
    Role("before_value", _head, biased=never, reads=True),
    Role("before_weight", _head, biased=never, reads=True),
)


_FEATURES = 2048  # of all heads, about, that are drawn


def _narrower(a: ArchitectureFields) -> dict[str, Any]:
    """For fewer groups of as many heads."""
    fewer, groups = {}, settings_of(a).groups
    few = max(1, min(groups, round(groups * _FEATURES / (a.n_heads * a.d_head))))
    for name, of_kind in a.settings.items():
        fewer[name] = of_kind.model_copy(update={"groups": few}) if isinstance(of_kind, Settings) else of_kind
    return {"n_heads": a.n_heads // groups * few, "n_kv_heads": 1, "settings": fewer} if few < groups else {}


def _kind(name: str, roles: tuple[Role, ...], words: str, short: str, settings: type[Settings]) -> Kind:
    return Kind(
        name=name, folder=NAME, roles=roles, words=words, short=short, counted="attention",
        attends=True, settings=settings, narrower=_narrower,
    )  # fmt: skip


KINDS = (
    _kind(NAME, ROLES, "attention with shared keys and values", "shared kv", Settings),
    _kind(HEAVY, (*ROLES, *RUN), "attention to strong compressions", "heavy", Compressed),
    _kind(SPARSE, (*ROLES, *RUN, *BEFORE), "attention to compressions", "sparse", Sparse),
)
