"""Defaults of transformers' configuration classes, by model_type: what an old config.json leaves out."""

from __future__ import annotations

from typing import Any

# As of transformers 5.23.
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
_VIT: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
}  # fmt: skip
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
    "gemma3_text": _LLAMA | {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "mpnet": {
        "vocab_size": 30527, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    "vit": _VIT,
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
    "opt": {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "activation_function": "relu", "max_position_embeddings": 2048, "do_layer_norm_before": True, "dropout": 0.1,
        "attention_dropout": 0.0, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True, "_remove_final_layer_norm": False,
    },
    "olmo2": _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "phi": {
        "vocab_size": 51200, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "intermediate_size": 8192, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "qk_layernorm": False,
    },
    "falcon": {
        "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias": False, "alibi": False, "multi_query": True, "parallel_attn": True,
        "new_decoder_architecture": False, "tie_word_embeddings": True,
    },
    "deit": _VIT,
    "bart": {
        "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
        "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096, "activation_function": "gelu", "max_position_embeddings": 1024, "dropout": 0.1,
        "attention_dropout": 0.0, "scale_embedding": False, "tie_word_embeddings": True,
    },
    "whisper": {
        "vocab_size": 51865, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
        "activation_function": "gelu", "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80,
        "dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True,
    },
    "speech_to_text": {
        "vocab_size": 10000, "d_model": 256, "encoder_layers": 12, "decoder_layers": 6, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
        "activation_function": "relu", "max_source_positions": 6000, "max_target_positions": 1024,
        "conv_kernel_sizes": [5, 5], "conv_channels": 1024, "input_feat_per_channel": 80, "input_channels": 1,
        "dropout": 0.1, "attention_dropout": 0.0, "scale_embedding": True, "tie_word_embeddings": True,
    },
}  # fmt: skip
