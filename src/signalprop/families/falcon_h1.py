"""Falcon-H1: Mamba-2 and attention beside each other in every layer, and a fixed factor on nearly every map."""

from signalprop.errors import InputError
from signalprop.families import bamba, llama
from signalprop.families.base import BY_HAND, Config, Fields

_SCAN = ("scan_gate", "scan_value", "scan_key", "scan_query", "scan_step")


def fields(c: Config) -> Fields:
    """Factors on what maps read are factors on what they give."""
    read, scanned = c["attention_in_multiplier"], c["ssm_in_multiplier"]
    if (read != 1 and c["attention_bias"]) or (scanned != 1 and c["mamba_proj_bias"]):
        raise InputError(f"factors on what maps with biases read are not supported; {BY_HAND}")
    if bool(c["projectors_bias"]) != bool(c["mamba_proj_bias"]):
        raise InputError(f"a bias on one of Mamba's two projections is not supported; {BY_HAND}")
    if c["mamba_rms_norm"] and c["mamba_norm_before_gate"]:
        raise InputError(f"a norm before Mamba's gate (mamba_norm_before_gate) is not supported; {BY_HAND}")
    gate, down = c["mlp_multipliers"] or (1.0, 1.0)
    given = dict(zip(_SCAN, c["ssm_multipliers"] or (1.0,) * len(_SCAN), strict=True))
    factors = {"query": read, "key": read * c["key_multiplier"], "value": read, "gate": gate, "down": down}
    factors |= {role: scanned * factor for role, factor in given.items()}
    inner = c["mamba_expand"] * c["hidden_size"] if c["mamba_d_ssm"] is None else c["mamba_d_ssm"]
    return llama.fields(c) | {
        "branches": ("mamba2", "attention", "feed_forward"), "parallel": ("attention",), "shared_norm": True,
        "settings": {"mamba2": bamba.scan(c, inner) | {"normed": bool(c["mamba_rms_norm"])}},
        "embedding_scale": c["embedding_multiplier"], "head_scale": c["lm_head_multiplier"],
        "branch_scale": {"mamba2": c["ssm_out_multiplier"], "attention": c["attention_out_multiplier"]},
        "role_scale": {role: factor for role, factor in factors.items() if factor != 1},
    }  # fmt: skip


_ONES = dict.fromkeys((
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
), 1.0)  # fmt: skip
FAMILY = bamba.FAMILY.like(
    "falcon_h1", fields,
    {
        **_ONES, "max_position_embeddings": 8192, "mlp_multipliers": None, "ssm_multipliers": None, "mamba_d_ssm": 1024,
        "mamba_rms_norm": False, "mamba_norm_before_gate": True, "projectors_bias": False,
    },
    paths=bamba.FAMILY.with_stack(sublayers=(bamba.SCAN, llama.ATTENTION, bamba.FEED_FORWARD), kinds={}),
)  # fmt: skip
