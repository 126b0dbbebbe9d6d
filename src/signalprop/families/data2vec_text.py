"""data2vec's encoder of text: RoBERTa, with another vocabulary."""

from signalprop.families import roberta

FAMILY = roberta.FAMILY.like("data2vec-text", None, {"vocab_size": 30522})
