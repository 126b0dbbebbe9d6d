"""The two ends of the reference transformer: from ids, patches or frames to the stream, from the stream to logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.models.activations import torch_activation
from signalprop.models.residual import make_norm
from signalprop.models.weights import Convolution, Linear, Table, draw
from signalprop.network.parametrization import Parametrization

_BUCKETS, _MAX_DISTANCE = 32, 128  # T5's (Raffel et al. 2020, section 2.1)


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """Sines, then cosines, of Vaswani et al. 2017, section 3.5: float32 (length, d_model), of mean square 1."""
    half = (d_model + 1) // 2
    rate = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * rate
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model]


class FrontEnd(nn.Module):
    """Convolutions over time, an activation after each: frames of speech features to the stream.

    With kernels 3, 3, strides 1, 2 and GeLU it is Whisper's (Radford et al. 2023, section 2.2); with kernels 5, 5,
    strides 2, 2 and `glu` that of Speech2Text (Wang et al. 2020, section 2).
    """

    def __init__(
        self, parametrization: Parametrization, fill: Callable[[Tensor, float, str], None], dtype: torch.dtype
    ) -> None:
        super().__init__()
        a, e = parametrization.architecture, parametrization.embedding
        n = len(a.conv_kernels)
        if len(e.convolutions) != n or len(e.convolution_biases) not in (0, n):
            raise InputError(
                f"the embedding has {len(e.convolutions)} convolutions and {len(e.convolution_biases)} convolution "
                f"biases; the architecture has {n} convolutions"
            )
        self.activation = partial(F.glu, dim=1) if a.conv_activation == "glu" else torch_activation(a.conv_activation)
        self.convolutions = nn.ModuleList()
        for i, (stride, std) in enumerate(zip(a.conv_strides, e.convolutions, strict=True)):
            inputs, outputs, kernel = a.convolution(i)
            layer = Convolution(inputs, outputs, kernel, stride=stride, padding=kernel // 2, dtype=dtype)
            assert layer.bias is not None
            fill(layer.weight, std, f"convolution {i}")
            fill(layer.bias, e.convolution_bias(i), f"convolution bias {i}")
            self.convolutions.append(layer)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames (batch, frames, frame_dim) -> stream (batch, frames over the product of strides, features)."""
        stream = frames.transpose(1, 2)
        for layer in self.convolutions:
            stream = self.activation(layer(stream))
        return stream.transpose(1, 2)


