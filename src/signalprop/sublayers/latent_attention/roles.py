"""Attention whose keys and values come from a latent vector per token (DeepSeek-V2, section 2.1): what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field

from signalprop.errors import InputError
from signalprop.network.kinds import Kind, KindSettings, Role, never

if TYPE_CHECKING:
    from signalprop.network.architecture_fields import ArchitectureFields


class Settings(KindSettings):
    """Widths beside the architecture's: d_head is that of queries and keys, the features that rotate among them.

    Attributes:
        rank: of the latent vector that keys and values are mapped from, after an RMSNorm. query_rank: the same of
            queries; 0: they are mapped from the stream. d_rotary: features of a key that all heads share, mapped from
            the stream, and turned with those of the queries. d_value: features of a value head.
        eps: added to the mean square of a latent by its norm; None: what the architecture's norms add.
        selects: keys that an indexer leaves to a token at most (DeepSeek-V3.2); 0: all. Only what no more tokens than
            that do is derived.
    """

    kind = "latent_attention"
    rank: int = Field(512, ge=1, le=10_000_000)
    query_rank: int = Field(0, ge=0, le=10_000_000)
    d_rotary: int = Field(8, ge=1, le=10_000_000)
    d_value: int = Field(64, ge=1, le=10_000_000)
    selects: int = Field(0, ge=0, le=10_000_000)
    eps: float | None = Field(None, ge=0, le=1)

    @classmethod
    def of(cls, a: ArchitectureFields) -> Self:
        """Of an architecture; the defaults where it has no such sublayers."""
        found = super().of(a)
        if found.d_rotary >= a.d_head and cls.kind in a.settings:
            raise InputError(f"latent_attention.d_rotary is {found.d_rotary}; expected less than d_head {a.d_head}")
        if 0 < found.selects < a.seq_len:
            raise InputError(
                f"attention to the {found.selects} tokens that an indexer selects of {a.seq_len} is not derived; "
                f"give seq_len of at most {found.selects}"
            )
        return found

    def eps_in(self, a: ArchitectureFields) -> float:
        """The epsilon of norms on latents in an architecture."""
        return a.norm_eps if self.eps is None else self.eps


def _query_down(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, max(1, Settings.of(a).query_rank)


def _query(a: ArchitectureFields) -> tuple[int, int]:
    return Settings.of(a).query_rank or a.d_model, a.n_heads * a.d_head


def _down(a: ArchitectureFields) -> tuple[int, int]:
    s = Settings.of(a)
    return a.d_model, s.rank + s.d_rotary


def _up(a: ArchitectureFields) -> tuple[int, int]:
    s = Settings.of(a)
    return s.rank, a.n_heads * (a.d_head - s.d_rotary + s.d_value)


ROLES = (
    Role("latent_query_down", _query_down, exists=lambda a: Settings.of(a).query_rank > 0, biased=never, reads=True),
    Role("latent_query", _query, biased=never),
    Role("latent_down", _down, biased=never, reads=True),
    Role("latent_up", _up, biased=never),
    Role("latent_output", lambda a: (a.n_heads * Settings.of(a).d_value, a.d_model), biased=never, writes=True),
)
KIND = Kind(
    name="latent_attention",
    roles=ROLES,
    words="latent attention",
    short="latent attention",
    counted="attention",
    attends=True,
    settings=Settings,
)
