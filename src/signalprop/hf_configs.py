"""Hugging Face configurations -> Architecture, by plain keys: a directory is read without importing transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from signalprop.activations import activation
from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.storage import read_json

Config = Mapping[str, Any]

# Defaults of the configuration classes (transformers 5), for keys that an old config.json leaves out.
_BERT: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True, "is_decoder": False,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
_QWEN: dict[str, Any] = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
                                      "num_key_value_heads": 32}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT | {"vocab_size": 50265, "pad_token_id": 1},
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                             "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma": _LLAMA | {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "vit": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
    },
    "t5": {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "n_positions": 512,
    },
    "gpt_neox": {
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True, "rotary_pct": 0.25,
    },
}  # fmt: skip


def read(source: Any, **changes: Any) -> Architecture:
    """The Architecture of a Hugging Face config object, model, config dictionary, directory or config.json.

    `seq_len` is the number of positions that the config allows (of a sliding window, its width: beyond it the
    mask is not plainly causal, which an Architecture cannot say). Scaled rotary frequencies (`rope_type`
    other than `default`) are read as plain ones.

    Args:
        changes: fields of the Architecture to set otherwise.

    Raises:
        InputError: the family is not known, the file is not readable, or a value is missing or out of range.
    """
    config, class_name = _load(source)
    family = config.get("model_type")
    if family not in READERS:
        raise InputError(
            f"the model family {family!r} is not known; known: {', '.join(sorted(READERS))}. "
            "For a model of your own give an Architecture and a Mapping (docs/measuring.md)"
        )
    config = {**DEFAULTS[family], **config}
    try:
        fields = READERS[family](config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"this {family} config cannot be read: {type(error).__name__} {error}") from None
    fields["family"] = family
    fields.update(_head(config, class_name, fields))
    if class_name == "T5EncoderModel":
        for name in ("n_decoder_layers", "target_len"):
            fields.pop(name, None)
        fields["kind"] = "encoder"
    changes = {key: value for key, value in changes.items() if value is not None}
    if "seq_len" in changes and "target_len" in fields and "target_len" not in changes:
        changes["target_len"] = changes["seq_len"]
    if "dropout" in changes:
        fields.pop("attention_dropout", None)
        fields.pop("embedding_dropout", None)
    return Architecture(**{**fields, **changes})


def _load(source: Any) -> tuple[Config, str]:
    """(config dictionary, class name of the model or '')."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise InputError(f"{source} holds no config.json; expected a Hugging Face model directory")
        source = read_json(path)
        if not isinstance(source, dict):
            raise InputError(f"{path} holds no configuration; expected a JSON object with a model_type")
    class_name = ""
    if not isinstance(source, Mapping):
        inner = getattr(source, "config", None)
        if inner is not None:
            class_name, source = type(source).__name__, inner
        if not hasattr(source, "to_dict"):
            raise InputError(
                f"cannot read an architecture from a {type(source).__name__}; expected a Hugging Face model, config, "
                "dictionary, or path of a directory or config.json"
            )
        source = source.to_dict()
    names = source.get("architectures") or []
    return source, class_name or (str(names[0]) if names else "")


