"""What a family's file says that is not found in the model itself: its paths are held to what is proved there."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from benchmarks.small_configs import small_config
from benchmarks.small_models import model_classes, small_model

import signalprop as sp
from measurement.conftest import MODELS, moved
from signalprop.attachment.families import mapping_of
from signalprop.attachment.found_roles import mapping_with_roles
from signalprop.attachment.mapping import SublayerMap
from signalprop.families import find, names

# What the anatomy does not prove, with what it says then: only here are a family's paths all that is known.
_LATENT, _RECURRENT = "kv_a_proj_with_mqa", "in_proj"
_BEGINNING, _ATTENTION = "embedding: the stream does not begin with a sum of tables", "attention: the roles of q_proj"
UNPROVED = {
    # keys and values that come through a narrow map
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("minicpm3", "sarvam_mla"), _LATENT),
    # recurrences
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"), _RECURRENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _RECURRENT),
    # streams that begin with convolutions
    **dict.fromkeys(("whisper", "speech_to_text"), _BEGINNING),
    # norms after the rotation
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _ATTENTION),
    # norms on values; scores through tanh (of `moved`, not of `small`)
    **dict.fromkeys(("gemma4_text", "gemma4", "gemma4-shared", "gemma2"), _ATTENTION),
    # a sink in the softmax
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa"), _ATTENTION),
    "deepseek_v4": "no residual stream was found",  # it has several
    "modernbert": "the norms of its branches stand at different places",
}
PLACES = [f.name for f in fields(SublayerMap) if f.name in ("norm", "post_norm", "query_norm", "key_norm", "skip")]


def small(family: str) -> Any:
    """A small model of a family that has no row in MODELS."""
    config, known = small_config(family), find(family)
    assert known is not None
    for name, value in {
        **known.readable,
        **({"n_shared_experts": 1, "num_experts_per_tok": 2} if family == "dots1" else {}),
    }.items():
        setattr(config, name, value)
    return small_model(model_classes(family, config)[0], config)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *(f for f in names() if f not in MODELS)])
def test_a_family_says_of_weights_and_norms_what_is_found_in_the_model(name: str) -> None:
    made = moved(name).eval() if name in MODELS else small(name)
    if name in UNPROVED:
        with pytest.raises(sp.InputError, match=re.escape(UNPROVED[name])):
            mapping_with_roles(made)
        return
    said, found = mapping_of(made), mapping_with_roles(made)
    for one, other in zip(said.sublayers, found.sublayers, strict=True):
        assert {place: getattr(one, place) for place in PLACES} == {place: getattr(other, place) for place in PLACES}
        paths = [{role: w if isinstance(w, str) else w[0] for role, w in m.weights.items()} for m in (one, other)]
        assert paths[0] == paths[1]
    assert (said.final_norm, said.gain_offset) == (found.final_norm, found.gain_offset)
    assert said.architecture.family is not None and found.architecture.family is None
