"""One reader per family: Hugging Face's configuration keys -> fields of an Architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from signalprop.errors import InputError
from signalprop.network.activations import activation

Config = Mapping[str, Any]

_DISENTANGLED = (
    "its disentangled attention adds products of content and relative position to the scores, which neither an "
    "Architecture nor a Parametrization can say"
)
REFUSED = {
    "deberta": _DISENTANGLED,
    "deberta-v2": _DISENTANGLED,
    "gemma3": "it reads images beside text; take its language model (`.model.language_model`), of family 'gemma3_text'",
}


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


def _gemma3(c: Config) -> dict[str, Any]:
    """Gemma 3's language model. Its layers alternate between a sliding window and all tokens, each kind with a rotary
    base of its own: an Architecture has the base of the commoner kind and, as `seq_len`, the width of the window."""
    if c.get("use_bidirectional_attention"):
        raise InputError(
            "Gemma 3 with bidirectional attention is not supported; map the model by hand (docs/measuring.md)"
        )
    if c.get("final_logit_softcapping"):
        raise InputError("Gemma 3 with final_logit_softcapping bounds its logits, which an Architecture cannot say")
    every = c["sliding_window_pattern"]
    plain = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(c["num_hidden_layers"])]
    kinds = c.get("layer_types") or plain
    local = kinds.count("sliding_attention")
    if 2 * local >= len(kinds):
        base = _rope_of(c, "sliding_attention", "rope_local_base_freq", 10_000.0)
    else:
        base = _rope_of(c, "full_attention", "rope_theta", 1_000_000.0)
    return _llama(c) | {
        "activation": _activation(c["hidden_activation"]), "norm_placement": "sandwich", "qk_norm": True,
        "embedding_scale": c["hidden_size"] ** 0.5, "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
        "rotary_base": base,
        "seq_len": min(c["max_position_embeddings"], c["sliding_window"]) if local else c["max_position_embeddings"],
    }  # fmt: skip


def _mpnet(c: Config) -> dict[str, Any]:
    """BERT without segments, with a bias by distance on its scores (one table for all layers), for which an
    Architecture has no place beside learned positions."""
    # positions start behind the padding id, which is 1 whatever the config says
    return _bert({**c, "is_decoder": False, "type_vocab_size": 0}) | {"seq_len": c["max_position_embeddings"] - 2}


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


def _opt(c: Config) -> dict[str, Any]:
    if c.get("word_embed_proj_dim") not in (None, c["hidden_size"]):
        raise InputError(
            f"OPT with word_embed_proj_dim {c['word_embed_proj_dim']} beside hidden_size {c['hidden_size']} maps its "
            "embeddings to another width, which an Architecture cannot say; map the model by hand (docs/measuring.md)"
        )
    before = bool(c["do_layer_norm_before"])
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["ffn_dim"],
        "activation": _activation(c["activation_function"]), "norm_placement": "pre" if before else "post",
        "final_norm": None if before and not c["_remove_final_layer_norm"] else False, "norm_eps": 1e-5,
        "norm_bias": c["layer_norm_elementwise_affine"], "positions": "learned", "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["dropout"], "attention_dropout": c["attention_dropout"],
        "embedding_dropout": 0.0, "bias": c["enable_bias"], "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _olmo2(c: Config) -> dict[str, Any]:
    return _llama(c) | {"norm_placement": "res-post", "qk_norm": "whole"}


def _phi(c: Config) -> dict[str, Any]:
    if c["qk_layernorm"]:
        raise InputError(
            "Phi with qk_layernorm (a LayerNorm on queries and keys) is not supported; QK-norm is RMS here"
        )
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": c.get("num_key_value_heads"),
        "d_ff": c["intermediate_size"], "activation": _activation(c["hidden_act"]), "norm_placement": "pre",
        "norm_eps": c["layer_norm_eps"], "parallel": True, "shared_norm": True, "positions": "rotary",
        "rotary_fraction": _rope(c, "partial_rotary_factor", 0.5), "rotary_base": _rope(c, "rope_theta", 10_000.0),
        "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"], "dropout": c["resid_pdrop"],
        "attention_dropout": c["attention_dropout"], "embedding_dropout": c["embd_pdrop"], "bias": True,
        "tied_embeddings": c["tie_word_embeddings"], "head_bias": True,
    }  # fmt: skip


def _falcon(c: Config) -> dict[str, Any]:
    if c["alibi"]:
        raise InputError(
            "Falcon with alibi (a bias on scores that grows with distance) is not supported; only rotary is"
        )
    new = bool(c["new_decoder_architecture"])
    parallel = new or bool(c["parallel_attn"])
    if not parallel and (c["hidden_dropout"] or c["attention_dropout"]):
        raise InputError(
            "Falcon without parallel_attn drops out its attention branch by the attention_dropout of a config that all "
            "layers share; this is not supported: set hidden_dropout and attention_dropout to 0"
        )
    n_kv_heads = (c.get("num_kv_heads") or c["num_attention_heads"]) if new or not c["multi_query"] else 1
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": n_kv_heads,
        "d_ff": c.get("ffn_hidden_size") or 4 * c["hidden_size"], "activation": _activation(c["activation"]),
        "norm_placement": "pre", "norm_eps": c["layer_norm_epsilon"], "parallel": parallel,
        "shared_norm": parallel and (c.get("num_ln_in_parallel_attn") or 1 + new) == 1, "positions": "rotary",
        "rotary_base": _rope(c, "rope_theta", 10_000.0), "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["hidden_dropout"],
        # read, but never applied beside rotary positions; nor is there a dropout on embeddings
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "bias": c["bias"],
        "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _deit(c: Config) -> dict[str, Any]:
    fields = _vit(c)
    return fields | {"distillation_token": True, "seq_len": fields["seq_len"] + 1}


def _encoder_decoder(c: Config) -> dict[str, Any]:
    """What BART, Whisper and Speech2Text have in common (fairseq's layout)."""
    for name in ("attention_heads", "ffn_dim"):
        if c[f"encoder_{name}"] != c[f"decoder_{name}"]:
            raise InputError(
                f"encoder_{name} is {c[f'encoder_{name}']} and decoder_{name} {c[f'decoder_{name}']}; an Architecture "
                "has one number for both stacks; map the model by hand (docs/measuring.md)"
            )
    return {
        "kind": "encoder-decoder", "n_layers": c["encoder_layers"], "n_decoder_layers": c["decoder_layers"],
        "d_model": c["d_model"], "n_heads": c["encoder_attention_heads"], "d_ff": c["encoder_ffn_dim"],
        "activation": _activation(c["activation_function"]), "norm_placement": "pre", "norm_eps": 1e-5,
        "vocab_size": c["vocab_size"], "dropout": c["dropout"], "attention_dropout": c["attention_dropout"],
        "bias": True, "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def _bart(c: Config) -> dict[str, Any]:
    if c["scale_embedding"]:
        raise InputError(
            "BART with scale_embedding multiplies tokens and not positions, which an Architecture cannot say; map the "
            "model by hand (docs/measuring.md)"
        )
    return _encoder_decoder(c) | {
        "norm_placement": "post", "final_norm": False, "positions": "learned", "embedding_norm": True,
        "seq_len": c["max_position_embeddings"], "target_len": c["max_position_embeddings"],
    }  # fmt: skip


def _whisper(c: Config) -> dict[str, Any]:
    return _encoder_decoder(c) | {  # scale_embedding is read by transformers and then not used
        "positions": "sinusoidal", "decoder_positions": "learned", "input": "frames", "frame_dim": c["num_mel_bins"],
        "conv_kernels": (3, 3), "conv_strides": (1, 2), "conv_activation": "gelu",
        "seq_len": c["max_source_positions"], "target_len": c["max_target_positions"],
    }  # fmt: skip


def _speech_to_text(c: Config) -> dict[str, Any]:
    kernels = tuple(c["conv_kernel_sizes"])
    return _encoder_decoder(c) | {
        "positions": "sinusoidal", "input": "frames",
        "frame_dim": c["input_feat_per_channel"] * c["input_channels"],
        "conv_kernels": kernels, "conv_strides": (2,) * len(kernels), "conv_channels": c["conv_channels"] // 2,
        "conv_activation": "glu", "embedding_scale": c["d_model"] ** 0.5 if c["scale_embedding"] else 1.0,
        "seq_len": -(-c["max_source_positions"] // 2 ** len(kernels)), "target_len": c["max_target_positions"],
    }  # fmt: skip


def _rope(c: Config, name: str, default: float) -> float:
    """A rotary number: in transformers 5 under `rope_parameters`, before that at the top level."""
    value = (c.get("rope_parameters") or {}).get(name, c.get(name))
    return default if value is None else float(value)


def _rope_of(c: Config, kind: str, before: str, default: float) -> float:
    """The rotary base of one kind of layers: in transformers 5 under its name, before that at the top level."""
    value = ((c.get("rope_parameters") or {}).get(kind) or {}).get("rope_theta", c.get(before))
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
    "gemma3_text": _gemma3,
    "mpnet": _mpnet,
    "vit": _vit,
    "t5": _t5,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "olmo2": _olmo2,
    "phi": _phi,
    "falcon": _falcon,
    "deit": _deit,
    "bart": _bart,
    "whisper": _whisper,
    "speech_to_text": _speech_to_text,
}
