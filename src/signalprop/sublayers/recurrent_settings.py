"""What an architecture says of sublayers that keep a state: heads, of which a group shares queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from signalprop.network.kinds import KindSettings, Role, never

if TYPE_CHECKING:
    from signalprop.network.architecture_fields import ArchitectureFields


_HEADS, _FEATURES = 16, 1024  # that a draw has at least, where there are so many


class Recurrent(KindSettings):
    """Settings of heads that read filtered values, keys and queries.

    Attributes:
        n_heads: of values. n_groups: consecutive heads of a group share queries and keys.
        width: tokens that a filter reads, the token itself and those before it.
    """

    prefix: ClassVar[str]  # of the names of its roles
    n_heads: int = Field(8, ge=1, le=1_000_000)
    n_groups: int = Field(1, ge=1, le=1_000_000)
    width: int = Field(4, ge=1, le=10_000)

    @model_validator(mode="after")
    def _in_groups(self) -> Self:
        if self.n_heads % self.n_groups:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_groups {self.n_groups}; choose a divisor")
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        """Features of a head's values, and of a key or a query."""
        raise NotImplementedError

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.n_heads * self.sizes[0]

    @property
    def shared(self) -> int:
        """Numbers of the keys, or of the queries, of all groups."""
        return self.n_groups * self.sizes[1]

    @property
    def channels(self) -> int:
        """Features that are filtered: values, keys, queries."""
        return self.inner + 2 * self.shared

    @classmethod
    def narrower(cls, a: ArchitectureFields) -> dict[str, Any]:
        """Fields for some of the heads, in as many of the groups as there can be, for a draw."""
        s = cls.of(a)
        heads = max(_HEADS, _FEATURES // s.sizes[0])
        if s.n_heads <= heads:
            return {}
        groups = max(1, s.n_groups * heads // s.n_heads)
        few = s.model_copy(update={"n_heads": max(1, heads // groups) * groups, "n_groups": groups})
        return {"settings": {**a.settings, cls.kind: few}}

    @classmethod
    def roles(cls, *per_head: str, biased: Any = never, filter_biased: Any = never) -> tuple[Role, ...]:
        """Gate, value, key, query, `per_head` (a number for each head), filter and output map."""

        def reads(name: str, size: str) -> Role:
            return Role(
                f"{cls.prefix}_{name}", lambda a: (a.d_model, getattr(cls.of(a), size)), biased=biased, reads=True
            )

        sizes = {"gate": "inner", "value": "inner", "key": "shared", "query": "shared"} | dict.fromkeys(
            per_head, "n_heads"
        )
        return (
            *(reads(name, size) for name, size in sizes.items()),
            Role(f"{cls.prefix}_filter", lambda a: (cls.of(a).width, cls.of(a).channels), biased=filter_biased),
            Role(f"{cls.prefix}_out", lambda a: (cls.of(a).inner, a.d_model), biased=biased, writes=True),
        )
