"""OLMo 3: OLMo 2, with a window on three layers of four; as `seq_len`, an Architecture has its width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama, olmo2
from signalprop.families.base import Config, rotary_base_of


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture. By default both kinds of layers have one rotary base."""
    kinds = c.get("layer_types") or ("sliding_attention",)
    common = max(("sliding_attention", "full_attention"), key=list(kinds).count)
    return olmo2.fields({**c, "use_sliding_window": "sliding_attention" in kinds}) | {
        "rotary_base": rotary_base_of(c, common, "rope_theta", 500_000.0)
    }


FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    defaults={**olmo2.FAMILY.defaults, "sliding_window": 4096},
    fields=fields,
    paths=llama.paths(replace(olmo2.ATTENTION, attention=""), olmo2.FEED_FORWARD),  # some layers see only a window
)
