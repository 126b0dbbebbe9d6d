"""data2vec's encoder of text: RoBERTa, with another vocabulary."""

from __future__ import annotations

from dataclasses import replace

from signalprop.families import roberta

FAMILY = replace(roberta.FAMILY, model_type="data2vec-text", defaults={**roberta.FAMILY.defaults, "vocab_size": 30522})
