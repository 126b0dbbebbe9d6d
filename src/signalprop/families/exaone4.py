"""EXAONE 4: norms on the branches' outputs, as OLMo 2; norms on queries and keys by head.

Where layers have a window (three of four, in the large model), the others rotate nothing: an Architecture says that all
layers rotate and has, as `seq_len`, the width of the window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama, olmo2
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    windows = "sliding_attention" in (c.get("layer_types") or ("sliding_attention",))
    return olmo2.fields({**c, "use_sliding_window": windows}) | {"qk_norm": True}


FAMILY = replace(
    olmo2.FAMILY,
    model_type="exaone4",
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "sliding_window": 4096,
    },
    fields=fields,
    paths=llama.paths(replace(olmo2.ATTENTION, attention=""), olmo2.FEED_FORWARD),  # some layers see only a window
)  # fmt: skip
