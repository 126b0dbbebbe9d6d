"""mT5: T5 with gates, whose head does not scale what it reads.

Published configurations say that the head is not the token table; transformers 5 ties the two whatever they say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import t5
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return t5.fields(c) | {"tied_embeddings": True}


FAMILY = replace(
    t5.FAMILY,
    model_type="mt5",
    defaults={
        **t5.FAMILY.defaults, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
    fields=fields,
    tied_head_scale=None,
    encoder_classes=("MT5EncoderModel",),
)  # fmt: skip
