"""Granite with windows, a sink per head that starts at zero, and a rotary base per layer, 0 for no rotations."""

from signalprop.families import granite, llama
from signalprop.families.base import Config, Fields, every, rotary, seeing


def windows(c: Config) -> Fields:
    """Fields of an Architecture that say what its attentions see."""
    usual = rotary(c, "rope_theta", 10_000.0)
    bases = c.get("layer_rope_theta") or [usual] * c["num_hidden_layers"]
    turns = [float(base or usual) for base in bases]
    return seeing(c, every(4, c, first=True), sink=0.0, rotates=[bool(base) for base in bases], rotary_base=turns)


FAMILY = granite.FAMILY.like(
    "granite_swa", lambda c: granite.FAMILY.fields(c) | windows(c),
    {
        "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "sliding_window": 128,
    },
    paths=llama.paths(llama.ATTENTION),
)  # fmt: skip
