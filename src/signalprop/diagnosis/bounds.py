"""Bounds that verdicts compare with, each with what healthy models reach.

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
# Entropy of attention over that of equal weights, mean over heads. Trained: 0.23 (SmolLM2).
ONE_HOT = 0.02
# Token correlation, and effective rank, at which tokens have grown alike. Trained: 0.964 and 1.19 (Gemma 3), 0.79 and
# 2.8 (Whisper); of rank 1.24 is a small model that has learnt how frequent tokens are and little else.
ALIKE, ONE_DIRECTION = 0.98, 1.1
# Largest entry over the root mean square, and effective rank, where a few features are what tokens share (Gemma 3: 26
# to 131, and 1.19 to 5.6). SmolLM2 has entries of 193 whose tokens stay apart.
FEW_FEATURES, FEW_DIRECTIONS = 20.0, 1.5
# Loss that removing an idle layer costs at most, in nats per token; its standard error has to be below that, too.
# Cheapest layers: 0.065 (SmolLM2), 0.30 (Gemma 3), 1.1 (Whisper), and -0.08 in Qwen2.5, whose layer 8 is idle there.
IDLE_LOSS = 0.02
# Loss that the dearest layer costs where any counts. Trained: 1.7 to 12; before training, and soon after, up to 0.07.
COUNTING_LOSS = 0.1
# |J - I| of an idle layer, where layers were not removed. Trained: 0.37 (Whisper).
IDLE_JACOBIAN = 0.1
# Gradient variance over the layers, largest over smallest. Trained: 6.0e3 (Gemma 3), 423 (Whisper).
GRADIENT_RANGE = 1e5
# Variance after the last layer over that after the first from which growth is told. Not a fault at any size.
GROWN = 4.0
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
# Loss that a cast may cost, in nats per token, beside three standard errors. bfloat16 costs SmolLM2 0.000.
CAST_LOSS = 0.01
# Loss over ln V to which a change has to bring a model that it repairs. Trained: 0.31 (SmolLM2), 0.38 (small ones); a
# change that only makes a broken branch smaller leaves 0.64.
REPAIRED_LOSS = 0.6
# Nats by which a trained model's loss may lie above the entropy of how often each word comes. Small models: 0.9 below.
ABOVE_FREQUENCIES = 0.3
# Nats by which a model says the word itself, or the one after the next, better than the next. Trained: below 0. And
# what the word itself costs then at the most.
SHIFTED, ITSELF = 0.5, 0.5
# Shares of a matrix's or stream's gradient that may become 0, or subnormal, in float16. Small models at 65,536: below
# 1e-4 both; at 1: below 1e-3, and up to 0.79.
LOST_GRADIENT, FEWER_DIGITS = 0.05, 0.5
