"""What the models of this folder share: a case, norms, attention, feed-forwards, and a language model's shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, LAYERS, WORDS, BATCH, LENGTH = 64, 4, 4, 99, 3, 12


def ids(words: int = WORDS, length: int = LENGTH) -> Tensor:
    """Token ids (batch, tokens), the same ones every time."""
    return torch.randint(0, words, (BATCH, length), generator=torch.Generator().manual_seed(0))


def normal(*shape: int) -> Tensor:
    """Normal numbers, the same ones every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of `model.blocks`."""
    found: Any = model.blocks
    return [m for m in (found.values() if isinstance(found, nn.ModuleDict) else found) if m is not None]


def first(output: Any) -> Tensor:
    """The first tensor of what a block gives."""
    return output if isinstance(output, Tensor) else first(next(iter(output)))


def in_list(path: str) -> Callable[[nn.Module], list[nn.Module]]:
    """The members of the list, or the dictionary of modules, of that path."""

    def found(model: nn.Module) -> list[nn.Module]:
        held: Any = model.get_submodule(path)
        return list(held.values() if isinstance(held, nn.ModuleDict) else held)

    return found


@dataclass(frozen=True)
class Case:
    """A model as its user has it.

    Attributes:
        make: builds it. inputs: what a user hands to `inputs=`; called anew for each verb.
        layers: the modules after which the oracle looks at the stream, in the order in which they run.
        stream: the stream in what one gives, (batch, tokens, features). held: the tensor of that which gradients reach.
        side: of those modules: what they give, or what they read. tokens_first: it is (tokens, batch, features) there.
        loss: of the output; default: a random projection.
        needs: a package.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any] = ids
    layers: Callable[[nn.Module], list[nn.Module]] = blocks_of
    stream: Callable[[Any], Tensor] = first
    held: Callable[[Any], Tensor] = first
    side: Literal["input", "output"] = "output"
    tokens_first: bool = False
    loss: Callable[[Any], Tensor] | None = None
    needs: str = ""


class RMSNorm(nn.Module):
    """x / rms(x), times a gain."""

    def __init__(self, width: int = D, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class BiaslessLayerNorm(nn.Module):
    """A LayerNorm by `F.layer_norm`, as code from before PyTorch's own had an option for it."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def rms(x: Tensor) -> Tensor:
    """A norm without weights, as a function."""
    return F.rms_norm(x, (x.shape[-1],))


def angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions, (tokens, width / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    turned = torch.outer(torch.arange(length).float(), frequencies)
    return turned.cos(), turned.sin()


def rotated(x: Tensor, pairs: bool = False) -> Tensor:
    """(batch, heads, tokens, features), turned; by neighbouring `pairs`, or by halves."""
    cos, sin = angles(x.shape[-2], x.shape[-1])
    if pairs:
        one, two = x[..., 0::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class Attention(nn.Module):
    """Attention of (batch, tokens, features).

    Args:
        fused: one map for query, key and value. rotary: `halves`, `pairs`. qk: norms queries and keys by a function.
        kv: heads of keys. memory: keys and values read another stream.
    """

    def __init__(
        self, *, causal: bool = True, fused: bool = True, bias: bool = True, rotary: str = "", qk: bool = False,
        kv: int = HEADS, width: int = D,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.fused, self.rotary, self.qk, self.kv = causal, fused, rotary, qk, kv
        inner = kv * width // HEADS
        if fused:
            self.qkv = nn.Linear(width, width + 2 * inner, bias=bias)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(width, n, bias=bias) for n in (width, inner, inner))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        inner = self.kv * x.shape[-1] // HEADS
        if self.fused:
            q, k, v = self.qkv(x).split([x.shape[-1], inner, inner], -1)
        else:
            q, k, v = self.wq(x), self.wk(other), self.wv(other)
        q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in ((q, HEADS), (k, self.kv), (v, self.kv)))
        if self.rotary:
            q, k = rotated(q, self.rotary == "pairs"), rotated(k, self.rotary == "pairs")
        if self.qk:
            q, k = rms(q), rms(k)
        k, v = (t.repeat_interleave(HEADS // self.kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and memory is None)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two maps with an activation between."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.gelu, *, bias: bool = True, width: int = D) -> None:
        super().__init__()
        self.up, self.down, self.act = (
            nn.Linear(width, 4 * width, bias=bias),
            nn.Linear(4 * width, width, bias=bias),
            act,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    """SwiGLU in Llama's names."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(a, b, bias=False) for a, b in ((D, 160), (D, 160), (160, D)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


class Block(nn.Module):
    """Pre-norm: the block that most of the others here differ from in one thing."""

    def __init__(self, norm: Callable[[], nn.Module] | None = None, **attention: Any) -> None:
        super().__init__()
        norm = norm or (lambda: nn.LayerNorm(D))
        self.norm1, self.norm2 = norm(), norm()
        self.attn, self.mlp = Attention(**attention), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    """Embedding, blocks, norm, head; what is between the blocks, its children say.

    Args:
        block: makes a block; or makes it from its number, where `numbered`.
    """

    def __init__(
        self, block: Callable[..., Any] = Block, *, numbered: bool = False, n: int = LAYERS,
        final: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, D), nn.Embedding(64, D)
        self.blocks: Any = nn.ModuleList(block(i) if numbered else block() for i in range(n))
        self.final = nn.LayerNorm(D) if final is None else final
        self.head = nn.Linear(D, WORDS, bias=False)

    def embedded(self, idx: Tensor) -> Tensor:
        return self.embed(idx) + self.positions(torch.arange(idx.shape[1]))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, idx: Tensor) -> Any:
        return self.head(self.final(self.run(self.embedded(idx))))
