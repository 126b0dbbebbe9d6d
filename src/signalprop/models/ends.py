"""The two ends of the reference transformer: from ids or patches to the stream, from the stream to logits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.models.activations import torch_activation
from signalprop.models.sublayers import make_norm
from signalprop.models.weights import Linear, Table, draw
from signalprop.parametrization import Parametrization

_BUCKETS, _MAX_DISTANCE = 32, 128  # T5's (Raffel et al. 2020, section 2.1)


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """Sines, then cosines, of Vaswani et al. 2017, section 3.5: float32 (length, d_model), of mean square 1."""
    half = (d_model + 1) // 2
    rate = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * rate
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model]


class Embeddings(nn.Module):
    """scale * (tokens or patches + positions + segments), then a norm, then dropout.

    A sinusoidal table is fixed and scaled to the root mean square `embedding.position`. The class token, which stands
    before the patches, is drawn like one more row of the position table. A decoder behind an encoder has no segments.
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
        self.position_rms = e.position
        second = a.kind == "encoder-decoder" and stack == "decoder"
        self.length = (a.target_len or a.seq_len) if second else a.seq_len

        def fill(tensor: Tensor, std: float, role: str) -> None:
            draw(tensor, std, e.distribution, seed, f"{stack} embedding", role)

        self.token = self.patch = self.position = self.segment = self.norm = self.class_token = None
        if a.input == "patches":
            self.patch = Linear(a.patch_dim, a.d_model, dtype=dtype)
            fill(self.patch.weight, e.token, "patch")
            fill(self.patch.bias, e.patch_bias, "patch bias")
            if a.class_token:
                self.class_token = nn.Parameter(torch.empty(a.d_model, dtype=dtype))
                fill(self.class_token, e.position, "class token")
        else:
            self.token = token or make_token_table(parametrization, seed, dtype)
        if a.positions == "learned":
            self.position = Table(self.length, a.d_model, dtype=dtype)
            fill(self.position.weight, e.position, "position")
        if a.n_segments and not second:
            self.segment = Table(a.n_segments, a.d_model, dtype=dtype)
            fill(self.segment.weight, e.segment, "segment")
        if a.embedding_norm:
            self.norm = make_norm(a, e.norm_gain, dtype)
        self.dropout = nn.Dropout(a.embedding_dropout or 0.0)

    def forward(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """Ids (batch, tokens) or patches (batch, patches, patch_dim) -> stream (batch, tokens, features).

        Raises:
            InputError: more tokens than the position table has rows, or inputs of the wrong shape.
        """
        a = self.architecture
        if inputs.ndim != (2 if self.patch is None else 3):
            wanted = "ids (batch, tokens)" if self.patch is None else "patches (batch, patches, patch_dim)"
            raise InputError(f"the input has shape {tuple(inputs.shape)}; expected {wanted}")
        if self.patch is not None:
            stream: Tensor = self.patch(inputs.to(self.patch.weight.dtype))
            if self.class_token is not None:
                stream = torch.cat([self.class_token.expand(len(stream), 1, -1), stream], 1)
        else:
            stream = self.token(inputs)  # type: ignore[misc]
        n = stream.shape[1]
        if self.position is not None:
            if n > self.length:
                raise InputError(f"the input has {n} tokens, the position table {self.length} rows; raise its length")
            stream = stream + self.position.weight[:n]
        elif a.positions == "sinusoidal":
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


def is_tied(architecture: Architecture) -> bool:
    """Whether the head is the token table."""
    a = architecture
    return a.tied_embeddings and a.head == "lm" and a.input == "tokens"


class Head(nn.Module):
    """From the (normed) stream to logits, position by position: transform, scale, linear map.

    The map has a bias, zero at first, where families have one: after a transform (BERT) and on classes (ViT).
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
        if is_tied(a):
            self.weight = (token or make_token_table(parametrization, seed, dtype)).weight
        else:
            self.weight = nn.Parameter(torch.empty(n_out, a.d_model, dtype=dtype))
            draw(self.weight, h.weight, h.distribution, seed, "head", "weight")
        biased = a.bias and (a.head_transform or a.head == "classes")
        self.bias = nn.Parameter(torch.zeros(n_out, dtype=dtype)) if biased else None

    def forward(self, stream: Tensor) -> Tensor:
        """(..., features) -> (..., vocabulary or classes)."""
        if self.transform is not None and self.norm is not None:
            stream = self.norm(self.activation(self.transform(stream)))
        return F.linear(stream if self.scale == 1 else self.scale * stream, self.weight, self.bias)


class RelativeBias(nn.Module):
    """T5's bias on scores by distance in 32 buckets (Raffel et al. 2020, section 2.1), one table per stack.

    The table starts at zero, since a parametrization has no column for it; T5's own initialisation is random.
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
