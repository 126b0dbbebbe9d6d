"""A small configuration of any config type of the installed transformers.

A configuration is made small by the names of its fields (`SIZES`, `TOKENS`, `_value`), nested configurations likewise.
What these rules miss stands in `OWN`, by config type.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

WIDTH, HEADS, HEAD, LAYERS, VOCABULARY, LENGTH, BATCH = 64, 4, 16, 2, 99, 12, 2

# The size of a field by its name, where the default is a number: the first pattern that fits the whole name.
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|.*_vocab_size|bottleneck_vocab|text_vocab|vocab_size_per_layer_input|n_words", VOCABULARY),
    (r"type_vocab_size|.*_type_vocab_sizes?", 2),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank|o_lora_rank|.*low_rank.*|.*_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|swa_rotary_dim", 8),
    (r"d_kv|head_dim|.*_head_dim|attention_head_size|kv_channels|d_head|mamba_d_head|mamba_headdim|head_size", HEAD),
    (r"hidden_size_per_layer_input|num_mem_blocks", 16),
    (r"num_groups", 4),
    (
        r"hidden_size|hidden_dim|d_model|n_embd|emb_dim|embed_dim|embedding_dim|embedding_size|dim|d_embed|.*_hidden_size|.*_hidden_dim"
        r"|.*_embed_dim|.*d_model|model_dim|projection_dim|out_hidden_size|.*_width|width|word_embed_proj_dim|.*embed_size"
        r"|projection_size|.*_proj_dim|lru_width|decoder_dim|encoder_dim|output_dim|text_dim|decoder_embed_dim|embed_dimension",
        WIDTH,
    ),
    (r".*expert.*intermediate_size|moe_intermediate_size|.*expert_ffn_hidden_size", 32),
    (
        r".*intermediate_size|.*ffn_dim|n_inner|d_ff|.*mlp_dim|ffn_hidden_size|.*feedforward_dim|.*ffn_hidden_size|ffn_size|.*_inner_dim"
        r"|dim_feedforward|d_inner|intermediate_dim|dense_intermediate_dim|.*intermediate_dim|inner_dim|.*mlp_hidden_dim",
        2 * WIDTH,
    ),
    (r"mamba_n_heads|mamba_num_heads", 2 * WIDTH // HEAD),
    (r"num_key_value_heads|num_kv_heads|.*_key_value_heads|n_kv_heads|.*_kv_heads|multi_query_group_num", 2),
    (r"num_attention_heads|n_heads?|num_heads|.*_attention_heads|.*num_heads|nhead|.*_n_heads?", HEADS),
    (
        r"num_hidden_layers|n_layers?|num_layers|.*_layers|.*num_hidden_layers|depth|encoder_depth|num_blocks|.*_depth",
        LAYERS,
    ),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_experts|n_experts|n_routed_experts", 4),
    (r".*per_tok|.*per_token|moe_topk?|moe_top_k|top_k_experts|num_selected_experts|moe_k|topk_experts", 2),
    (r"n_group|topk_group|n_groups|num_expert_groups?", 1),
    (
        r"max_position_embeddings|n_positions|max_sequence_length|max_seq_len|.*max_position_embeddings|max_source_positions"
        r"|max_target_positions|.*_max_position.*|max_length|seq_length|max_2d_position_embeddings|max_seq_length|n_ctx|block_size"
        r"|context_size",
        64,
    ),
    (r"image_size|.*image_size|img_size", 32),
    (r"spatial_patch_size|patch_size|.*_patch_size", 8),
    (r"num_mel_bins|.*_mel_bins|n_mels", 16),
    (r"sliding_window|.*sliding_window|attention_window|local_attention|window_size|attention_chunk_size", 8),
    (r"chunk_size|mamba_chunk_size|.*_chunk_size", 8),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_d_ssm", 16),
    (r"linear_num_key_heads|linear_num_value_heads|num_v_heads|num_k_heads", 4),
    (r"num_frames", 2),
    (r"num_queries|num_latents|.*_num_queries|n_queries|resampler_n_latents|num_query_tokens|d_latents", 8),
)
# Fields that a pattern above would catch, and that are no size of that sort.
KEPT = re.compile(
    r"num_nextn_predict_layers|num_conv_.*|first_k_dense_replace|max_window_layers|.*_every_n_layers|.*num_feature_levels"
    r"|num_feature_layers|.*num_adapter_layers|num_feat_extract_layers|num_residual_layers|num_codebook_layers|use_.*"
    r"|num_kv_shared_layers|.*position_embeddings_type|num_lstm_layers|hidden_expansion|.*conv.*_layers|pooler_num_.*"
)
_MISSING = object()
_APART = "qk_rope_head_dim"
TOKENS = re.compile(r".*(token_id|token_index|_tok_id|_token_ids)$|.*_token_idx$|.*(begin|end)_id$")


def config_types() -> list[str]:
    """Every config type that the installed transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def small_config(config_type: str) -> Any:
    """The configuration of a type with every size made small."""
    from transformers import CONFIG_MAPPING

    return _small(CONFIG_MAPPING[config_type], {})


