"""Language models of one file, as nanoGPT, minGPT, nanochat, modded-nanogpt, litgpt, lingua, torchtitan and others are written."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.code_bases.parts import (
    D, HEADS, LAYERS, LENGTH, WORDS, Attention, BiaslessLayerNorm, Block, Case, FeedForward, Gated, LM, RMSNorm,
    angles, ids, normal, rms, squared_relu,
)  # fmt: skip


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Over all positions."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class NanoGPT(nn.Module):
    """Tied head, norms without biases in a dictionary of modules, (logits, loss), logits of the last position without targets."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(WORDS, D), "wpe": nn.Embedding(64, D), "drop": nn.Dropout(0.0)}
        self.transformer = nn.ModuleDict(
            {**parts, "h": nn.ModuleList(Block(BiaslessLayerNorm, bias=False) for _ in range(LAYERS)), "ln_f": BiaslessLayerNorm()}
        )
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1))

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
        self.ln_1, self.ln_2, self.c_attn, self.c_proj = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(D, 4 * D), "c_proj": nn.Linear(4 * D, D), "act": NewGELU(), "dropout": nn.Dropout(0.0)})
        m: Any = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).split(D, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        t = x.shape[1]
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))  # type: ignore[index]
        return self.c_proj((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))  # type: ignore[no-any-return]


class FunctionBlock(nn.Module):
    """nanochat's: norms are functions, queries and keys are normed after their rotation, relu squared, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(fused=False, bias=False, rotary="halves", qk=True)
        self.mlp = FeedForward(squared_relu, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(rms(x))
        return x + self.mlp(rms(x))  # type: ignore[no-any-return]


class Nanochat(nn.Module):
    """Norm after the embedding, scalars for the stream and for reads of the first stream, logits capped."""

    def __init__(self, lambdas: tuple[float, float] | None) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(WORDS, D), "h": nn.ModuleList(FunctionBlock() for _ in range(LAYERS))})
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
    def __init__(self) -> None:
        super().__init__(ModdedBlock, final=nn.Identity())
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
            x = sum(w[j] * s for j, s in enumerate(all_streams))  # type: ignore[assignment]
        return x


class LlamaBlock(nn.Module):
    """Llama in Meta's names: rotations by pairs, fewer heads of keys; the angles come as arguments where `given`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(fused=False, bias=False, **{"rotary": "pairs", "kv": 2, **options})
        self.feed_forward, self.attention_norm, self.ffn_norm = Gated(), RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, *angles_and_mask: Any) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


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

    def forward(self, token_values: Tensor, target: Tensor | None = None, tok_idx: Tensor | None = None, mask: Any = None, attn_impl: str = "sdpa") -> Tensor:
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None) -> Tensor:
        normed = self.norm_1(x)
        attended = self.post_attention_norm(self.attn(normed))
        if self.parallel:
            return self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + (attended + x)  # type: ignore[no-any-return]
        x = attended + x
        return self.mlp(self.norm_2(x)) + x  # type: ignore[no-any-return]


class Lit(nn.Module):
    def __init__(self, parallel: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(WORDS, D), "h": nn.ModuleList(LitBlock(parallel, shared) for _ in range(LAYERS)), "ln_f": RMSNorm()}
        )

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, input_pos_maxp1: int | None = None) -> Tensor:
        t: Any = self.transformer
        x = t.wte(idx)
        cos, sin = angles(idx.shape[1], D // HEADS)
        for block in t.h:
            x = block(x, cos, sin, None, input_pos)
        return self.lm_head(t.ln_f(x))  # type: ignore[no-any-return]


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
    """Megatron-core's: (tokens, batch, features), maps give (output, bias), the sum is made with the bias; blocks give (x, context)."""

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

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids).transpose(0, 1)
        for layer in self.layers:
            x, _ = layer(x, attention_mask)
        logits = self.output_layer(self.final_layernorm(x)).transpose(0, 1)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


class NanotronBlock(Block):
    """nanotron's: blocks take and give dictionaries."""

    def forward(self, hidden_states: Tensor, sequence_mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = hidden_states + self.attn(self.norm1(hidden_states))
        return {"hidden_states": x + self.mlp(self.norm2(x)), "sequence_mask": sequence_mask}


class Nanotron(LM):
    def __init__(self) -> None:
        super().__init__(NanotronBlock)

    def forward(self, input_ids: Tensor, input_mask: Tensor) -> Any:  # type: ignore[override]
        carried = {"hidden_states": self.embedded(input_ids), "sequence_mask": input_mask}
        for block in self.blocks:
            carried = block(**carried)
        return {"sharded_logits": self.head(self.final(carried["hidden_states"]))}


def in_dictionary(name: str) -> Any:
    """The blocks of `model.transformer`, or of another part by its path."""

    def found(model: nn.Module) -> list[nn.Module]:
        held: Any = model.get_submodule(name)
        return list(held.values() if isinstance(held, nn.ModuleDict) else held)

    return found


def dict_stream(output: Any) -> Tensor:
    """Of a block that gives a dictionary."""
    return output["hidden_states"]  # type: ignore[no-any-return]


_H, _LAYERS = in_dictionary("transformer.h"), in_dictionary("layers")
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
    "U-Net skips with scalars": Case(UNetLM),
    "x0 with scalars": Case(ReadsFirst),
    "DenseFormer": Case(DenseFormer),
    "torchtitan Llama": Case(Titan, layers=_LAYERS),
    "lingua": Case(Lingua, lambda: {"token_values": ids(), "target": ids().roll(-1, 1)}, _LAYERS, loss=lambda out: out),
    "litgpt, sequential": Case(Lit, layers=_H),
    "litgpt, parallel residual (GPT-NeoX)": Case(lambda: Lit(True), layers=_H),
    "litgpt, parallel, one norm (Phi)": Case(lambda: Lit(True, True), layers=_H),
    "Megatron-core": Case(Megatron, layers=_LAYERS, tokens_first=True),
    "nanotron": Case(Nanotron, lambda: {"input_ids": ids(), "input_mask": torch.ones(3, LENGTH, dtype=torch.bool)},
                     stream=dict_stream, held=dict_stream, loss=lambda out: (out["sharded_logits"] * normal(3, LENGTH, WORDS)).sum()),
}  # fmt: skip
