"""The two ends of a network as rows of a Parametrization: what draws and scales its input, and its output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from signalprop.validation import Value

LARGEST = 1e30  # of a single number in a Parametrization; squares and products of several stay finite
Distribution = Literal["normal", "uniform", "truncated_normal", "orthogonal", "measured"]
Size = Annotated[float, Field(ge=0, le=LARGEST)]
Factor = Annotated[float, Field(gt=0, le=LARGEST)]


class Embedding(Value):
    """The model's input: standard deviations of its tables (or of the patch map), and the factor on their sum.

    `learning_rate` is a factor on the learning rate of the tables, for Adam-like optimizers.
    """

    token: Size
    position: Size = 0.0
    segment: Size = 0.0
    patch_bias: Size = 0.0
    scale: Factor = 1.0
    norm_gain: Size = 1.0
    learning_rate: Factor = 1.0
    distribution: Distribution = "normal"


class Head(Value):
    """The model's output: standard deviation of the head, factor on its input, and of the dense layer before it.

    `learning_rate` is a factor on the learning rate of the head's weight (where it is tied, the table's rules).
    """

    weight: Size
    scale: Factor = 1.0
    transform: Size = 0.0
    final_norm_gain: Size = 1.0
    learning_rate: Factor = 1.0
    distribution: Distribution = "normal"
