"""XLM-RoBERTa: RoBERTa, with another vocabulary."""

from signalprop.families import roberta

FAMILY = roberta.FAMILY.like("xlm-roberta", None, {"vocab_size": 30522})
