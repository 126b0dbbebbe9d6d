"""RoBERTa: BERT, with positions that are counted after the padding id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import bert
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return bert.fields(c) | {"seq_len": c["max_position_embeddings"] - c["pad_token_id"] - 1}


FAMILY = bert.FAMILY.like(
    "roberta", fields,
    {"vocab_size": 50265, "pad_token_id": 1},
    paths=(replace(bert.PATHS, transform="lm_head.dense", transform_activation=None),),
    position_offset=2,
)  # fmt: skip
