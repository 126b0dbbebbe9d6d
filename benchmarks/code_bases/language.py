"""Language models of one file, as nanoGPT, minGPT, nanochat and modded-nanogpt are."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.parts import (
    HEADS,
    LAYERS,
    LM,
    WORDS,
    Attention,
    BiaslessLayerNorm,
    Block,
    Case,
    D,
    FeedForward,
    ids,
    in_list,
    normal,
    rms,
    squared_relu,
)  # fmt: skip


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Over all positions."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class NanoGPT(nn.Module):
    """Tied head, norms without biases, (logits, loss); without targets logits of the last position alone."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(WORDS, D), "wpe": nn.Embedding(64, D), "drop": nn.Dropout(0.0)}
        self.transformer = nn.ModuleDict(
            {
                **parts,
                "h": nn.ModuleList(Block(BiaslessLayerNorm, bias=False) for _ in range(LAYERS)),
                "ln_f": BiaslessLayerNorm(),
            }
        )
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p, std=0.02 / (math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1)
                )

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        t: Any = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1])))
        for block in t.h:
            x = block(x)
        x = t.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, cross_entropy(logits, targets)


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class MinBlock(nn.Module):
    """Softmax by hand with a mask in a buffer; the feed-forward is a dictionary behind a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.c_attn, self.c_proj = (
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(D, 4 * D), "c_proj": nn.Linear(4 * D, D), "act": NewGELU(), "dropout": nn.Dropout(0.0)}
        )
        m: Any = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).split(D, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        t = x.shape[1]
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        return self.c_proj((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class FunctionBlock(nn.Module):
    """nanochat's: norms are functions, queries and keys are normed after their rotation, relu squared, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(fused=False, bias=False, rotary="halves", qk=True)
        self.mlp = FeedForward(squared_relu, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(rms(x))
        return x + self.mlp(rms(x))


class Nanochat(nn.Module):
    """Norm after the embedding, scalars for the stream and for reads of the first stream, logits capped."""

    def __init__(self, lambdas: tuple[float, float] | None) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(WORDS, D), "h": nn.ModuleList(FunctionBlock() for _ in range(LAYERS))}
        )
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        if lambdas is not None:
            self.resid_lambdas = nn.Parameter(torch.full((LAYERS,), lambdas[0]))
            self.x0_lambdas = nn.Parameter(torch.full((LAYERS,), lambdas[1]))
        self.read = lambdas is not None

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        t: Any = self.transformer
        x = x0 = rms(t.wte(idx))
        for i, block in enumerate(t.h):
            if self.read:
                x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(rms(x)).float() / 15)
        return logits if targets is None else cross_entropy(logits, targets)


class ModdedBlock(FunctionBlock):
    """Mixes the stream with the first one inside the block; the first half's streams come back in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.2]))

    def forward(self, x: Tensor, x0: Tensor | None = None) -> Tensor:
        assert x0 is not None
        return super().forward(self.lambdas[0] * x + self.lambdas[1] * x0)


class Modded(LM):
    def __init__(self, block: type[nn.Module] = ModdedBlock) -> None:
        super().__init__(block, final=nn.Identity())
        self.skip_weights = nn.Parameter(torch.ones(LAYERS // 2))

    def run(self, x: Tensor) -> Tensor:
        x = x0 = rms(x)
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= LAYERS // 2:
                x = x + self.skip_weights[i - LAYERS // 2] * skips.pop()
            x = block(x, x0)
            if i < LAYERS // 2:
                skips.append(x)
        return rms(x)


class MixedSeen(FunctionBlock):
    """The same block, whose mix is passed through an nn.Identity, as a refusal asks."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas, self.mixed = nn.Parameter(torch.tensor([1.0, 0.2])), nn.Identity()

    def forward(self, x: Tensor, x0: Tensor | None = None) -> Tensor:
        assert x0 is not None
        return super().forward(self.mixed(self.lambdas[0] * x + self.lambdas[1] * x0))


class UNetLM(LM):
    """Plain blocks; the streams of the first half are added to the second's, times trained scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.skip_weights = nn.Parameter(torch.ones(LAYERS // 2))

    def run(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= LAYERS // 2:
                x = x + self.skip_weights[i - LAYERS // 2] * skips.pop()
            x = block(x)
            if i < LAYERS // 2:
                skips.append(x)
        return x


class ReadsFirst(LM):
    """x0 with a scalar per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.full((LAYERS,), 0.5))

    def run(self, x: Tensor) -> Tensor:
        x0 = x
        for i, block in enumerate(self.blocks):
            x = block(x + self.lambdas[i] * x0)
        return x


class DenseFormer(LM):
    """After every block a trained average of all streams so far."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.tensor([0.1] * (i + 1) + [1.0])) for i in range(LAYERS))

    def run(self, x: Tensor) -> Tensor:
        all_streams = [x]
        for block, w in zip(self.blocks, self.weights, strict=True):
            all_streams.append(block(x))
            x = sum(w[j] * s for j, s in enumerate(all_streams))
        return x


_H = in_list("transformer.h")
LOSS = lambda output: output[1]  # noqa: E731

CASES = {
    "nanoGPT, ids alone": Case(NanoGPT, layers=_H, loss=lambda out: (out[0] * normal(3, 1, WORDS)).sum()),
    "nanoGPT, (ids, targets)": Case(NanoGPT, lambda: (ids(), ids().roll(-1, 1)), _H, loss=LOSS),
    "minGPT": Case(lambda: LM(MinBlock)),
    "nanochat, plain": Case(lambda: Nanochat(None), layers=_H),
    "nanochat, lambdas at their start": Case(lambda: Nanochat((1.0, 0.0)), layers=_H),
    "nanochat, x0 lambdas .1": Case(lambda: Nanochat((1.0, 0.1)), layers=_H),
    "nanochat, loss alone": Case(lambda: Nanochat(None), lambda: (ids(), ids().roll(-1, 1)), _H, loss=lambda out: out),
    "modded-nanogpt": Case(Modded),
    "modded-nanogpt, with nn.Identity": Case(lambda: Modded(MixedSeen)),
    "U-Net skips with scalars": Case(UNetLM),
    "x0 with scalars": Case(ReadsFirst),
    "DenseFormer": Case(DenseFormer),
}
