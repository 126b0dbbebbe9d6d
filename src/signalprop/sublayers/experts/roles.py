"""A mixture of experts: what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from signalprop.network.kinds import Kind, KindSettings, Role, never

if TYPE_CHECKING:
    from signalprop.network.architecture_fields import ArchitectureFields


class Settings(KindSettings):
    """How tokens are routed, and to what.

    Attributes:
        n_experts, top_k: how many there are, and how many a token has.
        width: hidden features of an expert; default: d_ff.
        scores: `softmax` over all experts, or a `sigmoid` of every logit, or the root of its softplus (`sqrtsoftplus`,
            DeepSeek-V4). normalised: the weights of the chosen are
            divided by their sum (as a softmax over the chosen alone). scale: factor on what all of them give.
        n_groups, top_groups: experts stand in groups, and only those of the best groups can be chosen; a group is as
            good as its best expert (softmax) or its best two together (sigmoid), as in DeepSeek-V2 and V3.
        router_bias: the router has a bias. up_shift: added to what an expert's gate multiplies (GPT-OSS: 1).
        shared_width: hidden features of the feed-forward that every token has beside its experts; 0: none.
        hashed: first layers whose experts a table of tokens' ids chooses. transformers draws that table as zeros: the
            first expert has every token, all top_k times, and what is chosen has no gradient (DeepSeek-V4). Other
            tables are not derived.
        shared_gated: its output is multiplied with a sigmoid of a map of the token (Qwen2-MoE).
    """

    kind = "experts"
    n_experts: int = Field(8, ge=1, le=100_000)
    top_k: int = Field(2, ge=1, le=100_000)
    width: int | None = Field(None, ge=1, le=1_000_000_000)
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalised: bool = True
    scale: float = Field(1.0, ge=1e-30, le=1e30)
    n_groups: int = Field(1, ge=1, le=100_000)
    top_groups: int = Field(1, ge=1, le=100_000)
    router_bias: bool = False
    up_shift: float = Field(0.0, ge=-1e3, le=1e3)
    shared_width: int = Field(0, ge=0, le=1_000_000_000)
    shared_gated: bool = False
    hashed: int = Field(0, ge=0, le=1_000_000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"experts: top_k {self.top_k} is more than the {self.n_experts} that there are")
        if self.n_experts % self.n_groups or self.top_groups > self.n_groups:
            raise ValueError(
                f"experts: {self.n_experts} in {self.n_groups} groups, of which {self.top_groups} can be chosen; "
                "expected groups of one size, and no more than there are"
            )
        if self.top_k > self.n_experts // self.n_groups * self.top_groups:
            raise ValueError(f"experts: top_k {self.top_k} is more than {self.top_groups} groups hold")
        if self.n_groups > 1 and self.scores != "softmax" and self.n_experts < 2 * self.n_groups:
            raise ValueError("experts: a group is scored by its best two experts; expected two experts in each")
        if self.hashed and not self.normalised:
            raise ValueError("experts: what a table of ids chooses has weights that sum to scale; expected normalised")
        if self.up_shift and self.shared_width:
            raise ValueError("experts: up_shift beside shared experts is not defined; leave one of them out")
        if self.shared_gated and not self.shared_width:
            raise ValueError("experts: shared_gated needs a shared_width")
        return self


def width(a: ArchitectureFields) -> int:
    """Hidden features of one expert."""
    return Settings.of(a).width or a.d_ff


def _shared(a: ArchitectureFields) -> bool:
    return Settings.of(a).shared_width > 0


def _copies(a: ArchitectureFields) -> tuple[int, int]:
    s = Settings.of(a)
    return s.n_experts, s.top_k


def _inner(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, width(a)


def _shared_inner(a: ArchitectureFields) -> tuple[int, int]:
    return a.d_model, max(1, Settings.of(a).shared_width)


KIND = Kind(
    name="experts",
    roles=(
        Role(
            "router", lambda a: (a.d_model, Settings.of(a).n_experts), biased=lambda a: Settings.of(a).router_bias,
            reads=True,
        ),
        Role("expert_gate", _inner, exists=lambda a: a.gated, copies=_copies, reads=True),
        Role("expert_up", _inner, copies=_copies, reads=True),
        Role("expert_down", lambda a: (width(a), a.d_model), copies=_copies, writes=True),
        Role(
            "shared_router", lambda a: (a.d_model, 1), exists=lambda a: Settings.of(a).shared_gated, biased=never,
            reads=True,
        ),
        Role("shared_gate", _shared_inner, exists=lambda a: _shared(a) and a.gated, reads=True),
        Role("shared_up", _shared_inner, exists=_shared, reads=True),
        Role("shared_down", lambda a: _shared_inner(a)[::-1], exists=_shared, writes=True),
    ),
    words="experts",
    short="moe",
    activates=True,
    settings=Settings,
)  # fmt: skip