def _head(c: Config, class_name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """head, n_classes and head_transform, from the name of the model's class; without one, the family's usual head."""
    family = fields["family"]
    transform = family in ("bert", "roberta")
    tail = class_name.partition("For")[2]
    if class_name.endswith("LMHeadModel") or tail in ("MaskedLM", "CausalLM", "ConditionalGeneration", "PreTraining"):
        return {"head": "lm", "head_transform": transform}
    if tail.endswith("Classification"):
        return {
            "head": "classes",
            "tied_embeddings": False,
            "n_classes": c.get("num_labels") or len(c.get("id2label") or "01"),
        }
    if class_name:
        return {"head": "none", "tied_embeddings": False}
    if family == "vit":
        return {"head": "classes", "n_classes": c.get("num_labels") or len(c.get("id2label") or "01")}
    return {"head": "lm", "head_transform": transform}


def _activation(name: Any) -> str:

    return activation(name).name


def _bert(c: Config) -> dict[str, Any]:
    if c.get("add_cross_attention"):
        raise InputError(
            "cross-attention in a BERT-like decoder is not supported; map the model by hand (docs/measuring.md)"
        )
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(
            f"position_embedding_type {c['position_embedding_type']!r} is not supported; expected 'absolute'"
        )
    offset = (
        c["pad_token_id"] + 1 if c["model_type"] == "roberta" else 0
    )  # RoBERTa's positions start behind the padding id
    return {
        "kind": "decoder" if c["is_decoder"] else "encoder", "n_layers": c["num_hidden_layers"],
        "d_model": c["hidden_size"], "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": _activation(c["hidden_act"]), "norm_placement": "post", "final_norm": False,
        "norm_eps": c["layer_norm_eps"], "positions": "learned", "n_segments": c["type_vocab_size"] or 0,
        "embedding_norm": True, "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"] - offset,
        "dropout": c["hidden_dropout_prob"], "attention_dropout": c["attention_probs_dropout_prob"],
        "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _gpt2(c: Config) -> dict[str, Any]:
    if c.get("add_cross_attention"):
        raise InputError("cross-attention in GPT-2 is not supported; map the model by hand (docs/measuring.md)")
    return {
        "kind": "decoder", "n_layers": c["n_layer"], "d_model": c["n_embd"], "n_heads": c["n_head"],
        "d_ff": c.get("n_inner") or 4 * c["n_embd"], "activation": _activation(c["activation_function"]),
        "norm_placement": "pre", "norm_eps": c["layer_norm_epsilon"], "positions": "learned",
        "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "dropout": c["resid_pdrop"],
        "attention_dropout": c["attn_pdrop"], "embedding_dropout": c["embd_pdrop"],
        "attention_scale": None if c["scale_attn_weights"] else 1.0, "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _llama(c: Config) -> dict[str, Any]:
    family = c["model_type"]
    qkv_bias = True if family == "qwen2" else bool(c["attention_bias"])
    output_bias = family != "qwen2" and bool(c["attention_bias"])
    mlp_bias = family == "llama" and bool(c["mlp_bias"])
    window = c.get("sliding_window") if family == "mistral" or c.get("use_sliding_window") else None
    length = c["max_position_embeddings"]
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": c.get("num_key_value_heads"),
        "d_head": c.get("head_dim"), "d_ff": c["intermediate_size"], "gated": True,
        "activation": _activation(c["hidden_act"]), "norm": "rmsnorm", "norm_placement": "pre", "norm_bias": False,
        "norm_eps": c["rms_norm_eps"], "positions": "rotary", "rotary_base": _rope(c, "rope_theta", 10_000.0),
        "vocab_size": c["vocab_size"], "seq_len": min(length, window) if window else length, "dropout": 0.0,
        "attention_dropout": c["attention_dropout"], "bias": output_bias or mlp_bias, "qkv_bias": qkv_bias,
        "tied_embeddings": c["tie_word_embeddings"], "qk_norm": family == "qwen3",
    }  # fmt: skip


def _gemma(c: Config) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise InputError(
            "Gemma with bidirectional attention is not supported; map the model by hand (docs/measuring.md)"
        )
    # the released configs say "gelu" and mean the tanh approximation
    act = c.get("hidden_activation") or ("gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"])
    return _llama(c) | {"activation": _activation(act), "embedding_scale": c["hidden_size"] ** 0.5}


def _vit(c: Config) -> dict[str, Any]:
    height, width = _pair(c["image_size"])
    rows, columns = _pair(c["patch_size"])
    return {
        "kind": "encoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": _activation(c["hidden_act"]), "norm_placement": "pre", "norm_eps": c["layer_norm_eps"],
        "positions": "learned", "input": "patches", "patch_dim": c["num_channels"] * rows * columns,
        "class_token": True, "seq_len": (height // rows) * (width // columns) + 1,
        "dropout": c["hidden_dropout_prob"], "attention_dropout": c["attention_probs_dropout_prob"],
        "qkv_bias": c["qkv_bias"], "tied_embeddings": False,
    }  # fmt: skip


def _t5(c: Config) -> dict[str, Any]:
    first, _, second = c["feed_forward_proj"].partition("-")
    gated = first == "gated"
    # "gated-gelu" has always meant the tanh approximation
    act = "gelu_new" if c["feed_forward_proj"] == "gated-gelu" else second if gated else first
    return {
        "kind": "encoder-decoder", "n_layers": c["num_layers"],
        "n_decoder_layers": c.get("num_decoder_layers") or c["num_layers"], "d_model": c["d_model"],
        "n_heads": c["num_heads"], "d_head": c["d_kv"], "d_ff": c["d_ff"], "gated": gated,
        "activation": _activation(act), "norm": "rmsnorm", "norm_placement": "pre", "norm_bias": False,
        "norm_eps": c["layer_norm_epsilon"], "positions": "relative", "attention_scale": 1.0,
        "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "target_len": c["n_positions"],
        "dropout": c["dropout_rate"], "bias": False, "tied_embeddings": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def _gpt_neox(c: Config) -> dict[str, Any]:
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": _activation(c["hidden_act"]), "norm_placement": "pre", "norm_eps": c["layer_norm_eps"],
        "parallel": c["use_parallel_residual"], "positions": "rotary",
        "rotary_fraction": _rope(c, "partial_rotary_factor", c["rotary_pct"]),
        "rotary_base": _rope(c, "rope_theta", c.get("rotary_emb_base", 10_000.0)), "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["hidden_dropout"],
        "attention_dropout": c["attention_dropout"], "bias": True, "qkv_bias": c["attention_bias"],
        "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _rope(c: Config, name: str, default: float) -> float:
    """A rotary number: in transformers 5 under `rope_parameters`, before that at the top level."""
    value = (c.get("rope_parameters") or {}).get(name, c.get(name))
    return default if value is None else float(value)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "bert": _bert,
    "roberta": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _gemma,
    "vit": _vit,
    "t5": _t5,
    "gpt_neox": _gpt_neox,
}
