"""EXAONE 3: Llama under other names; transformers builds Llama's classes from its configuration.

Its rotations are stretched for long contexts ("llama3"): an Architecture has the plain ones of the same base.
"""

from signalprop.families import llama
from signalprop.families.base import Config, Fields, rotary


def fields(c: Config) -> Fields:
    return llama.fields(c) | {"rotary_base": rotary(c, "rope_theta", 500_000.0)}


FAMILY = llama.FAMILY.like(
    "exaone", fields,
    {
        "vocab_size": 102400, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    former={
        "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act",
    },
)  # fmt: skip
