"""Granite 4: Granite MoE with a shared feed-forward, most of whose layers have Mamba-2 in place of attention."""

from signalprop.families import bamba, granitemoeshared
from signalprop.families.base import Config, Fields, check_kinds

MIXERS = {
    "linear_attention": "mamba2", "mamba": "mamba2", "full_attention": "attention", "attention": "attention",
}  # fmt: skip


def fields(c: Config) -> Fields:
    listed = c.get("layer_types") or c.get("layers_block_type") or ["mamba"] * c["num_hidden_layers"]
    check_kinds(listed, MIXERS)
    given = granitemoeshared.fields({**c, "layer_types": None})
    kinds = [MIXERS[name] for name in listed]
    if "mamba2" in kinds:
        given["settings"] |= {"mamba2": bamba.scan(c, c["mamba_expand"] * c["hidden_size"])}
    if "attention" not in kinds:
        given["settings"].pop("attention")
    return given | {
        "branches": tuple((kind, *given["branches"][1:]) for kind in kinds),
        "positions": "rotary" if c["position_embedding_type"] == "rope" else "none",
    }


_OWN = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_conv_bias",
        "mamba_proj_bias", "time_step_limit")  # fmt: skip
FAMILY = granitemoeshared.FAMILY.like(
    "granitemoehybrid", fields,
    {
        **{key: bamba.FAMILY.defaults[key] for key in _OWN}, "shared_intermediate_size": 1024,
        "position_embedding_type": None,
    },
    paths=granitemoeshared.FAMILY.with_stack(kinds={**granitemoeshared.KINDS, "mamba2": bamba.SCAN}),
)  # fmt: skip
