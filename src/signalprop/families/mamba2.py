"""Mamba-2: layers of one branch, a selective scan between a short convolution and a gated norm."""

import math
from typing import Any

from signalprop.errors import InputError
from signalprop.families.base import (
    BY_HAND,
    Config,
    Family,
    Fields,
    Initialisation,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
)
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES

_USUAL = 0.1


def check(c: Config) -> None:
    """Refuse a scan with another activation, or with limits on its steps.

    Raises:
        InputError: it has.
    """
    limits = [x["__float__"] if isinstance(x, dict) else x for x in c["time_step_limit"]]  # as transformers saves them
    if activation_name(c["hidden_act"]) != "silu" or [*map(float, limits)] != [0.0, math.inf]:
        raise InputError(f"an activation other than silu, and a time_step_limit, are not supported; {BY_HAND}")


def fields(c: Config) -> Fields:
    check(c)
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"], "n_heads": c["num_heads"],
        "d_head": c["head_dim"], "branches": ("mamba2",), "norm": "rmsnorm", "norm_placement": "pre",
        "norm_bias": False, "norm_eps": c["layer_norm_epsilon"], "positions": "none", "vocab_size": c["vocab_size"],
        "dropout": 0.0, "bias": bool(c["use_bias"]), "tied_embeddings": c["tie_word_embeddings"], "seq_len": 512,
        "settings": {"mamba2": {
            "n_heads": c["num_heads"], "d_head": c["head_dim"], "n_groups": c["n_groups"], "d_state": c["state_size"],
            "width": c["conv_kernel"], "conv_bias": bool(c["use_conv_bias"]), "bias": bool(c["use_bias"]),
            "rates": (1.0, float(c["num_heads"])), "eps": c["layer_norm_epsilon"],
            "steps": tuple(max(c[f"time_step_{end}"], c["time_step_floor"]) for end in ("min", "max")),
        }},
    }  # fmt: skip


def _drawn(a: Architecture) -> dict[str, float]:
    """Filters and maps onto the stream are uniform within 1/sqrt(fan_in), whatever initializer_range says."""
    s: Any = a.settings["mamba2"]
    own = {"scan_filter": (3 * s.width) ** -0.5, "scan_out": (3 * s.inner) ** -0.5}
    return dict.fromkeys(ROLES, _USUAL) | {role: std / a.init_scale for role, std in own.items()}


MIXER = SublayerPaths(
    norm="norm",
    branch="mixer",
    weights={"scan_filter": "mixer.conv1d", "scan_out": "mixer.out_proj"},
    blocks={"mixer.in_proj": ("scan_gate", "scan_value", "scan_key", "scan_query", "scan_step")},
)
FAMILY = Family(
    model_type="mamba2",
    defaults={
        "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096, "state_size": 128,
        "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8, "use_bias": False,
        "use_conv_bias": True, "hidden_act": "silu", "time_step_min": 0.001, "time_step_max": 0.1,
        "time_step_floor": 1e-4, "time_step_limit": (0.0, float("inf")), "tie_word_embeddings": False,
    },
    fields=fields,
    paths=(ModelPaths(stacks=(StackPaths("layers", (MIXER,), final_norm="norm_f"),), token="embeddings"),),
    initialisation=Initialisation(_drawn, _USUAL, usual=_USUAL),
)  # fmt: skip
