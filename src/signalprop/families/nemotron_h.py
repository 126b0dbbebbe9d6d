"""Nemotron-H: layers of one branch, which is Mamba-2, attention without positions, a feed-forward or experts.

Its scan holds steps at `time_step_min` from below; they are predicted as they are drawn.
"""

from dataclasses import replace
from typing import Any

from signalprop.families import mamba2
from signalprop.families.base import (
    Config,
    Family,
    Fields,
    Initialisation,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    check_kinds,
    refuse,
    separate,
)
from signalprop.families.granitemoehybrid import MIXERS
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES

_KINDS = MIXERS | {"mlp": "feed_forward", "moe": "experts"}
_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


def fields(c: Config) -> Fields:
    listed = c.get("layers_block_type") or c.get("layer_types")
    listed = listed or [_LETTERS.get(letter, letter) for letter in c["hybrid_override_pattern"]]
    check_kinds(listed, _KINDS)
    refuse(c, moe_latent_size="experts that read a map of the stream")
    kinds = [_KINDS[name] for name in listed]
    mamba2.check({**c, "hidden_act": c["mamba_hidden_act"]})
    biased = bool(c["use_bias"])
    settings: Fields = {
        "attention": {},
        "mamba2": {
            "n_heads": c["mamba_num_heads"], "d_head": c["mamba_head_dim"], "n_groups": c["n_groups"],
            "d_state": c["ssm_state_size"], "width": c["conv_kernel"], "conv_bias": bool(c["use_conv_bias"]),
            "bias": biased, "rates": (1.0, float(c["mamba_num_heads"])), "eps": c["layer_norm_epsilon"],
            "steps": tuple(max(c[f"time_step_{end}"], c["time_step_floor"]) for end in ("min", "max")),
        },
        "experts": {
            "n_experts": c.get("num_local_experts") or c["n_routed_experts"], "top_k": c["num_experts_per_tok"],
            "width": c["moe_intermediate_size"], "scores": "sigmoid", "normalised": c["norm_topk_prob"],
            "scale": c["routed_scaling_factor"], "n_groups": c["n_group"], "top_groups": c["topk_group"],
            "shared_width": c["moe_shared_expert_intermediate_size"],
        },
    }  # fmt: skip
    return {
        "kind": "decoder", "n_layers": len(kinds), "d_model": c["hidden_size"], "n_heads": c["num_attention_heads"],
        "n_kv_heads": c["num_key_value_heads"], "d_head": c["head_dim"], "d_ff": c["intermediate_size"],
        "activation": activation_name(c["mlp_hidden_act"]), "branches": tuple((kind,) for kind in kinds),
        "norm": "rmsnorm", "norm_placement": "pre", "norm_bias": False, "norm_eps": c["layer_norm_epsilon"],
        "positions": "none", "vocab_size": c["vocab_size"], "dropout": 0.0, "bias": bool(c["mlp_bias"]),
        "qkv_bias": False, "attention_dropout": c["attention_dropout"], "tied_embeddings": c["tie_word_embeddings"],
        "seq_len": c["max_position_embeddings"],
        "settings": {kind: said for kind, said in settings.items() if kind in kinds},
    }  # fmt: skip


def _drawn(a: Architecture) -> dict[str, float]:
    """Maps from scans onto the stream are uniform, and smaller in deep networks, whatever initializer_range says."""
    inner: Any = a.settings["mamba2"].inner if "mamba2" in a.settings else 1  # type: ignore[attr-defined]
    return dict.fromkeys(ROLES, 0.02) | {"scan_out": (3 * inner * a.n_layers) ** -0.5 / a.init_scale}


_ATTENTION = SublayerPaths(
    norm="norm",
    branch="mixer",
    weights=separate("mixer.", "q_proj k_proj v_proj", "mixer.o_proj"),
    scaling="mixer.scaling",
)
_FEED_FORWARD = replace(
    _ATTENTION,
    weights={"up": "mixer.up_proj", "down": "mixer.down_proj"},
    scaling="",
    activation="mixer.act_fn",
)
_EXPERTS = replace(
    _FEED_FORWARD,
    weights={
        "router": "mixer.gate", "expert_up": "mixer.experts.up_proj", "expert_down": "mixer.experts.down_proj",
        "shared_up": "mixer.shared_experts.up_proj", "shared_down": "mixer.shared_experts.down_proj",
    },
    activation="mixer.experts.act_fn",
)  # fmt: skip
_BY_KIND = {"mamba2": mamba2.MIXER, "feed_forward": _FEED_FORWARD, "experts": _EXPERTS}
FAMILY = Family(
    model_type="nemotron_h",
    defaults={
        "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "attention_dropout": 0.0, "intermediate_size": 21504,
        "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
        "time_step_max": 0.1, "time_step_limit": (0.0, float("inf")), "time_step_floor": 1e-4, "use_conv_bias": True,
        "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
        "hybrid_override_pattern": "ME*-",
    },
    fields=fields,
    paths=(
        ModelPaths(
            stacks=(StackPaths("layers", (_ATTENTION,), final_norm="norm_f", kinds=_BY_KIND),), token="embeddings"
        ),
    ),
    initialisation=Initialisation(_drawn, 0.02),
)  # fmt: skip
