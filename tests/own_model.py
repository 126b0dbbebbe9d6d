"""A small pre-norm GPT that is nobody's library model, with a mapping of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment import EmbeddingMap, HeadMap, Mapping, SublayerMap
from signalprop.network.architecture import Architecture

D, HEADS, VOCABULARY, LENGTH = 32, 4, 50, 16


class Attention(nn.Module):
    """Causal attention with a fused map."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(D, elementwise_affine=affine)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(D, elementwise_affine=affine)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class OwnGPT(nn.Module):
    """Pre-norm GPT; `affine`: norms have weights; `tied`: head and embedding share theirs."""

    def __init__(self, n_layers: int = 3, *, affine: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.affine, self.tied = affine, tied
        self.wte, self.wpe = nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(affine) for _ in range(n_layers))
        self.ln_f = nn.LayerNorm(D, elementwise_affine=affine)
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def signalprop_mapping(self) -> Mapping:
        """Where the signal runs."""
        sublayers = []
        for i in range(len(self.blocks)):
            at = f"blocks.{i}"
            roles = {
                role: (f"{at}.attn.qkv", slice(j * D, (j + 1) * D)) for j, role in enumerate(("query", "key", "value"))
            }
            weights: dict[str, Any] = roles | {"output": f"{at}.attn.proj"}
            sublayers.append(SublayerMap(branch=f"{at}.attn", norm=f"{at}.ln_1", weights=weights))
            weights = {"up": f"{at}.up", "down": f"{at}.down"}
            sublayers.append(SublayerMap(branch=f"{at}.down", norm=f"{at}.ln_2", weights=weights))
        return Mapping(
            architecture=Architecture(
                kind="decoder", n_layers=len(self.blocks), d_model=D, n_heads=HEADS, d_ff=2 * D, vocab_size=VOCABULARY,
                seq_len=LENGTH, activation="gelu", norm_placement="pre", dropout=0.0, attention_dropout=0.0,
                embedding_dropout=0.0, tied_embeddings=self.tied,
            ),
            sublayers=sublayers,
            final_norm="ln_f",
            embedding=EmbeddingMap(token="wte", position="wpe"),
            head=HeadMap(weight="head"),
            arguments=lambda batch: {"ids": torch.as_tensor(batch.tokens)},
        )  # fmt: skip


def own_model(n_layers: int = 3, **options: Any) -> OwnGPT:
    """The model with seeded weights."""
    torch.manual_seed(0)
    return OwnGPT(n_layers, **options).eval()


def own_ids() -> Tensor:
    """Two sequences."""
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY
