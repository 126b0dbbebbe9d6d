"""Blocks that differ from the usual one in one thing: norms, sums, multipliers, mixers, outputs, containers, loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.code_bases.language import cross_entropy
from benchmarks.code_bases.parts import (
    D, HEADS, LAYERS, WORDS, Attention, Block, Case, FeedForward, LM, RMSNorm, ids, rms,
)  # fmt: skip

# --- norms and sums ---------------------------------------------------------------------------------------------------


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class DeepNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x * 1.7 + self.attn(x))
        return self.norm2(x * 1.7 + self.mlp(x))  # type: ignore[no-any-return]


class Sandwich(Block):
    def __init__(self) -> None:
        super().__init__(RMSNorm)
        self.after1, self.after2 = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after1(self.attn(self.norm1(x)))
        return x + self.after2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class NormOnBranch(Block):
    """OLMo 2, Swin v2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))  # type: ignore[no-any-return]


class ReZero(Block):
    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.resweight = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.resweight * self.attn(x)
        return x + self.resweight * self.mlp(x)  # type: ignore[no-any-return]


class LayerScaleParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = (nn.Parameter(0.1 * torch.ones(D)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Scale(nn.Module):
    """LayerScale as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class LayerScaleModule(Block):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ls1, self.ls2 = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class DepthMultiplier(Block):
    """MiniCPM's and muP's: every branch times a number."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) * (1.4 / LAYERS**0.5)
        return x + self.mlp(self.norm2(x)) * (1.4 / LAYERS**0.5)  # type: ignore[no-any-return]


class Parallel(Block):
    """GPT-J, PaLM: one norm, one sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y) + self.mlp(y)  # type: ignore[no-any-return]


class Sphere(Block):
    """nGPT: the stream moves towards what a branch gives, on the sphere."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.rate = nn.Parameter(torch.full((2, D), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        for rate, branch in zip(self.rate, (self.attn, self.mlp), strict=True):
            x = F.normalize(x + rate * (F.normalize(branch(x), dim=-1) - x), dim=-1)
        return x


class Bare(nn.Module):
    """No modules at all inside: parameters and functions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D))
        self.qkv, self.out, self.up, self.down = (nn.Parameter(torch.randn(s) * s[1] ** -0.5) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in F.linear(rms(x), self.qkv).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, self.out)
        return x + F.linear(F.gelu(F.linear(rms(x), self.up)), self.down)


class Hyper(LM):
    """Hyper-connections: two streams, mixed by fixed numbers before and after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = nn.Parameter(torch.full((LAYERS, 2), 0.5)), nn.Parameter(torch.ones(LAYERS, 2))
        self.mixes = nn.Parameter(torch.eye(2).repeat(LAYERS, 1, 1))

    def run(self, x: Tensor) -> Tensor:
        streams = torch.stack((x, x), 2)
        for i, block in enumerate(self.blocks):
            read = (streams * self.reads[i][:, None]).sum(2)
            streams = self.mixes[i] @ streams + (block(read) - read)[:, :, None] * self.writes[i][:, None]
        return streams.sum(2)


# --- mixers -----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four experts a token, in a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(FeedForward(F.silu) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            where = (chosen == e).any(-1)
            if where.any():
                out[where] += expert(x[where]) * weights[where][chosen[where] == e][:, None]
        return out


class Mixture(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()  # type: ignore[assignment]


class Mamba(nn.Module):
    """A selective scan, token by token, after a causal convolution, and a gate."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D, 4 * D, bias=False), nn.Linear(2 * D, D, bias=False)
        self.conv1d = nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(2 * D, 4 + 2 * states, bias=False), nn.Linear(4, 2 * D)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(2 * D, 1))
        self.skip, self.states = nn.Parameter(torch.ones(2 * D)), states

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        u = F.silu(self.conv1d(u.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(u).split([4, self.states, self.states], -1)
        dt = F.softplus(self.dt_proj(dt))
        state, out = torch.zeros(len(x), 2 * D, self.states), []
        for t in range(x.shape[1]):
            decay = torch.exp(-dt[:, t, :, None] * self.A_log.exp())
            state = decay * state + (dt * u)[:, t, :, None] * b[:, t, None, :]
            out.append((state * c[:, t, None, :]).sum(-1))
        return self.out_proj((torch.stack(out, 1) + self.skip * u) * F.silu(z))  # type: ignore[no-any-return]


class MambaPair(nn.Module):
    """mamba_ssm's block: (hidden, residual), the sum stands at the start of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(), Mamba()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.mixer(self.norm(residual)), residual


class MambaLM(LM):
    def run(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        return x + residual


class TimeMix(nn.Module):
    """RWKV: what a token and the one before hold, and a decaying sum over all before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay = nn.Parameter(0.5 * torch.ones(3, D)), nn.Parameter(-torch.ones(D))
        self.key, self.value, self.receptance, self.output = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (m(x * a + before * (1 - a)) for m, a in zip((self.key, self.value, self.receptance), self.mix, strict=True))
        top = bottom = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            e = k[:, t].clamp(max=20).exp()
            top, bottom = self.decay.exp().neg().exp() * top + e * v[:, t], self.decay.exp().neg().exp() * bottom + e
            out.append(top / bottom)
        return self.output(r.sigmoid() * torch.stack(out, 1))  # type: ignore[no-any-return]


class RWKV(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = TimeMix()  # type: ignore[assignment]


class LinearAttention(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
        y = scores @ v / scores.sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Linear(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LinearAttention()


# --- outputs, containers, loops ---------------------------------------------------------------------------------------


class Returns(LM):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, idx: Tensor) -> Any:
        logits = super().forward(idx)
        loss = cross_entropy(logits[:, :-1], idx[:, 1:])
        return {"loss": loss, "tuple": (loss, logits), "dict": {"logits": logits, "loss": loss}, "dataclass": Out(loss, logits)}[self.how]


@dataclass
class Out:
    """What some forwards give."""

    loss: Tensor
    logits: Tensor


class Cached(Block):
    """Gives (stream, keys)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x[..., :2]


class CachedLM(LM):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class InPairs(LM):
    """lucidrains': a list of (attention, feed-forward), called one after the other, in which some are None."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList([nn.Sequential(nn.LayerNorm(D), Attention()), nn.Sequential(nn.LayerNorm(D), FeedForward()), None]))  # type: ignore[list-item]

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
    """ALBERT: one block, called again and again. `times`: adds an embedding of the pass before each (universal transformer)."""

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
    def forward(self, *, tokens: Tensor) -> Any:  # type: ignore[override]
        return super().forward(tokens)


class TakesBatch(LM):
    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch["tokens"])


class Encoded(LM):
    """Two stacks of one's own: the decoder's blocks read what the encoder gives."""

    def __init__(self) -> None:
        super().__init__(Across)
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Any:  # type: ignore[override]
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
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class SqrtEmbedding(LM):
    """Gemma: embeddings times sqrt(width), norms before and after."""

    def embedded(self, idx: Tensor) -> Tensor:
        return self.embed(idx) * D**0.5


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
        return self.blocks(x)  # type: ignore[no-any-return]


_SUM: Callable[[Any], Tensor] = lambda out: out[0] + out[1]  # noqa: E731

CASES = {
    "post-norm with a final norm": Case(lambda: LM(PostNorm)),
    "post-norm": Case(lambda: LM(PostNorm, final=nn.Identity())),
    "DeepNorm": Case(lambda: LM(DeepNorm, final=nn.Identity())),
    "sandwich norms (Gemma)": Case(lambda: SqrtEmbedding(Sandwich, final=RMSNorm())),
    "norms on branches (OLMo 2, Swin v2)": Case(lambda: LM(NormOnBranch)),
    "ReZero": Case(lambda: LM(ReZero, final=nn.Identity())),
    "LayerScale, a parameter": Case(lambda: LM(LayerScaleParameter)),
    "LayerScale, a module": Case(lambda: LM(LayerScaleModule)),
    "branches times a number (MiniCPM, muP)": Case(lambda: LM(DepthMultiplier)),
    "parallel (GPT-J, PaLM)": Case(lambda: LM(Parallel)),
    "nGPT": Case(lambda: LM(Sphere, final=nn.Identity())),
    "bare parameters, functions alone": Case(lambda: LM(Bare)),
    "hyper-connections": Case(Hyper),
    "experts of one's own": Case(lambda: LM(Mixture)),
    "Mamba, (hidden, residual)": Case(lambda: MambaLM(MambaPair, final=RMSNorm()), stream=_SUM),
    "RWKV": Case(lambda: LM(RWKV)),
    "linear attention": Case(lambda: LM(Linear)),
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
