"""mT5: T5 with gates, whose head does not scale what it reads.

Published configurations say that the head is not the token table; transformers 5 ties the two whatever they say.
"""

from signalprop.families import t5

FAMILY = t5.FAMILY.like(
    "mt5", lambda c: t5.fields(c) | {"tied_embeddings": True},
    {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
    tied_head_scale=None,
    encoder_classes=("MT5EncoderModel",),
)  # fmt: skip
