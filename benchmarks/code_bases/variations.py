"""Blocks that differ from the usual one in one thing: norms, sums, multipliers, mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.parts import (
    HEADS,
    LAYERS,
    LM,
    Attention,
    Block,
    Case,
    D,
    FeedForward,
    RMSNorm,
    rms,
)  # fmt: skip

# --- norms and sums ---------------------------------------------------------------------------------------------------


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class DeepNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x * 1.7 + self.attn(x))
        return self.norm2(x * 1.7 + self.mlp(x))


class Sandwich(Block):
    def __init__(self) -> None:
        super().__init__(RMSNorm)
        self.after1, self.after2 = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after1(self.attn(self.norm1(x)))
        return x + self.after2(self.mlp(self.norm2(x)))


class NormOnBranch(Block):
    """OLMo 2, Swin v2."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class ReZero(Block):
    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.resweight = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.resweight * self.attn(x)
        return x + self.resweight * self.mlp(x)


class LayerScaleParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = (nn.Parameter(0.1 * torch.ones(D)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


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
        return x + self.ls2(self.mlp(self.norm2(x)))


class DepthMultiplier(Block):
    """MiniCPM's and muP's: every branch times a number."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) * (1.4 / LAYERS**0.5)
        return x + self.mlp(self.norm2(x)) * (1.4 / LAYERS**0.5)


class Parallel(Block):
    """GPT-J, PaLM: one norm, one sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y) + self.mlp(y)


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


class BareSeen(Bare):
    """The same with what it adds passed through an nn.Identity each, as a refusal asks."""

    def __init__(self) -> None:
        super().__init__()
        self.attended, self.fed = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in F.linear(rms(x), self.qkv).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attended(F.linear(y, self.out))
        return x + self.fed(F.linear(F.gelu(F.linear(rms(x), self.up)), self.down))


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


class SqrtEmbedding(LM):
    """Gemma: embeddings times sqrt(width), norms before and after."""

    def embedded(self, idx: Tensor) -> Tensor:
        return self.embed(idx) * D**0.5


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
        self.mlp = Experts()


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
        return self.out_proj((torch.stack(out, 1) + self.skip * u) * F.silu(z))


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
        k, v, r = (
            m(x * a + before * (1 - a)) for m, a in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        top = bottom = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            e = k[:, t].clamp(max=20).exp()
            top, bottom = self.decay.exp().neg().exp() * top + e * v[:, t], self.decay.exp().neg().exp() * bottom + e
            out.append(top / bottom)
        return self.output(r.sigmoid() * torch.stack(out, 1))


class RWKV(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = TimeMix()


class LinearAttention(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
        y = scores @ v / scores.sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Linear(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LinearAttention()


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
    "bare parameters, with nn.Identity": Case(lambda: LM(BareSeen)),
    "hyper-connections": Case(Hyper),
    "experts of one's own": Case(lambda: LM(Mixture)),
    "Mamba, (hidden, residual)": Case(lambda: MambaLM(MambaPair, final=RMSNorm()), stream=_SUM),
    "RWKV": Case(lambda: LM(RWKV)),
    "linear attention": Case(lambda: LM(Linear)),
}
