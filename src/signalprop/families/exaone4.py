"""EXAONE 4: norms on the branches' outputs, as OLMo 2; norms on queries and keys by head.

Where layers have a window (three of four, in the large model), the others rotate nothing.
"""

from signalprop.families import llama, olmo2
from signalprop.families.base import Config, Fields, every, rotating_in_windows


def windows(c: Config) -> Fields:
    """What its attentions see."""
    return rotating_in_windows(c, every(c["sliding_window_pattern"] if c["sliding_window"] else 1, c))


FAMILY = olmo2.FAMILY.like(
    "exaone4", lambda c: olmo2.FAMILY.fields(c) | {"qk_norm": True} | windows(c),
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    paths=llama.paths(olmo2.ATTENTION, olmo2.FEED_FORWARD),
)  # fmt: skip
