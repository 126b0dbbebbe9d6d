"""Small models that the benchmarks look at: of Hugging Face families, and a plain decoder as people write their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment import EmbeddingMap, HeadMap, Mapping, SublayerMap
from signalprop.network.architecture import Architecture


def hugging_face(
    family: str,
    n_layers: int,
    *,
    width: int = 256,
    heads: int = 4,
    vocab_size: int = 1000,
    tokens: int = 128,
    dropout: float = 0.0,
    **changes: Any,
) -> Any:
    """A model of a family with transformers' own weights. Half of T5's layers are in its encoder.

    Args:
        changes: further keys of the family's configuration.
    """
    import transformers as t

    t.logging.set_verbosity_error()
    wide = {"hidden_size": width, "num_hidden_layers": n_layers, "num_attention_heads": heads}
    text = {"vocab_size": vocab_size, "max_position_embeddings": tokens}
    four = {"intermediate_size": 4 * width}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "bert": (t.BertForMaskedLM, t.BertConfig, {**text, **wide, **four, **drop}),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, {
            "vocab_size": vocab_size, "n_positions": tokens, "n_embd": width, "n_layer": n_layers, "n_head": heads,
            "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, "bos_token_id": 1,
            "eos_token_id": 2}),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, {**text, **wide, "intermediate_size": round(8 * width / 3)}),
        "vit": (t.ViTForImageClassification, t.ViTConfig, {
            **wide, **four, **drop, "image_size": 24, "patch_size": 3, "num_channels": 1, "num_labels": 10}),
        "t5": (t.T5ForConditionalGeneration, t.T5Config, {
            "vocab_size": vocab_size, "d_model": width, "d_kv": width // heads, "d_ff": 4 * width,
            "num_layers": n_layers // 2, "num_heads": heads, "dropout_rate": dropout, "n_positions": tokens}),
    }  # fmt: skip
    model_class, config_class, options = families[family]
    return model_class(config_class(**options | changes))


class Attention(nn.Module):
    """Causal attention with one map for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        batch, tokens, width = x.shape
        split = self.inputs(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.output(seen.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out


class Decoder(nn.Module):
    """A decoder in the manner of nanoGPT: fused query, key and value, `scaled_dot_product_attention`, GELU, learned
    positions, the token table as the head. No dropout."""

    def __init__(self, n_layers: int, width: int, heads: int, vocab_size: int = 1000, tokens: int = 128) -> None:
        super().__init__()
        self.size = (n_layers, width, heads, vocab_size, tokens)
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token.weight
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, 0.0, 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (batch, tokens) -> logits."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def signalprop_mapping(self) -> Mapping:
        """Where the signal runs, for a probe."""
        n_layers, width, heads, vocab_size, tokens = self.size
        return Mapping(
            architecture=Architecture(
                kind="decoder", n_layers=n_layers, d_model=width, n_heads=heads, vocab_size=vocab_size, seq_len=tokens,
                norm_placement="pre", activation="gelu", dropout=0.0, tied_embeddings=True,
            ),
            sublayers=[
                SublayerMap(branch=f"blocks.{i}.{branch}", norm=f"blocks.{i}.norm_{j}")
                for i in range(n_layers)
                for j, branch in ((1, "attention"), (2, "feed_forward"))
            ],
            final_norm="norm",
            embedding=EmbeddingMap(token="token", position="position"),
            head=HeadMap(weight="head"),
        )  # fmt: skip
