"""EXAONE 4: norms on the branches' outputs, as OLMo 2; norms on queries and keys by head.

Where layers have a window (three of four, in the large model), the others rotate nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama, olmo2
from signalprop.families.base import Config, every, rotating_in_windows


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    window = c["sliding_window"]
    kinds = every(c["sliding_window_pattern"] if window else 1, c)
    return olmo2.fields(c) | {"qk_norm": True} | rotating_in_windows(c, kinds)


FAMILY = olmo2.FAMILY.like(
    "exaone4", fields,
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    paths=llama.paths(replace(olmo2.ATTENTION, attention=""), olmo2.FEED_FORWARD),
)  # fmt: skip
