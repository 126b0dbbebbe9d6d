"""Where tokens stand in a stream is found, and correlations are over them: held against plain hooks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp

WIDTH, WORDS = 32, 80


def correlation(x: Tensor) -> float:
    """Of two different tokens of one sequence, of a stream (batch, tokens, features); docs/measuring.md."""
    x = x.double() - x.double().mean()
    tokens = x.shape[1]
    off_diagonal = x.sum(1).square().sum(-1) - x.square().sum((1, 2))
    return float(off_diagonal.mean() / (tokens - 1) / x.square().sum((1, 2)).mean())


def by_hooks(model: nn.Module, layers: nn.ModuleList, x: Tensor, turn: Callable[[Tensor], Tensor]) -> list[float]:
    seen: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _, __, out: seen.append(turn(out.detach()))) for layer in layers]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return [correlation(one) for one in seen]


class TokensFirst(nn.Module):
    """torch's own layers, as they come. `turns`: the model is called with (batch, tokens) and exchanges the two."""

    def __init__(self, *, norm_first: bool = True, causal: bool = False, turns: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, norm_first=norm_first)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.causal, self.turns = causal, turns
        for p in self.stack.parameters():  # nn.TransformerEncoder copies one layer
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids.T if self.turns else ids)
        mask = nn.Transformer.generate_square_subsequent_mask(len(x)) if self.causal else None
        out = self.head(self.stack(x, mask=mask, is_causal=self.causal))
        return out.transpose(0, 1) if self.turns else out


@pytest.fixture(autouse=True)
def modules_run():
    """PyTorch computes its own layers past their modules in evaluation, where it may."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(
    ("shape", "turns", "norm_first"),
    [((24, 3), False, False), ((6, 20), True, False), ((5, 5), False, True), ((24, 3), True, True)],
)
def test_tokens_before_sequences(shape: tuple[int, int], turns: bool, norm_first: bool) -> None:
    model = TokensFirst(norm_first=norm_first, turns=turns).eval()
    ids = torch.randint(0, WORDS, shape)
    ids[:, 0] = 7  # one sequence (or one position) repeats one word
    profile = sp.measure(model, ids)
    wanted = by_hooks(model, model.stack.layers, ids, lambda x: x.transpose(0, 1))
    np.testing.assert_allclose(profile.forward["stream_out"].token_correlation[1::2], wanted, rtol=1e-4, atol=1e-6)
    assert any("(tokens, batch, features)" in note for note in profile.notes)


def test_the_next_token_is_of_the_same_sequence() -> None:
    model = TokensFirst(causal=True).eval()
    ids = torch.randint(0, WORDS, (12, 12))
    profile = sp.measure(model, ids)
    wanted = sp.measure(model, ids, loss=lambda out: F.cross_entropy(out[:-1].reshape(-1, WORDS), ids[1:].reshape(-1)))
    assert profile.gradient_scale == pytest.approx(wanted.gradient_scale)


@pytest.mark.slow
def test_a_prediction_sees_the_mask_along_tokens() -> None:
    ratios = []
    for seed in range(10):
        comparison = sp.compare(TokensFirst(causal=True, seed=seed).eval(), inputs=torch.randint(0, WORDS, (24, 4)))
        assert comparison.predicted.architecture.kind == "decoder"
        pair = (p.forward["stream_out"].log_variance for p in (comparison.measured, comparison.predicted))
        ratios.append(np.subtract(*pair))
    error = np.std(ratios, axis=0, ddof=1) / np.sqrt(len(ratios))
    assert (error < 0.05).all()  # or the next line would say nothing
    assert (np.abs(np.mean(ratios, 0)) < 4 * error + 0.02).all()


def test_probe_and_monitor_count_along_tokens() -> None:
    model = TokensFirst(causal=True)
    ids = torch.randint(0, WORDS, (12, 4))
    wanted = by_hooks(model, model.stack.layers, ids, lambda x: x.transpose(0, 1))
    with sp.Probe(model) as probe:
        model(ids).logsumexp(-1).mean().backward()
        profile = probe.profile()
    assert profile is not None
    np.testing.assert_allclose(profile.forward["stream_out"].token_correlation[1::2], wanted, rtol=1e-4, atol=1e-6)
    with sp.SignalMonitor(model, skip_first=0) as monitor:
        loss = model(ids).logsumexp(-1).mean()
        loss.backward()
        numbers = monitor.step(loss)
    assert numbers is not None
    assert numbers["signal/layer_2/token_correlation"] == pytest.approx(wanted[2], rel=1e-4)


class Block(nn.Module):
    """Attention over all dimensions but the last, or over the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2) if x.ndim == 4 else x
        parts = self.qkv(self.before(rows)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(-3, -2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)
        x = x + self.out(seen).view(x.shape)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Packed(nn.Module):
    """All tokens in one row: (tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enters: nn.Module = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enters(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Grid(Packed):
    """An image's patches in rows and columns: (batch, height, width, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.enters = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enters(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@pytest.mark.parametrize(
    ("model", "x", "turn", "said"),
    [
        (Packed, torch.arange(40), lambda x: x[None], "taken as one sequence"),
        (
            Grid,
            torch.linspace(-2, 2, 2 * 3 * 256).view(2, 3, 16, 16).sin(),
            lambda x: x.flatten(1, 2),
            "rows and columns",
        ),
    ],
)
def test_streams_without_a_dimension_of_tokens_are_folded(
    model: type[Packed], x: Tensor, turn: Callable[[Tensor], Tensor], said: str
) -> None:
    live = model()
    profile = sp.measure(live, x, loss=lambda out: out.logsumexp(-1).mean())
    wanted = by_hooks(live, live.blocks, x, turn)
    np.testing.assert_allclose(profile.forward["stream_out"].token_correlation[1::2], wanted, rtol=1e-4, atol=1e-6)
    assert any(said in note for note in profile.notes)


def test_diagnose_refuses_tokens_before_sequences() -> None:
    with pytest.raises(sp.InputError, match=r"this model's is \(tokens, batch, features\)"):
        sp.diagnose(TokensFirst(causal=True))
