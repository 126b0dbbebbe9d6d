"""CamemBERT: RoBERTa, with another vocabulary."""

from signalprop.families import roberta

FAMILY = roberta.FAMILY.like("camembert", None, {"vocab_size": 30522})
