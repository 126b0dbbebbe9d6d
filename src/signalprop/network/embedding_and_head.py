"""The two ends of a network as rows of a Parametrization: what draws and scales its input, and its output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from signalprop.errors import check_index
from signalprop.files.validation import Value

LARGEST = 1e30  # of a single number in a Parametrization; squares and products of several stay finite
Distribution = Literal["normal", "uniform", "truncated_normal", "orthogonal", "measured"]
Size = Annotated[float, Field(ge=0, le=LARGEST)]
Factor = Annotated[float, Field(gt=0, le=LARGEST)]


class Embedding(Value):
    """The model's input: standard deviations of its tables (or of the patch map), and the factor on their sum.

    `token` is that of the patch map where patches are read, `position` the root mean square of a sinusoidal table;
    `decoder_position` is that of the decoder of an encoder-decoder (default: `position`). `convolutions` and
    `convolution_biases`, one each per convolution (no biases: zero), are those of the maps that read frames.
    `learning_rate` is a factor on the learning rate of the tables, for Adam-like optimizers.

    Attributes:
        token, position, decoder_position, segment, patch_bias, convolutions, convolution_biases: standard deviations.
        scale: factor on the sum. norm_gain: of the norm on it, if there is one. distribution: of all of them.
    """

    token: Size
    position: Size = 0.0
    decoder_position: Size | None = None
    segment: Size = 0.0
    patch_bias: Size = 0.0
    convolutions: tuple[Size, ...] = ()
    convolution_biases: tuple[Size, ...] = ()
    scale: Factor = 1.0
    norm_gain: Size = 1.0
    learning_rate: Factor = 1.0
    distribution: Distribution = "normal"

    @field_validator("convolutions", "convolution_biases", mode="before")
    @classmethod
    def _tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # JSON has no tuples

    def position_of(self, *, decoder: bool) -> float:
        """Root mean square of the positions of the encoder, or of the decoder after it."""
        return self.decoder_position if decoder and self.decoder_position is not None else self.position

    def convolution_bias(self, index: int) -> float:
        """Standard deviation of the biases of convolution `index`, from 0; 0 where none has any.

        Raises:
            InputError: `index` is beyond the last convolution.
        """
        biases = self.convolution_biases
        return biases[check_index("convolution", index, len(biases))] if biases else 0.0


class Head(Value):
    """The model's output: standard deviation of the head, factor on its input, and of the dense layer before it.

    `learning_rate` is a factor on the learning rate of the head's weight (where it is tied, the table's rules),
    `transform_learning_rate` on that of the dense layer.

    Attributes:
        weight, transform: standard deviations of the map to logits and of the dense layer before it.
        scale: factor on the input. final_norm_gain: of the norm after the last layer; final_norm_slope: its
            alpha, where it is `dyt` or `derf`. distribution: of the weights.
    """

    weight: Size
    scale: Factor = 1.0
    transform: Size = 0.0
    final_norm_gain: Size = 1.0
    final_norm_slope: Factor = 0.5
    learning_rate: Factor = 1.0
    transform_learning_rate: Factor = 1.0
    distribution: Distribution = "normal"
