"""Granite: Llama, with fixed factors on embeddings, branches, scores and logits."""

from signalprop.families import llama
from signalprop.families.base import Config, Fields


def multiplied(c: Config) -> Fields:
    """Fields of an Architecture that hold its factors; logits are divided by theirs."""
    return {
        "embedding_scale": c["embedding_multiplier"], "branch_scale": c["residual_multiplier"],
        "attention_scale": c["attention_multiplier"], "head_scale": 1 / c["logits_scaling"],
    }  # fmt: skip


MULTIPLIERS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
FAMILY = llama.FAMILY.like("granite", lambda c: llama.fields(c) | multiplied(c), {**MULTIPLIERS})
