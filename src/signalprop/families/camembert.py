"""CamemBERT: RoBERTa, with another vocabulary."""

from __future__ import annotations

from signalprop.families import roberta

FAMILY = roberta.FAMILY.like("camembert", None, {"vocab_size": 30522})
