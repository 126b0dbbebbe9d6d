"""Known architectures by name. Shapes are facts from the models' published configurations."""

from __future__ import annotations

from typing import Any

from signalprop.architecture import Architecture
from signalprop.errors import InputError

_BERT: dict[str, Any] = {
    "family": "bert",
    "kind": "encoder",
    "n_layers": 12,
    "d_model": 768,
    "activation": "gelu",
    "norm_placement": "post",
    "positions": "learned",
    "n_segments": 2,
    "embedding_norm": True,
    "vocab_size": 30522,
    "seq_len": 512,
    "dropout": 0.1,
    "norm_eps": 1e-12,
    "head_transform": True,
    "final_norm": False,
}
_GPT2: dict[str, Any] = {
    "family": "gpt2",
    "kind": "decoder",
    "n_layers": 12,
    "d_model": 768,
    "activation": "gelu_tanh",
    "norm_placement": "pre",
    "positions": "learned",
    "vocab_size": 50257,
    "seq_len": 1024,
    "dropout": 0.1,
}
_LLAMA: dict[str, Any] = {
    "family": "llama",
    "kind": "decoder",
    "n_layers": 32,
    "d_model": 4096,
    "n_heads": 32,
    "d_ff": 11008,
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "positions": "rotary",
    "vocab_size": 32000,
    "seq_len": 2048,
    "bias": False,
    "norm_bias": False,
    "tied_embeddings": False,
    "norm_eps": 1e-6,
}
_VIT: dict[str, Any] = {
    "family": "vit",
    "kind": "encoder",
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "activation": "gelu",
    "norm_placement": "pre",
    "positions": "learned",
    "input": "patches",
    "patch_dim": 768,
    "class_token": True,
    "seq_len": 197,
    "head": "classes",
    "tied_embeddings": False,
    "norm_eps": 1e-12,
}
_T5: dict[str, Any] = {
    "family": "t5",
    "kind": "encoder-decoder",
    "n_layers": 6,
    "d_model": 512,
    "n_heads": 8,
    "d_head": 64,
    "d_ff": 2048,
    "activation": "relu",
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "positions": "relative",
    "attention_scale": 1.0,
    "vocab_size": 32128,
    "seq_len": 512,
    "target_len": 512,
    "dropout": 0.1,
    "bias": False,
    "norm_bias": False,
    "norm_eps": 1e-6,
}

PRESETS: dict[str, dict[str, Any]] = {
    # The papers' own encoder: three embedding tables, ReLU, no norm on the embeddings (TGS sections 2 and 3).
    "tgs": {
        "kind": "encoder",
        "n_layers": 192,
        "d_model": 256,
        "n_heads": 4,
        "activation": "relu",
        "norm_placement": "pre",
        "positions": "learned",
        "n_segments": 2,
        "vocab_size": 32000,
        "seq_len": 512,
        "dropout": 0.1,
    },
    "bert-base": _BERT,
    "bert-large": _BERT | {"n_layers": 24, "d_model": 1024},
    "roberta-base": _BERT | {"family": "roberta", "vocab_size": 50265, "n_segments": 1, "norm_eps": 1e-5},
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2 | {"n_layers": 24, "d_model": 1024},
    "gpt2-large": _GPT2 | {"n_layers": 36, "d_model": 1280},
    "gpt2-xl": _GPT2 | {"n_layers": 48, "d_model": 1600, "n_heads": 25},
    "llama-7b": _LLAMA,
    "llama-130m": _LLAMA | {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 2048, "seq_len": 256},
    "llama-1b": _LLAMA | {"n_layers": 24, "d_model": 2048, "n_heads": 32, "d_ff": 5461, "seq_len": 256},
    "llama3-8b": _LLAMA
    | {
        "n_kv_heads": 8,
        "d_ff": 14336,
        "vocab_size": 128256,
        "rotary_base": 500_000.0,
        "seq_len": 8192,
        "norm_eps": 1e-5,
    },
    "mistral-7b": _LLAMA | {"family": "mistral", "n_kv_heads": 8, "d_ff": 14336, "norm_eps": 1e-5},
    "qwen2-0.5b": _LLAMA
    | {
        "family": "qwen2",
        "n_layers": 24,
        "d_model": 896,
        "n_heads": 14,
        "n_kv_heads": 2,
        "d_ff": 4864,
        "vocab_size": 151936,
        "rotary_base": 1_000_000.0,
        "qkv_bias": True,
        "tied_embeddings": True,
    },
    "gpt-neox": {
        "family": "gpt_neox",
        "kind": "decoder",
        "n_layers": 44,
        "d_model": 6144,
        "n_heads": 64,
        "d_ff": 24576,
        "activation": "gelu",
        "norm_placement": "pre",
        "parallel": True,
        "positions": "rotary",
        "rotary_fraction": 0.25,
        "vocab_size": 50432,
        "seq_len": 2048,
        "tied_embeddings": False,
    },
    "vit-base": _VIT,
    "vit-small": _VIT | {"d_model": 384, "n_heads": 6},
    "t5-small": _T5,
    "t5-base": _T5 | {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072},
}


def preset(name: str, **changes: Any) -> Architecture:
    """The architecture of a known name, with some fields changed (see `Architecture.preset`)."""
    if name not in tuple(PRESETS):  # a tuple, so that an unhashable name is merely unknown
        raise InputError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    return Architecture(**PRESETS[name]).replace(**given)
