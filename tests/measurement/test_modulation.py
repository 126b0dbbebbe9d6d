"""Modulation of diffusion transformers, on blocks of our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp
from signalprop.errors import InputError
from signalprop.measurement.modulation import Modulation, modulation
from signalprop.network.inputs import measured

WIDTH, HEADS, TOKENS, SAMPLES, LAYERS = 128, 4, 32, 8, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """As DiT's: six numbers a feature from the timestep."""

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.by_token = by_token
        self.said: list[Tensor] = []

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, b1, g1, s2, b2, g2 = self.said = list(self.modulation(F.silu(c))[:, None].chunk(6, -1))
        x = x + g1 * self.attention(self.norm1(x) * (1 + s1) + b1)
        if self.by_token:
            g2 = g2 * x.mean(-1, keepdim=True)
        return x + g2 * self.feed_forward(self.norm2(x) * (1 + s2) + b2)


class Diffusion(nn.Module):
    """Noise in, noise out; weights of Glorot, modulation normal: `gate` around that mean, scale and shift around 0."""

    def __init__(
        self, seed: int, gate: float = 0.5, spread: float = 0.1, shifts: bool = True, by_token: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block(by_token) for _ in range(LAYERS))
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.xavier_normal_(p)
            else:
                nn.init.zeros_(p)
            if "modulation.weight" in name:
                nn.init.normal_(p, std=spread / WIDTH**0.5)
            if "modulation.bias" in name:
                p.data.view(6, WIDTH)[[2, 5]] = gate
            if "modulation.weight" in name and not shifts:
                p.data.view(6, WIDTH, WIDTH)[[1, 4]] = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wave = t[:, None] * 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
        c = 2 * torch.cat([wave.sin(), wave.cos()], -1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, c)
        out: Tensor = self.leave(x)
        return out


def arguments(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SAMPLES, TOKENS, 16, generator=generator)
    return {"x": noise, "t": torch.linspace(0, 999, SAMPLES)}


def profile(model: nn.Module, given: dict[str, Tensor]) -> Any:
    return sp.measure(model, given, loss=lambda out: out.square().mean())


def test_modulation_is_what_the_blocks_computed() -> None:
    model = Diffusion(0, spread=0.3).eval()
    found = modulation(model, arguments())
    for i, block in enumerate(model.blocks):
        s1, b1, g1, s2, b2, g2 = (x[:, 0].double() for x in block.said)  # type: ignore[union-attr]
        for k, (s, b, g) in enumerate(((s1, b1, g1), (s2, b2, g2))):
            row = 2 * i + k
            for own, said in ((found.gate, g), (found.scale, 1 + s), (found.shift, b)):
                np.testing.assert_allclose(own[row], (said**2).mean(1).detach().numpy(), rtol=1e-4)
    assert found.gate.std(1).min() > 0  # timesteps differ
    assert found.names[:2] == ("blocks.0.attention", "blocks.0.feed_forward")


@pytest.mark.parametrize("shifts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_stream_is_predicted_by_mean_squares_over_timesteps(shifts: bool) -> None:
    """Shifts, which attention does not average away, included: a share of .04 is a fifth of the stream."""
    seen, tables, given = [], [], arguments()
    fields: dict[str, Any] = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS, "seq_len": TOKENS}
    plain = sp.scheme("xavier")(sp.Architecture(positions="none", head="none", **fields))
    for seed in range(6):
        model = Diffusion(seed, spread=0.2, shifts=shifts).eval()
        found = modulation(model, given)
        assert (found.shift_share.max() < 1e-9) != shifts
        seen.append(profile(model, given))
        tables.append(found.applied_to(plain))
    with torch.no_grad():
        inputs = measured(model.enter(given["x"]).numpy())
    columns = {name: np.mean([getattr(p, name) for p in tables], 0) for name in ("branch", "norm_gain", "norm_bias")}
    modulated = plain.with_columns(**columns)
    stream = sp.average(seen).forward["stream_out"].variance
    right, wrong = (sp.predict(p, inputs).forward["stream_out"].variance for p in (modulated, plain))
    off = np.log(right / stream)
    assert np.abs(off).max() < 0.08
    without = sp.predict(modulated.with_columns(norm_bias=0.0), inputs).forward["stream_out"].variance
    assert (np.log(without / stream) < -0.1).all() == shifts
    assert np.log(wrong / stream)[-1] > 0.3


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Diffusion(0, by_token=True), "its output times one factor"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), "norm before it"),
    ],
)
def test_what_is_no_modulation_is_refused(model: Any, why: str) -> None:
    made = model().eval()
    given = arguments() if isinstance(made, Diffusion) else {"src": torch.randn(2, 5, 16)}
    with pytest.raises(InputError, match=why):
        modulation(made, given)


def test_a_table_of_another_depth_is_refused() -> None:
    found = Modulation(("a",), np.ones((1, 2)), np.ones((1, 2)), np.zeros((1, 2)))
    with pytest.raises(InputError, match="1 sublayers"):
        found.applied_to(sp.scheme("xavier")(sp.Architecture(n_layers=3, d_model=16, n_heads=2)))
