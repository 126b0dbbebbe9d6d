"""Code World Model: Llama, with a window on three layers of four.

Its rotations are stretched for long contexts ("llama3"): an Architecture has the plain ones of the same base.
"""

from signalprop.families import llama
from signalprop.families.base import Config, Fields, every, rotary, seeing


def fields(c: Config) -> Fields:
    base = {"rotary_base": rotary(c, "rope_theta", 1e6)}
    return llama.fields({**c, "attention_bias": False}) | base | seeing(c, every(4, c, first=True))


FAMILY = llama.FAMILY.like(
    "cwm", fields,
    {
        "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": 8192,
    },
    paths=llama.paths(llama.ATTENTION),
)  # fmt: skip
