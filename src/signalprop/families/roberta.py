"""RoBERTa: BERT, with positions that are counted after the padding id."""

from dataclasses import replace

from signalprop.families import bert

FAMILY = bert.FAMILY.like(
    "roberta", lambda c: bert.fields(c) | {"seq_len": c["max_position_embeddings"] - c["pad_token_id"] - 1},
    {"vocab_size": 50265, "pad_token_id": 1},
    paths=(replace(bert.PATHS, transform="lm_head.dense", transform_activation=None),),
    position_offset=2,
)  # fmt: skip
