"""Language models as torchtitan, lingua, litgpt, Megatron-core and nanotron write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.language import cross_entropy
from benchmarks.code_bases.parts import (  # fmt: skip
    HEADS,
    LAYERS,
    LENGTH,
    LM,
    WORDS,
    Attention,
    Block,
    Case,
    D,
    FeedForward,
    Gated,
    RMSNorm,
    angles,
    ids,
    in_list,
    normal,
)


class LlamaBlock(nn.Module):
    """Llama in Meta's names: rotations by pairs, fewer heads of keys; the angles come as arguments where `given`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(fused=False, bias=False, **{"rotary": "pairs", "kv": 2, **options})
        self.feed_forward, self.attention_norm, self.ffn_norm = Gated(), RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, *angles_and_mask: Any) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Titan(nn.Module):
    """torchtitan's: layers in a dictionary of modules by their numbers, parts that a pipeline may have taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleDict({str(i): LlamaBlock() for i in range(LAYERS)})
        self.norm: Any = RMSNorm()
        self.output: Any = nn.Linear(D, WORDS, bias=False)
        self.register_buffer("freqs_cis", torch.complex(*angles(64, D // HEADS)), persistent=False)

    def forward(self, tokens: Tensor, input_batch: Tensor | None = None) -> Any:
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


class Lingua(nn.Module):
    """lingua's: the loss where there is a target; rotations made once and handed down."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(WORDS, D), RMSNorm()
        self.layers = nn.ModuleList(LlamaBlock(rotary="halves") for _ in range(LAYERS))
        self.output = nn.Linear(D, WORDS, bias=False)

    def forward(
        self,
        token_values: Tensor,
        target: Tensor | None = None,
        tok_idx: Tensor | None = None,
        mask: Any = None,
        attn_impl: str = "sdpa",
    ) -> Tensor:
        h, frequencies = self.tok_embeddings(token_values), angles(LENGTH, D // HEADS)
        for layer in self.layers:
            h = layer(h, frequencies, tok_idx, mask, attn_impl)
        logits = self.output(self.norm(h))
        return logits if target is None else cross_entropy(logits, target)


class LitBlock(nn.Module):
    """litgpt's: (x, cos, sin, mask, input_pos), attention by groups in one map, optional parallel residual."""

    def __init__(self, parallel: bool, shared: bool) -> None:
        super().__init__()
        self.norm_1, self.attn = RMSNorm(), Attention(bias=False, rotary="halves")
        self.norm_2: Any = None if shared else RMSNorm()
        self.mlp, self.post_attention_norm, self.parallel = Gated(), nn.Identity(), parallel

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        normed = self.norm_1(x)
        attended = self.post_attention_norm(self.attn(normed))
        if self.parallel:
            return self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + (attended + x)
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class Lit(nn.Module):
    def __init__(self, parallel: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, D),
                "h": nn.ModuleList(LitBlock(parallel, shared) for _ in range(LAYERS)),
                "ln_f": RMSNorm(),
            }
        )

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, input_pos_maxp1: int | None = None) -> Tensor:
        t: Any = self.transformer
        x = t.wte(idx)
        cos, sin = angles(idx.shape[1], D // HEADS)
        for block in t.h:
            x = block(x, cos, sin, None, input_pos)
        return self.lm_head(t.ln_f(x))


class MegatronAttention(nn.Module):
    """Gives (output, bias), of (tokens, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, n = x.shape[:2]
        q, k, v = self.linear_qkv(x).view(tokens, n, HEADS, 3 * D // HEADS).permute(1, 2, 0, 3).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(y.permute(2, 0, 1, 3).reshape(tokens, n, D)), self.bias


class MegatronLayer(nn.Module):
    """Megatron-core's: (tokens, batch, features), maps give (output, bias), blocks (stream, context)."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attention, self.mlp = MegatronAttention(), FeedForward()
        self.bias_2 = nn.Parameter(torch.zeros(D))

    def forward(self, hidden_states: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        def added(output: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
            return residual + F.dropout(output + bias, 0.0, self.training)

        attended, bias = self.self_attention(self.input_layernorm(hidden_states))
        hidden_states = added(attended, bias, hidden_states)
        return added(self.mlp(self.pre_mlp_layernorm(hidden_states)), self.bias_2, hidden_states), None


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, D), nn.ModuleList(MegatronLayer() for _ in range(LAYERS))
        self.final_layernorm, self.output_layer = nn.LayerNorm(D), nn.Linear(D, WORDS, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(input_ids).transpose(0, 1)
        for layer in self.layers:
            x, _ = layer(x, attention_mask)
        logits = self.output_layer(self.final_layernorm(x)).transpose(0, 1)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


class NanotronBlock(Block):
    """nanotron's: blocks take and give dictionaries."""

    def forward(self, hidden_states: Tensor, sequence_mask: Tensor) -> dict[str, Tensor]:
        x = hidden_states + self.attn(self.norm1(hidden_states))
        return {"hidden_states": x + self.mlp(self.norm2(x)), "sequence_mask": sequence_mask}


class Nanotron(LM):
    def __init__(self) -> None:
        super().__init__(NanotronBlock)

    def forward(self, input_ids: Tensor, input_mask: Tensor) -> Any:
        carried = {"hidden_states": self.embedded(input_ids), "sequence_mask": input_mask}
        for block in self.blocks:
            carried = block(**carried)
        return {"sharded_logits": self.head(self.final(carried["hidden_states"]))}


def dict_stream(output: Any) -> Tensor:
    """Of a block that gives a dictionary."""
    return output["hidden_states"]


_H, _LAYERS = in_list("transformer.h"), in_list("layers")

CASES = {
    "torchtitan Llama": Case(Titan, layers=_LAYERS),
    "lingua": Case(Lingua, lambda: {"token_values": ids(), "target": ids().roll(-1, 1)}, _LAYERS, loss=lambda out: out),
    "litgpt, sequential": Case(Lit, layers=_H),
    "litgpt, parallel residual (GPT-NeoX)": Case(lambda: Lit(True), layers=_H),
    "litgpt, parallel, one norm (Phi)": Case(lambda: Lit(True, True), layers=_H),
    "Megatron-core": Case(Megatron, layers=_LAYERS, tokens_first=True),
    "nanotron": Case(
        Nanotron,
        lambda: {"input_ids": ids(), "input_mask": torch.ones(3, LENGTH, dtype=torch.bool)},
        stream=dict_stream,
        held=dict_stream,
        loss=lambda out: (out["sharded_logits"] * normal(3, LENGTH, WORDS)).sum(),
    ),
}
