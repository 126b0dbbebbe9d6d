"""Ministral 3: Mistral, with stretched rotations.

Queries beyond the length that rotations were stretched from are scaled by their position; they are read as before it.
"""

import math

from signalprop.families import llama, mistral
from signalprop.families.base import Config, Fields, stretch


def fields(c: Config) -> Fields:
    made = llama.decoder({**c, "use_sliding_window": True})
    return made | {"attention_scale": stretch(c["rope_parameters"]) ** 2 / math.sqrt(c["head_dim"])}


FAMILY = mistral.FAMILY.like(
    "ministral3", fields,
    {
        "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
)  # fmt: skip
