"""MPNet: BERT without segments, with a bias by distance on its scores, one table for all layers."""

from dataclasses import replace

from signalprop.families import bert
from signalprop.families.base import Config, Fields, SublayerPaths, separate


def fields(c: Config) -> Fields:
    """Positions start after the padding id, which is 1 whatever the configuration says."""
    plain = bert.fields({**c, "is_decoder": False, "type_vocab_size": 0})
    return plain | {"seq_len": c["max_position_embeddings"] - 2}


ATTENTION = SublayerPaths(
    norm="attention.LayerNorm",
    branch="attention.dropout",
    weights=separate("attention.attn.", "q k v", "attention.attn.o"),
)
FAMILY = bert.FAMILY.like(
    "mpnet", fields,
    {"vocab_size": 30527},
    paths=tuple(
        replace(
            paths, segment=None, transform="lm_head.dense", transform_activation=None,
            inputs={"tokens": "input_ids", "keep": "attention_mask"},
        )
        for paths in bert.FAMILY.with_stack(sublayers=(ATTENTION, bert.FEED_FORWARD))
    ),
    position_offset=2,
    score_bias=True,
)  # fmt: skip