def _small(cls: Any, given: dict[str, Any]) -> Any:
    """A small configuration of a class; `given` are values of the parent's default."""
    try:
        default = cls(**given)
    except Exception:
        default = cls()
    values = _fields(cls, default)
    new = {name: _value(name, value, values) for name, value in values.items()}
    for name, sub in dict(getattr(cls, "sub_configs", {}) or {}).items():
        held = values.get(name)
        if held is None:
            continue
        kind = type(held) if hasattr(held, "to_dict") else _class_of(sub, held)
        if kind is not None:
            new[name] = _small(kind, _fields(kind, held) if hasattr(held, "to_dict") else {}).to_dict()
    new.update(_layerwise(new, values))
    if "rope_parameters" in values and _mentions(cls, "mrope_section"):
        held = new.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
        if "mrope_section" not in held:
            new["rope_parameters"] = _rope({**held, "mrope_section": [0, 0, 0]}, _rotated(values))
    new.update(OWN.get(default.model_type, {}))
    new = {name: value for name, value in new.items() if name in values and value is not values[name]}
    unsaid = {**given, **new}
    config = cls(**unsaid)
    config._attn_implementation = "eager"
    return config


def _mentions(cls: Any, word: str) -> bool:
    """Whether the modelling code beside a configuration names something."""
    try:
        return word in inspect.getsource(importlib.import_module(cls.__module__.replace("configuration_", "modeling_")))
    except (ImportError, OSError):
        return False


def _class_of(sub: Any, held: Any) -> Any:
    from transformers import CONFIG_MAPPING

    kind = held.get("model_type") if isinstance(held, dict) else None
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    return sub if inspect.isclass(sub) and sub.__name__ != "AutoConfig" else None


def _fields(cls: Any, held: Any) -> dict[str, Any]:
    """The constructor's own fields of a configuration, with their values."""
    from transformers import PretrainedConfig

    common = {"is_encoder_decoder", *vars(PretrainedConfig())}
    names = (f.name for f in dataclasses.fields(cls) if f.init) if dataclasses.is_dataclass(cls) else vars(held)
    return {
        name: _held(held, name) for name in names if name not in common and _held(held, name, _MISSING) is not _MISSING
    }


def _held(config: Any, name: str, default: Any = None) -> Any:
    """A field; where it differs from layer to layer, what was asked for all of them."""
    try:
        return getattr(config, name, default)
    except Exception:
        return vars(config).get(name, default)


