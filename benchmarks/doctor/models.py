"""The models that faults are planted in: small ones trained on bytes in seconds, fresh ones, decoders of one's own."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from signalprop.data.batches import Batch, load_text, mask_tokens, windows, word_ids

VOCABULARY, LENGTH, MASK = 260, 64, 259
MASKED = ("bert", "mpnet")  # trained for masked bytes, others for the next
STEPS = {"gpt2": 600, "bert": 1000, "mpnet": 600}  # whose attention learns late; of others:
_STEPS = 200
_TRAIN, _HELD_BACK = 250_000, 300_000  # bytes of the embedded text
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 192,
          "max_position_embeddings": 2 * LENGTH, "pad_token_id": None, "bos_token_id": 257,
          "eos_token_id": 258}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "router_aux_loss_coef": 0.1}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 96, "n_head": 6, "n_layer": 6, "n_positions": 2 * LENGTH,
         "bos_token_id": 257, "eos_token_id": 258}  # fmt: skip
_GEMMA = _GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
# by name: class of the model, class of its configuration, the configuration
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"num_hidden_layers": 6}),
    "llama, tied": (
        "LlamaForCausalLM", "LlamaConfig", _GROUPED | {"num_hidden_layers": 4, "tie_word_embeddings": True}
    ),
    "llama, 12 layers": (
        "LlamaForCausalLM", "LlamaConfig",
        _SIZES | {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES | {"num_hidden_layers": 4, "pad_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _GROUPED | _EXPERTS),
    "gemma2, low caps": (
        "Gemma2ForCausalLM", "Gemma2Config", _GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED | {"num_hidden_layers": 4, "head_dim": 16}),
    "mistral, window of 4": (
        "MistralForCausalLM", "MistralConfig", _GROUPED | {"num_hidden_layers": 4, "sliding_window": 4}
    ),
    "granite": (
        "GraniteForCausalLM", "GraniteConfig",
        _GROUPED | {"num_hidden_layers": 4, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                    "residual_multiplier": 0.22, "attention_multiplier": 0.0625},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES | {"num_hidden_layers": 4}),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 96, "num_attention_heads": 6, "ffn_dim": 192, "num_hidden_layers": 4,
         "word_embed_proj_dim": 96, "max_position_embeddings": 2 * LENGTH, "dropout": 0.0, "pad_token_id": 256},
    ),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", _SIZES | {"num_hidden_layers": 4, "pad_token_id": 1}),
    "llama, two ahead": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"num_hidden_layers": 4}),
    "llama, the same word": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"num_hidden_layers": 4}),
}  # fmt: skip
ASKED = {"llama, two ahead": 2, "llama, the same word": 0}  # how far ahead the trained-for word is; others: 1
_FRESH_LLAMA = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12,
                "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}  # fmt: skip
_FRESH_GEMMA = _FRESH_LLAMA | {"head_dim": 32, "query_pre_attn_scalar": 32}
_FRESH_T5 = {"vocab_size": 1000, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 4, "num_decoder_layers": 4,
             "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
             "decoder_start_token_id": 0}  # fmt: skip
_FRESH_MOE = _FRESH_LLAMA | {"num_hidden_layers": 6, "intermediate_size": 256, "num_local_experts": 8}
FRESH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _FRESH_LLAMA),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", _FRESH_LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"vocab_size": 1000, "n_embd": 128, "n_head": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _FRESH_GEMMA),
    "t5": ("T5ForConditionalGeneration", "T5Config", _FRESH_T5),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _FRESH_MOE | {"num_experts_per_tok": 2}),
    "mixtral, top-1": ("MixtralForCausalLM", "MixtralConfig", _FRESH_MOE | {"num_experts_per_tok": 1}),
}


def made(entry: tuple[str, str, dict[str, Any]], seed: int = 0) -> Any:
    """A fresh model of transformers."""
    import transformers

    model_class, config_class, sizes = entry
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**sizes)
    config._attn_implementation = "eager"
    return getattr(transformers, model_class)(config).eval()


def fresh(name: str) -> Any:
    """One of FRESH."""
    return made(FRESH[name])


@cache
def _bytes(start: int, end: int) -> Any:
    return np.frombuffer(load_text()[start:end].encode(), np.uint8).astype(np.int64)


@cache
def _kept(name: str, folder: Path | None) -> Any:
    """One of TRAINED, trained; its weights are kept in the folder, if one is given."""
    model = made(TRAINED[name]).train()
    file = None if folder is None else folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
    if file is not None and file.exists():
        load_model(model, file)
        return model.eval()
    rate = 1e-3 if name in MASKED else 3e-3  # post-norm collapses at the larger one
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = STEPS.get(name, _STEPS)
    for step in range(steps):
        batch = windows(_bytes(0, _TRAIN), LENGTH, 8, step)[:, :-1]
        ids = torch.from_numpy(batch)
        if name in MASKED:
            read, asked = mask_tokens(batch, VOCABULARY, step, mask=MASK)
            given = {
                "input_ids": torch.from_numpy(read),
                "labels": torch.from_numpy(asked).masked_fill(torch.from_numpy(asked) < 0, -100),
            }
        else:
            given = {"input_ids": ids, "labels": ids} | ({"output_router_logits": True} if name == "mixtral" else {})
        if name in ASKED:
            far = ASKED[name]
            logits = model(ids).logits[:, : ids.shape[1] - far]
            F.cross_entropy(logits.flatten(0, 1), ids[:, far:].flatten()).backward()
        else:
            model(**given).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (steps - step) / 60)
        optimizer.step()
        optimizer.zero_grad()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, str(file))
    return model.eval()


def trained(name: str, folder: Path | None = None) -> Any:
    """A copy of one of TRAINED."""
    return copy.deepcopy(_kept(name, folder))


def text_of(name: str) -> list[Batch]:
    """Bytes that the trained models have not read: 8 sequences."""
    ids = windows(_bytes(_TRAIN, _HELD_BACK), LENGTH, 8, 0)
    if name in MASKED:
        read, asked = mask_tokens(ids[:, :-1], VOCABULARY, 0, mask=MASK)
        return [Batch(read, asked, source="bytes")]
    return [Batch(ids[:, :-1], ids[:, 1:], source="bytes")]


# --- a decoder of one's own ----------------------------------------------------------------------------------------

_DIAGONAL = {"hidden row": 0, "mask one off": 2, "inverted mask": 0}  # of the mask; 1 is right
_NORMED = {"norm over tokens": (1, 2), "norm over batch": (0,)}  # axes of the second norm


class Attention(nn.Module):
    """Causal self-attention in plain operations; `fault` is one of the words below."""

    def __init__(self, width: int, heads: int, fault: str) -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features)."""
        if self.fault == "over the batch":  # made for (tokens, batch, features)
            x = x.transpose(0, 1)
        n, tokens, width = x.shape
        size = width // self.heads
        query, key, value = (
            each(x).view(n, tokens, self.heads, size).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        factor = {"no scale": 1.0, "times": math.sqrt(size), "by width": width**-0.5, "after": 1.0, "by d": 1 / size}
        scores = (query @ key.transpose(-1, -2)) * factor.get(self.fault, size**-0.5)
        if self.fault not in ("no mask", "padding"):  # in "hidden row" the first token may not see itself
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(_DIAGONAL.get(self.fault, 1))
            if self.fault == "inverted mask":
                hidden = ~hidden
            scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(-2 if self.fault == "wrong axis" else -1)
        if self.fault == "after":
            weights = weights * size**-0.5
        if self.fault == "wrong axis":
            weights = torch.nan_to_num(weights)
        out = self.output((weights @ value).transpose(1, 2).reshape(n, tokens, width))
        return out.transpose(0, 1) if self.fault == "over the batch" else out


class Over(nn.Module):
    """A norm over other axes than the features."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features)."""
        return (x - x.mean(self.axes, keepdim=True)) / (x.var(self.axes, keepdim=True, correction=0) + 1e-5).sqrt()


class Block(nn.Module):
    """A pre-norm block; in a fault of one layer, `here` says whether this is it."""

    def __init__(self, width: int, heads: int, fault: str, here: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fault)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.fault, self.here = fault, here
        if fault in _NORMED:
            self.norm2 = Over(_NORMED[fault])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features)."""
        if self.here and self.fault == "detached":
            x = x.detach()
        if self.fault == "dropout":  # whose argument `training` was forgotten
            x = F.dropout(x, 0.1)
        if self.fault == "post-norm":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.feed_forward(x))
        if self.fault == "norm on the skip":  # post-norm, too, whose first norm is the embeddings'
            x = self.norm1(x)
            x = self.norm2(x + self.attention(x))
            return x + self.feed_forward(x)
        added = self.attention(self.norm1(x))
        if self.fault == "no skip, attention" and self.here:
            x = added
        elif self.fault == "doubled skip" and self.here:
            x = x + (x + added)
        else:
            x = x + added
        added = self.feed_forward(self.norm2(x))
        return added if self.fault == "no skip, feed-forward" and self.here else x + added

    def feed_forward(self, x: Tensor) -> Tensor:
        """The branch."""
        return self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """A GPT in plain PyTorch, with one fault or none ('')."""

    def __init__(self, fault: str = "", layers: int = 12, width: int = 128, heads: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width, padding_idx=0 if fault == "padding" else None)
        self.positions = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, fault, i == 5) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of token ids (batch, tokens)."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(fault: str = "") -> Decoder:
    """A fresh one."""
    torch.manual_seed(0)
    return Decoder(fault).eval()


def masked_words() -> list[Batch]:
    """The same for an encoder: some words are masked, and asked for."""
    ids = words()[0].tokens
    read, asked = mask_tokens(ids, 1000, 0, mask=1)
    return [Batch(read, asked, source="words")]


def words() -> list[Batch]:
    """Two sequences of words for it, each position asked for the next."""
    ids = word_ids(load_text(), 1000)[: 2 * (LENGTH + 1)].reshape(2, -1)
    return [Batch(ids[:, :-1], ids[:, 1:], source="words")]
