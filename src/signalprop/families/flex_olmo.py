"""FlexOlmo: OLMo 2, with experts in every layer."""

from dataclasses import replace

from signalprop.families import _experts, olmo2, olmoe

_NORM = "post_feedforward_layernorm"
FAMILY = olmo2.FAMILY.like(
    "flex_olmo", lambda c: olmoe.fields({**c, "clip_qkv": None}) | {"norm_placement": "res-post"},
    {
        "vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "num_experts": 7,
        "num_experts_per_tok": 5, "norm_topk_prob": False, "rope_theta": 5e5,
    },
    paths=_experts.paths(replace(_experts.branch(), branch=_NORM, norm=_NORM, reads="mlp"), olmo2.ATTENTION),
)  # fmt: skip