class Embeddings(nn.Module):
    """scale * (tokens, patches or frames + positions + segments), then a norm, then dropout.

    A sinusoidal table is fixed and scaled to the root mean square `embedding.position`. The tokens before the patches
    (class, distillation) are drawn like more rows of the position table. A decoder after an encoder reads tokens and
    has no segments.
    """

    def __init__(
        self,
        parametrization: Parametrization,
        stack: str,
        seed: int,
        dtype: torch.dtype,
        token: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        a, e = parametrization.architecture, parametrization.embedding
        self.architecture = a
        self.scale = e.scale
        second = a.kind == "encoder-decoder" and stack == "decoder"
        self.positions = a.positions_of(decoder=second)
        self.position_rms = e.position_of(decoder=second)
        self.length = (a.target_len or a.seq_len) if second else a.seq_len

        def fill(tensor: Tensor, std: float, role: str) -> None:
            draw(tensor, std, e.distribution, seed, f"{stack} embedding", role)

        self.token = self.patch = self.front = self.position = self.segment = self.norm = None
        self.class_token = self.distillation_token = None
        if a.input == "frames" and not second:
            self.front = FrontEnd(parametrization, fill, dtype)
        elif a.input == "patches":
            self.patch = Linear(a.patch_dim, a.d_model, dtype=dtype)
            fill(self.patch.weight, e.token, "patch")
            fill(self.patch.bias, e.patch_bias, "patch bias")
            if a.class_token:
                self.class_token = nn.Parameter(torch.empty(a.d_model, dtype=dtype))
                fill(self.class_token, e.position, "class token")
            if a.distillation_token:
                self.distillation_token = nn.Parameter(torch.empty(a.d_model, dtype=dtype))
                fill(self.distillation_token, e.position, "distillation token")
        else:
            self.token = token or make_token_table(parametrization, seed, dtype)
        if self.positions == "learned":
            self.position = Table(self.length, a.d_model, dtype=dtype)
            fill(self.position.weight, self.position_rms, "position")
        if a.n_segments and not second:
            self.segment = Table(a.n_segments, a.d_model, dtype=dtype)
            fill(self.segment.weight, e.segment, "segment")
        if a.embedding_norm:
            self.norm = make_norm(a, e.norm_gain, dtype)
        self.dropout = nn.Dropout(a.embedding_dropout or 0.0)

    def forward(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """Ids (batch, tokens), patches (batch, patches, patch_dim) or frames (batch, frames, frame_dim) -> stream.

        The stream has shape (batch, tokens, features).
        """
        a = self.architecture
        width = None if self.token is not None else a.patch_dim if self.front is None else a.frame_dim
        if inputs.ndim != (2 if width is None else 3) or (width is not None and inputs.shape[2] != width):
            wanted = "ids (batch, tokens)" if width is None else f"{a.input} (batch, {a.input}, {width})"
            raise InputError(f"the input has shape {tuple(inputs.shape)}; expected {wanted}")
        if self.front is not None:
            stream: Tensor = self.front(inputs.to(next(self.front.parameters()).dtype))
        elif self.patch is not None:
            stream = self.patch(inputs.to(self.patch.weight.dtype))
            before = [token for token in (self.class_token, self.distillation_token) if token is not None]
            stream = torch.cat([*(token.expand(len(stream), 1, -1) for token in before), stream], 1)
        else:
            stream = self.token(inputs)  # type: ignore[misc]
        n = stream.shape[1]
        if self.position is not None:
            if n > self.length:
                raise InputError(f"the input has {n} tokens, the position table {self.length} rows; raise its length")
            stream = stream + self.position.weight[:n]
        elif self.positions == "sinusoidal":
            stream = stream + self.position_rms * sinusoidal_table(n, a.d_model).to(stream)
        if self.segment is not None:
            if segments is None:
                segments = torch.zeros(1, n, dtype=torch.long, device=stream.device)
            stream = stream + self.segment(segments)
        if self.scale != 1:
            stream = self.scale * stream
        if self.norm is not None:
            stream = self.norm(stream)
        out: Tensor = self.dropout(stream)
        return out


def make_token_table(parametrization: Parametrization, seed: int, dtype: torch.dtype) -> nn.Embedding:
    """The token table, which both stacks of an encoder-decoder and a tied head share."""
    a, e = parametrization.architecture, parametrization.embedding
    table = Table(a.vocab_size, a.d_model, dtype=dtype)
    draw(table.weight, e.token, e.distribution, seed, "embedding", "token")
    return table


class Head(nn.Module):
    """From the (normed) stream to logits, position by position: transform, scale, linear map.

    The map has a bias, zero at first, where families have one: after a transform (BERT), on classes (ViT), in Phi.
    """

    def __init__(
        self,
        parametrization: Parametrization,
        seed: int,
        dtype: torch.dtype,
        token: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        a, h = parametrization.architecture, parametrization.head
        self.scale = h.scale
        self.transform = self.norm = None
        self.activation = torch_activation(a.activation)
        if a.head_transform:
            self.transform = Linear(a.d_model, a.d_model, dtype=dtype)
            draw(self.transform.weight, h.transform, h.distribution, seed, "head", "transform")
            nn.init.zeros_(self.transform.bias)
            self.norm = make_norm(a, 1.0, dtype)
        n_out = a.n_classes if a.head == "classes" else a.vocab_size
        if a.has_tied_head:
            self.weight = (token or make_token_table(parametrization, seed, dtype)).weight
        else:
            self.weight = nn.Parameter(torch.empty(n_out, a.d_model, dtype=dtype))
            draw(self.weight, h.weight, h.distribution, seed, "head", "weight")
        self.bias = nn.Parameter(torch.zeros(n_out, dtype=dtype)) if a.has_head_bias else None

    def forward(self, stream: Tensor) -> Tensor:
        """(..., features) -> (..., vocabulary or classes)."""
        if self.transform is not None and self.norm is not None:
            stream = self.norm(self.activation(self.transform(stream)))
        return F.linear(stream if self.scale == 1 else self.scale * stream, self.weight, self.bias)


def answering(stream: Tensor, *, first: bool, keep: Tensor | None = None) -> Tensor:
    """What a class head reads of (batch, tokens, features): the first position, or the last real one (`keep`)."""
    if first:
        return stream[:, 0]
    if keep is None:
        return stream[:, -1]
    last = keep.long().cumsum(1).argmax(1)  # the first place at which all that are real have been counted
    return stream[torch.arange(len(stream), device=stream.device), last]


class RelativeBias(nn.Module):
    """T5's bias on scores by distance in 32 buckets (Raffel et al. 2020, section 2.1), one table per stack.

    The table starts at zero, since a parametrization has no column for it; T5's initialisation is random.
    """

    def __init__(self, n_heads: int, bidirectional: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = Table(_BUCKETS, n_heads, dtype=dtype)
        self.bidirectional = bidirectional
        nn.init.zeros_(self.table.weight)

    def forward(self, length: int) -> Tensor:
        """(1, heads, length, length): bias on the score of a query (rows) and a key (columns)."""
        position = torch.arange(length, device=self.table.weight.device)
        distance = position[None, :] - position[:, None]
        buckets, start = _BUCKETS, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            start = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(_MAX_DISTANCE / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        bias: Tensor = self.table(start + torch.where(distance < exact, distance, far))
        return bias.permute(2, 0, 1)[None]
