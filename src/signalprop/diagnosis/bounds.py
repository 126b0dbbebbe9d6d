"""Bounds that faults compare with, each with what healthy models reach; those of `verdict.RULES` stand there.

Six trained checkpoints without a fault (records/diagnoses.md lists how near each comes to every bound), and small ones
at the start and after 200 steps (tests/diagnosis).
"""

from __future__ import annotations

# Layers on either side that a layer's weights are compared with.
NEIGHBOURS = 4
# A weight's standard deviation over the median of its neighbours': larger, and smaller. Trained: up to 2.58 (Qwen2.5,
# layer 2, feed-forward; Whisper 1.92) and down to 0.346 (SmolLM2's first values; Qwen2.5 0.386).
LARGE_WEIGHT, SMALL_WEIGHT = 3.0, 0.2
# Share of a head in its layer's output, relative to an equal share, below which it is dead. Trained: 0.023 (Qwen2.5).
DEAD_HEAD = 1e-6
# Relative error of the factor between a norm and the branch that reads it. Trained: 1e-4 in float32, 5e-4 in bfloat16.
NORM_OFF = 0.05
# Norm of a row of a table over the median row's from which it lies outside. Trained: 4.4 (SmolLM2).
OUTLYING_ROW = 20.0
# The same of rows without which the loss falls by REPAIRED: words that nobody asks for, and that are said.
LARGE_ROW = 3.0
# Nats per token by which a change has to lower the loss to be the repair: where no error is known, and beside four
# standard errors. The best of 22 changes lowers it by 0.01 (SmolLM2).
REPAIRED, REPAIRED_CLEARLY = 0.3, 0.05
# Variance of the logits of a fresh model from which its first loss lies far above ln V (by half of it).
FRESH_LOGITS = 4.0
# Root mean square of gains, of the layers' norms and of the final one, below which all lie around 0. Fresh: 1.
GAINS_AROUND_ZERO = 0.1
# Loss over ln V from which a trained model predicts no better than guessing.
GUESSING = 0.9
# Loss over ln V to which a change has to bring a model that it repairs. Trained: 0.31 (SmolLM2), 0.38 (small ones); a
# change that only makes a broken branch smaller leaves 0.64.
REPAIRED_LOSS = 0.6
# Nats by which a trained model's loss may lie above the entropy of how often each word comes. Small models: 0.9 below.
ABOVE_FREQUENCIES = 0.3
# Nats by which a model says the word itself, or the one after the next, better than the next. Trained: below 0. And
# what the word itself costs then at the most.
SHIFTED, ITSELF = 0.5, 0.5
