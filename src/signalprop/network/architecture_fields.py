"""The fields of an `Architecture`, and what follows from them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Literal, TypeGuard

from pydantic import Field, SerializeAsAny

from signalprop.errors import check_index
from signalprop.files.validation import Value, typed
from signalprop.network.residual_streams import Streams

Placement = Literal["pre", "post", "sandwich", "none", "res-post"]
Kind = Literal["encoder", "decoder", "encoder-decoder"]
Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
_WIDEST, _LONGEST = 1_000_000_000, 10_000_000  # beyond any model; a typing error gets a clear line, not a MemoryError
_SQUASHES = {"dyt": "tanh", "derf": "erf"}
ADDED = ("learned", "sinusoidal")  # positions that are added to the model's input


class ArchitectureFields(Value):
    """What an `Architecture` says, whose docstring has its fields; not checked against each other."""

    kind: Kind = "encoder"
    n_layers: int = Field(ge=1, le=1_000_000)
    n_decoder_layers: int | None = Field(None, ge=1, le=1_000_000)
    d_model: int = Field(ge=1, le=_WIDEST)
    n_heads: int = Field(0, ge=1, le=_WIDEST)
    n_kv_heads: int = Field(0, ge=1, le=_WIDEST)
    d_head: int = Field(0, ge=1, le=_WIDEST)
    d_ff: int = Field(0, ge=1, le=_WIDEST)
    gated: bool = False
    activation: str = "gelu"
    norm: Literal["layernorm", "rmsnorm", "dyt", "derf"] = "layernorm"
    norm_placement: Placement | tuple[Placement, ...] = "pre"
    parallel: bool | tuple[str, ...] = False
    shared_norm: bool = False
    branches: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
    settings: dict[str, SerializeAsAny[Value]] = Field(default_factory=dict)
    streams: Streams | None = None
    layer_inputs: tuple[dict[int, float], ...] | None = None
    final_norm: bool | None = None
    norm_eps: float = Field(1e-5, ge=0, le=1)
    qk_norm: bool | Literal["whole"] = False
    attention_scale: float | None = Field(None, ge=1e-30, le=1e30)
    positions: Literal["learned", "sinusoidal", "rotary", "relative", "alibi", "none"] = "learned"
    decoder_positions: Literal["learned", "sinusoidal", "rotary", "relative", "none"] | None = None
    rotary_base: float = Field(10_000.0, ge=1, le=1e30)
    rotary_fraction: float = Field(1.0, gt=0, le=1)
    n_segments: int = Field(0, ge=0, le=_WIDEST)
    embedding_norm: bool = False
    embedding_scale: float = Field(1.0, ge=1e-30, le=1e30)
    input: Literal["tokens", "patches", "frames"] = "tokens"
    vocab_size: int = Field(32_000, ge=2, le=_WIDEST)
    patch_dim: int = Field(768, ge=1, le=_WIDEST)
    class_token: bool = False
    distillation_token: bool = False
    frame_dim: int = Field(80, ge=1, le=_WIDEST)
    conv_kernels: tuple[Annotated[int, Field(ge=1, le=_LONGEST)], ...] = (3, 3)
    conv_strides: tuple[Annotated[int, Field(ge=1, le=_LONGEST)], ...] = (1, 2)
    conv_channels: int | None = Field(None, ge=1, le=_WIDEST)
    conv_activation: str = "gelu"
    seq_len: int = Field(512, ge=1, le=_LONGEST)
    target_len: int | None = Field(None, ge=1, le=_LONGEST)
    dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    embedding_dropout: float | None = Field(None, ge=0, lt=1)
    bias: bool = True
    qkv_bias: bool | None = None
    norm_bias: bool = True
    tied_embeddings: bool = True
    head: Literal["lm", "classes", "none"] = "lm"
    n_classes: int = Field(1000, ge=1, le=_WIDEST)
    head_transform: bool = False
    head_bias: bool | None = None
    family: str | None = None
    init_scale: float = Field(1.0, ge=1e-30, le=1e30)
    branch_scale: Factor | dict[str, Factor] = 1.0
    head_scale: Factor = 1.0
    role_scale: dict[str, Factor] = Field(default_factory=dict)

    @property
    def n_layers_total(self) -> int:
        """Layers of all stacks together."""
        return self.n_layers + (self.n_decoder_layers or 0)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Norm placement of every layer, encoder first."""
        if isinstance(self.norm_placement, tuple):
            return self.norm_placement
        return (self.norm_placement,) * self.n_layers_total

    @cached_property
    def layer_branches(self) -> tuple[tuple[str, ...], ...]:
        """Kinds of the sublayers of every layer, encoder first."""
        if self.branches is None:
            usual = ("attention", "feed_forward")
            across = ("attention", "cross_attention", "feed_forward")
            return (usual,) * self.n_layers + (across,) * (self.n_decoder_layers or 0)
        if is_one_layer(self.branches):
            return (self.branches,) * self.n_layers_total
        return self.branches  # type: ignore[return-value]

    def branch_scale_of(self, kind: str) -> float:
        """The model's factor on branches of a kind of sublayer."""
        return self.branch_scale.get(kind, 1.0) if isinstance(self.branch_scale, dict) else self.branch_scale

    @property
    def causal(self) -> bool:
        """Whether the (only) stack is a decoder."""
        return self.kind == "decoder"

    @property
    def several_streams(self) -> bool:
        """Whether more than one stream has to be followed from layer to layer."""
        return self.streams is not None or self.layer_inputs is not None

    @property
    def squash(self) -> str:
        """The activation that stands in for norms (DyT: tanh; Derf: erf); '' where norms divide by a size."""
        return _SQUASHES.get(self.norm, "")

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last layer of each stack."""
        return self.placements[-1] != "post" if self.final_norm is None else self.final_norm

    @property
    def score_scale(self) -> float:
        """Factor on the scalar product of a query and a key."""
        return 1 / math.sqrt(self.d_head) if self.attention_scale is None else self.attention_scale

    @property
    def n_embedding_tables(self) -> int:
        """How many tables are added to make the model's input: tokens (patches, frames), positions, segments."""
        return 1 + (self.positions in ADDED) + (self.n_segments > 0)

    @property
    def n_class_tokens(self) -> int:
        """Tokens before the patches: class and distillation."""
        return int(self.class_token) + int(self.distillation_token)

    @property
    def has_head_bias(self) -> bool:
        """Whether the head has a bias."""
        if self.head_bias is None:
            return self.bias and (self.head_transform or self.head == "classes")
        return self.head_bias

    @property
    def n_frames(self) -> int:
        """Frames that the convolutions make seq_len tokens of."""
        return self.seq_len * math.prod(self.conv_strides)

    @property
    def has_token_table(self) -> bool:
        """Whether some stack looks tokens up: all but an encoder of patches or frames."""
        return self.input == "tokens" or self.kind == "encoder-decoder"

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the token table."""
        return self.tied_embeddings and self.head == "lm" and self.has_token_table

    @typed
    def positions_of(self, *, decoder: bool) -> str:
        """Positions of the encoder or of the decoder after it."""
        return (self.decoder_positions if decoder else None) or self.positions

    @typed
    def convolution(self, index: int) -> tuple[int, int, int]:
        """(inputs, outputs, kernel) of convolution `index` of the front end, from 0; a `glu` doubles its outputs.

        Raises:
            InputError: `index` is beyond the last convolution.
        """
        width = self.conv_channels or self.d_model
        index = check_index("convolution", index, len(self.conv_kernels))
        last = index == len(self.conv_kernels) - 1
        outputs = (self.d_model if last else width) * (2 if self.conv_activation == "glu" else 1)
        return (width if index else self.frame_dim), outputs, self.conv_kernels[index]


def is_one_layer(branches: tuple[str, ...] | tuple[tuple[str, ...], ...]) -> TypeGuard[tuple[str, ...]]:
    """Whether these are the branches of one layer, not of every layer."""
    return all(isinstance(name, str) for name in branches)