def _value(name: str, value: Any, values: dict[str, Any]) -> Any:
    """The small value of a field."""
    if name == "use_cache":
        return False
    if isinstance(value, bool) or value is None or isinstance(value, str) or KEPT.fullmatch(name):
        return value
    if TOKENS.fullmatch(name) and isinstance(value, (int, list)):
        return _token(name, values)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, _rotated(values))
    if "dropout" in name or "drop_path" in name or name.endswith(("_pdrop", "layerdrop")):
        return 0.0 if isinstance(value, float) else value
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    if size is None:
        return value
    if isinstance(value, int):
        return min(size, value) if value > 0 else value
    if isinstance(value, (list, tuple)) and ("image_size" in name or "patch_size" in name):
        return type(value)(min(size, v) for v in value)
    return value


def _token(name: str, values: dict[str, Any]) -> Any:
    """A number of its own for every special token: padding 0, begin 1, end 2, the others from the vocabulary's end."""
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name in first:
        return first[name]
    others = sorted(n for n in values if TOKENS.fullmatch(n) and n not in first)
    return VOCABULARY - 1 - others.index(name)


def _rotated(values: dict[str, Any]) -> int:
    """How many features of a small head are rotated, where these stand apart, or the head's width."""
    return next(size for pattern, size in SIZES if _APART in pattern) if _APART in values else HEAD


def _rope(value: dict[str, Any], head: int) -> dict[str, Any]:
    """Rotation settings for small heads."""
    new = {}
    for key, held in value.items():
        if isinstance(held, dict):
            new[key] = _rope(held, head)
        elif key == "mrope_section":
            half = int(head * value.get("partial_rotary_factor", 1.0)) // 2
            new[key] = [half - 2 * (half // 3), *[half // 3] * (len(held) - 1)]
        elif key in ("long_factor", "short_factor"):
            new[key] = [1.0] * (head // 2)
        else:
            new[key] = held
    return new


def _layerwise(new: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry per layer: one layer of each kind, and two at least; lists with an entry per stage."""
    changed: dict[str, Any] = {}
    counts = [
        name for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if isinstance(values.get(name), int)
    ]
    if counts:
        whole = values[counts[0]]
        lists = [
            name
            for name, value in values.items()
            if isinstance(value, (list, tuple)) and len(value) == whole and name not in ("hidden_sizes", "depths")
        ]
        if lists:
            kinds = list(zip(*(map(str, values[name]) for name in lists), strict=True))
            first = sorted({kind: kinds.index(kind) for kind in reversed(kinds)}.values())
            kept = (first if len(first) > 1 else [0, 1] if whole > 1 else [0])[:4]
            changed.update({name: type(values[name])(values[name][i] for i in kept) for name in lists})
            changed[counts[0]] = len(kept)
    for name in ("depths", "num_attention_heads", "num_heads", "hidden_sizes"):
        value = values.get(name)
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            small = (max(8, 8 * v // max(1, min(value))) if name == "hidden_sizes" else min(2, v) for v in value)
            changed[name] = type(value)(small)
    if isinstance(values.get("depths"), (list, tuple)) and isinstance(values.get("embed_dim"), int):
        changed["embed_dim"] = 16
    if "num_key_value_heads" in values and values["num_key_value_heads"] == values.get("num_attention_heads"):
        changed["num_key_value_heads"] = HEADS
    return changed


# What the rules miss, by config type.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "hunyuan_vl_text": {"head_dim": HEAD},
    "ministral": {"head_dim": HEAD},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "swin": {"window_size": 2, "depths": [1, 1], "num_heads": [2, 2]},
    "swinv2": {"window_size": 2, "depths": [1, 1], "num_heads": [2, 2]},
    "donut-swin": {"window_size": 2, "depths": [1, 1], "num_heads": [2, 2]},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 2},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "has_spatial_attention_bias": False},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": 2},
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen2_5_omni_vision_encoder": {"window_size": 32},
    "exaone4_5_vision": {"window_size": 32},
    "dots1": {"num_key_value_heads": 2, "n_routed_experts": 4},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "wavtokenizer": {"codebook_dim": WIDTH},
    "wavtokenizer_encoder": {"codebook_dim": WIDTH},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
}
