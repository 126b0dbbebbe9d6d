"""Models that differ in what they give, in where their blocks stand, and in how often these run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.code_bases.language import cross_entropy
from benchmarks.code_bases.parts import LAYERS, LM, Attention, Block, Case, D, FeedForward, ids


class Returns(LM):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, idx: Tensor) -> Any:
        logits = super().forward(idx)
        loss = cross_entropy(logits[:, :-1], idx[:, 1:])
        return {
            "loss": loss,
            "tuple": (loss, logits),
            "dict": {"logits": logits, "loss": loss},
            "dataclass": Out(loss, logits),
        }[self.how]


@dataclass
class Out:
    """What some forwards give."""

    loss: Tensor
    logits: Tensor


class Cached(Block):
    """Gives (stream, keys)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x[..., :2]


class CachedLM(LM):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class InPairs(LM):
    """lucidrains': a list of (attention, feed-forward), called one after the other, in which some are None."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.ModuleList(
                [nn.Sequential(nn.LayerNorm(D), Attention()), nn.Sequential(nn.LayerNorm(D), FeedForward()), None]
            )
        )

    def run(self, x: Tensor) -> Tensor:
        for attn, ff, _ in self.blocks:
            x = attn(x) + x
            x = ff(x) + x
        return x


class TwoLists(LM):
    """Attentions in one list, feed-forwards in another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(LAYERS))
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norms1, self.norms2 = (nn.ModuleList(nn.LayerNorm(D) for _ in range(LAYERS)) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        for norm1, attn, norm2, ff in zip(self.norms1, self.attentions, self.norms2, self.blocks, strict=True):
            x = x + attn(norm1(x))
            x = x + ff(norm2(x))
        return x


class Numbered(LM):
    """layer_0, layer_1, ...: no list."""

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            setattr(self, f"layer_{i}", block)
        del self.blocks

    def run(self, x: Tensor) -> Tensor:
        for i in range(LAYERS):
            x = getattr(self, f"layer_{i}")(x)
        return x


class Looped(LM):
    """ALBERT: one block, called again and again. `times`: before each pass its embedding is added."""

    def __init__(self, times: bool = False, n: int = 1) -> None:
        super().__init__(n=n)
        self.times = nn.Embedding(LAYERS, D) if times else None
        if n == 1:
            self.block = self.blocks[0]
            del self.blocks

    def run(self, x: Tensor) -> Tensor:
        blocks = [self.block] if hasattr(self, "block") else list(self.blocks)
        for i in range(LAYERS // len(blocks)):
            for block in blocks:
                x = block(x if self.times is None else x + self.times.weight[i])
        return x


class Checkpointed(LM):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Dropped(LM):
    """LayerDrop: a block is passed over in training."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or float(torch.rand(())) > 0.2:
                x = block(x)
        return x


class KeywordOnly(LM):
    def forward(self, *, tokens: Tensor) -> Any:
        return super().forward(tokens)


class TakesBatch(LM):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(batch["tokens"])


class Encoded(LM):
    """Two stacks of one's own: the decoder's blocks read what the encoder gives."""

    def __init__(self) -> None:
        super().__init__(Across)
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Any:
        memory, x = self.embedded(source), self.embedded(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(self.final(x))


class Across(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.cross = nn.LayerNorm(D), Attention(fused=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.cross(self.norm3(x), memory)
        return x + self.mlp(self.norm2(x))


def _numbered(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(f"layer_{i}") for i in range(LAYERS)]


def _pairs(model: Any) -> list[nn.Module]:
    """Where a sum is seen: the next norm reads it."""
    return [block[0][0] for block in model.blocks[1:]] + [model.final]


def _entries(model: Any) -> list[nn.Module]:
    return [*list(model.norms1)[1:], model.final]


def looped(model: Any) -> list[nn.Module]:
    """The one block of a loop."""
    return [model.block]


class FromDictionary(LM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block_{i}": block for i, block in enumerate(self.blocks)})

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class FromSequence(LM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)


CASES = {
    "gives the loss alone": Case(lambda: Returns("loss"), loss=lambda out: out),
    "gives a tuple": Case(lambda: Returns("tuple"), loss=lambda out: out[0]),
    "gives a dictionary": Case(lambda: Returns("dict"), loss=lambda out: out["loss"]),
    "gives a dataclass": Case(lambda: Returns("dataclass"), loss=lambda out: out.loss),
    "blocks give (stream, cache)": Case(lambda: CachedLM(Cached)),
    "blocks in a dictionary": Case(FromDictionary),
    "blocks in a Sequential": Case(FromSequence),
    "pairs in a list, with None": Case(InPairs, layers=_pairs, side="input"),
    "attentions and feed-forwards in two lists": Case(TwoLists, layers=_entries, side="input"),
    "layer_0, layer_1, ...": Case(Numbered, layers=_numbered),
    "one block in a loop (ALBERT)": Case(Looped, layers=looped),
    "one block in a loop, with times (universal transformer)": Case(lambda: Looped(True), layers=looped),
    "two blocks in a loop": Case(lambda: Looped(n=2)),
    "gradient checkpointing": Case(Checkpointed),
    "LayerDrop": Case(Dropped),
    "keywords alone": Case(KeywordOnly, lambda: {"tokens": ids()}),
    "takes a dictionary": Case(TakesBatch, lambda: ({"tokens": ids()},)),
    "called by a function": Case(LM, lambda: lambda model: model(ids())),
    "encoder-decoder of one's own": Case(Encoded, lambda: (ids(), ids().flip(1))),
}  # fmt: skip
