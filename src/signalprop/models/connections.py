"""Several residual streams in PyTorch: (batch, tokens, n * features), stream by stream.

So whatever hooks a stream sees all of them, and its moments are means over streams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.models.multipliers import times
from signalprop.models.residual import Sublayer
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import draw
from signalprop.network.architecture import Architecture
from signalprop.network.layer_inputs import INPUT, changed
from signalprop.network.layout import layer_starts
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual_streams import Streams

Weights = tuple[Tensor, Tensor, Tensor | None]


def entered(a: Architecture, stream: Tensor) -> Tensor:
    """What enters a stack: as many streams as there are, all equal."""
    return stream if a.streams is None else torch.cat([stream] * a.streams.n, -1)


def left(a: Architecture, stream: Tensor) -> Tensor:
    """What the head reads of the last streams, (batch, tokens, features)."""
    if a.streams is None:
        return stream
    each = _each(stream, a.streams.n)
    if a.streams.mixing == "siamese":
        return (each * _roots(stream, a.norm_eps).unsqueeze(-1)).sum(-2)
    return (each * _head(a.streams, stream)).sum(-2)


def left_back(a: Architecture, gradient: Tensor) -> Tensor:
    """The gradient at the last streams, from that of what the head reads of them."""
    if a.streams is None:
        return gradient
    if a.streams.mixing == "siamese":
        raise InputError("a Gaussian gradient does not know the last streams of mixing 'siamese'; give a head and ids")
    return (gradient.unsqueeze(-2) * _head(a.streams, gradient)).flatten(-2)


def connections_of(p: Parametrization, index: int, seed: int, dtype: torch.dtype) -> nn.Module:
    """The connections of a sublayer, freshly drawn."""
    assert p.architecture.streams is not None
    if p.architecture.streams.mixing == "siamese":
        return Norms(p, index, dtype)
    return Gates(p, index, seed, dtype) if p.architecture.streams.gated else Fixed(p, index, dtype)


def _each(stream: Tensor, n: int) -> Tensor:
    """(..., n * features) -> (..., n, features)."""
    return stream.view(*stream.shape[:-1], n, -1)


def _head(streams: Streams, like: Tensor) -> Tensor:
    return torch.tensor(streams.head(), dtype=like.dtype, device=like.device)[:, None]


class LayerInputs(nn.Module):
    """Sums of earlier streams that enter layers (`Architecture.layer_inputs`).

    Attributes:
        factors: of every layer that reads more than what left the one before, trainable, in the order of its sources.
    """

    def __init__(self, p: Parametrization, dtype: torch.dtype) -> None:
        super().__init__()
        assert p.architecture.layer_inputs is not None
        self.inputs = changed(p.architecture.layer_inputs)
        self.layers = {start: layer for layer, start in enumerate(layer_starts(p).tolist())}
        self.factors = nn.ParameterDict(
            {str(layer): torch.tensor(list(row.values()), dtype=dtype) for layer, row in self.inputs.items()}
        )

    def passage(self, stream: Tensor) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
        """For one pass, of the model's input: what enters the first layer, and what a sublayer reads, of (its row,
        what left the one before)."""
        first = self.factors["0"] * stream if 0 in self.inputs else stream
        stored = {INPUT: stream, 0: first}

        def enter(row: int, stream: Tensor) -> Tensor:
            layer = self.layers.get(row)
            if layer is None:
                return stream
            stored[layer] = stream
            if layer not in self.inputs:
                return stream
            factors = self.factors[str(layer)]
            return torch.stack([f * stored[s] for f, s in zip(factors, self.inputs[layer], strict=True)]).sum(0)

        return first, enter


class Fixed(nn.Module):
    """Connections of given numbers, all trainable.

    Attributes:
        read, write: (n,). mix: (n, n); stream i becomes sum_j mix_ij stream j.
    """

    def __init__(self, p: Parametrization, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert p.architecture.streams is not None
        made = p.architecture.streams.fixed(index, int(p.layer[index]))
        self.read, self.write, self.mix = (nn.Parameter(torch.tensor(x, dtype=dtype)) for x in made)

    def forward(self, stream: Tensor) -> Weights:
        """Weights by which to read, write and mix."""
        return self.read, self.write, self.mix


def _roots(streams: Tensor, epsilon: float) -> Tensor:
    """What a norm multiplies each of two streams by, (batch, tokens, 2)."""
    return torch.rsqrt(_each(streams, 2).square().mean(-1) + epsilon)


class Norms(nn.Module):
    """Connections of `siamese`: both streams are read after norms, and the first continues after its norm.

    Attributes:
        write: (2,), fixed.
    """

    write: Tensor

    def __init__(self, p: Parametrization, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert p.architecture.streams is not None
        made = p.architecture.streams.fixed(index, int(p.layer[index]))
        self.epsilon = p.architecture.norm_eps
        self.register_buffer("write", torch.tensor(made[1], dtype=dtype), persistent=False)

    def forward(self, stream: Tensor) -> Weights:
        """Weights by which to read, write and mix."""
        roots = _roots(stream, self.epsilon)
        kept = torch.stack([roots[..., 0], torch.ones_like(roots[..., 0])], -1)
        return roots, self.write, torch.diag_embed(kept)


class Gates(nn.Module):
    """Connections by gates of the streams themselves, as transformers' DeepSeek-V4 has them.

    Attributes:
        weight: (gates, n * features), reads the streams over their root mean square. base: (gates,). scale: of read
            gates, write gates, and matrix.
    """

    def __init__(self, p: Parametrization, index: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        a, s = p.architecture, p.architecture.streams
        assert s is not None
        self.streams, self.eps = s, a.norm_eps
        self.weight = nn.Parameter(torch.empty(s.gates(), s.n * a.d_model, dtype=dtype))
        draw(self.weight, s.gate_std, "normal", seed, str(index), "gates")
        base = torch.cat([torch.full((s.n,), s.read_bias), torch.full((s.n,), s.write_bias)])
        if s.mixing == "mhc":
            base = torch.cat([base, s.mix_bias * torch.eye(s.n).flatten()])
        self.base = nn.Parameter(base.to(dtype))
        self.scale = nn.Parameter(torch.full((2 + (s.mixing == "mhc"),), s.gate_scale, dtype=dtype))

    def forward(self, stream: Tensor) -> Weights:
        """Weights by which each token reads, writes (batch, tokens, n) and mixes (batch, tokens, n, n)."""
        s = self.streams
        z = F.linear(F.rms_norm(stream, stream.shape[-1:], eps=self.eps), self.weight)
        parts = [
            self.scale[k] * part + self.base[k * s.n : k * s.n + part.shape[-1]]
            for k, part in enumerate(torch.split(z, [s.n, s.n, s.n**2][: len(self.scale)], -1))
        ]
        read, write = torch.sigmoid(parts[0]), s.write_gain * torch.sigmoid(parts[1])
        if len(parts) == 2:
            return read, write, None
        mix = _each(parts[2], s.n).softmax(-1)
        mix = mix / mix.sum(-2, keepdim=True)
        for _ in range(s.sinkhorn - 1):
            mix = mix / mix.sum(-1, keepdim=True)
            mix = mix / mix.sum(-2, keepdim=True)
        return read, write, mix.transpose(-1, -2)  # column i of the gates says what becomes of stream i


class SublayerOfStreams(Sublayer):
    """A residual sublayer that reads several streams and writes to them.

    Attributes:
        connections: gives the weights by which it does.
    """

    connections: nn.Module

    @classmethod
    def of(cls, one: Sublayer, connections: nn.Module) -> SublayerOfStreams:
        """The sublayer of one stream, connected."""
        out = cls(one.branch, one.norm, placement=one.placement, skip=one.skip, multiplier=one.multiplier,
                  parallel=one.parallel, norm_scale=one.norm_scale)  # fmt: skip
        out.connections = connections
        return out

    def parts(self, stream: Tensor, around: Surroundings, onto: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(branch, stream_out): (batch, tokens, features), and n times as many features."""
        read_by, write_by, mix_by = self.connections(stream)
        each = _each(stream, read_by.shape[-1])
        branch = self.branch_of((each * read_by.unsqueeze(-1)).sum(-2), around)
        if onto is None:
            skipped = times(self.skip, each)
            onto = (skipped if mix_by is None else mix_by @ skipped).flatten(-2)
        written = times(self.multiplier, branch).unsqueeze(-2) * write_by.unsqueeze(-1)
        return branch, onto + written.flatten(-2)
