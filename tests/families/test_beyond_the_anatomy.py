"""What a family's file says that is not found in the model itself: its paths stand for speed, and are held to that."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

import signalprop as sp
from measurement.conftest import MODELS, moved
from signalprop.attachment.families import mapping_of
from signalprop.attachment.found_roles import mapping_with_roles
from signalprop.attachment.mapping import SublayerMap

# What the anatomy does not prove: only here are a family's paths all that is known.
UNPROVED = {
    "whisper": "embedding: the stream does not begin with a sum of tables",
    "speech_to_text": "embedding: the stream does not begin with a sum of tables",
    "hunyuan_v1_dense": "attention: what q_proj, k_proj, v_proj are",  # norms after the rotation
    "gemma2": "attention: what q_proj, k_proj, v_proj are",  # scores through tanh
    "gemma4": "attention: what q_proj, k_proj, v_proj are",  # norms on values
    "gemma4-shared": "attention: what q_proj, k_proj, v_proj are",
    "modernbert": "the norms of its branches stand at different places",
}
PLACES = [f.name for f in fields(SublayerMap) if f.name in ("norm", "post_norm", "query_norm", "key_norm", "skip")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_family_says_of_weights_and_norms_what_is_found_in_the_model(name: str) -> None:
    made = moved(name).eval()
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
