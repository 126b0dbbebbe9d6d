"""GPTs of one file, in three styles in which people write them, for what must read models that it has never met."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 64, 4, 99


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (batch, tokens, width)."""
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)


class NanoBlock(nn.Module):
    """nanoGPT: two modules, each added to the stream in the block's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        x = x + self.c_proj(_attention(*self.c_attn(self.ln_1(x)).chunk(3, dim=-1)))
        return x + self.mlp(self.ln_2(x))


class FunctionalBlock(nn.Module):
    """Bare parameters, functional norms, additions in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        qkv = F.linear(F.rms_norm(x, (WIDTH,)), self.qkv)
        x = x.clone() if x.is_leaf else x
        x += F.linear(_attention(*qkv.chunk(3, dim=-1)), self.out)
        x += F.linear(F.relu(F.linear(F.rms_norm(x, (WIDTH,)), self.up)).square(), self.down)
        return x


class ParallelBlock(nn.Module):
    """GPT-J's way: one norm, attention and feed-forward in parallel, one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        y = self.norm(x)
        attended = self.output(_attention(self.query(y), self.key(y), self.value(y)))
        return x + attended + self.down(F.silu(self.up(y)))


class GPT(nn.Module):
    """Embeddings, blocks of a style, a norm and a head."""

    def __init__(self, block: type[nn.Module], n_layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(n_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        """Logits of token ids of shape (batch, tokens)."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]
