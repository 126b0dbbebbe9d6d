"""Shapes of code that models come in: blocks in a dictionary or in lists with None, the loss alone, skipped layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp

WIDTH, WORDS = 32, 60
IDS = torch.randint(0, WORDS, (3, 12), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.between(x))


class Model(nn.Module):
    def __init__(self, blocks: nn.Module | None = None, skips: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.skips = nn.Embedding(WORDS, WIDTH), skips
        self.blocks = blocks or nn.ModuleList(Block() for _ in range(3))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def steps(self) -> Iterable[Any]:
        return self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for step in self.steps():
            if not (self.training and float(torch.rand(())) < self.skips):
                x = step(x)
        return self.head(self.final(x))


class PairsWithNone(Model):
    """A list of ((norm before, norm after), branch), as x-transformers has it, where one norm is None."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for (before, _), branch in self.steps():
            x = x + branch(before(x))
        return self.head(self.final(x))


class LossAlone(Model):
    def forward(self, ids: Tensor) -> Any:
        return F.cross_entropy(super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class InDataclass(Model):
    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits)


def pairs() -> nn.ModuleList:
    kinds = (Attention, FeedForward) * 3
    return nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), None]), kind()]) for kind in kinds)  # type: ignore[list-item]


class Pair(nn.Module):
    """What the last branch gave, and what it is to be added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        residual = residual + self.attention(self.first(residual))
        return self.feed_forward(self.second(residual)), residual


class Pairs(Model):
    """Fused additions: the sum of a block stands in the next one. An argument that may be None has to be given."""

    def __init__(self, _: Any = None) -> None:
        super().__init__(nn.ModuleList(Pair() for _ in range(3)))

    def forward(self, ids: Tensor, mask: Any) -> Tensor:
        hidden, residual = self.words(ids), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.head(self.final(hidden + residual))


def test_blocks_that_carry_what_is_to_be_added() -> None:
    torch.manual_seed(0)
    model, called = Pairs(), {"ids": IDS, "mask": None}
    seen: list[Tensor] = []
    for norm in [norm for block in model.blocks for norm in (block.first, block.second)] + [model.final]:
        norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double()))
    with torch.no_grad():
        model(**called)
    streams = [float(x.var(correction=0)) for x in seen]
    profile = sp.measure(model, called)
    np.testing.assert_allclose(profile.forward["stream_in"].variance, streams[:6], rtol=1e-5)
    np.testing.assert_allclose(profile.forward["stream_out"].variance, streams[1:7], rtol=1e-5)
    predicted = sp.predict(model, called)
    assert predicted.architecture.seq_len == IDS.shape[1]  # not what a model that says nothing of it could read
    assert abs(np.log(predicted.forward["stream_out"].variance[-1] / streams[6])) < 0.2


def test_multipliers_that_were_installed_do_not_hide_what_the_weights_are() -> None:
    torch.manual_seed(0)
    model = Model()
    sp.apply(model, "layerscale", initialize=False, inputs=IDS)
    assert sp.check(model).ok
    predicted, measured = sp.predict(model, IDS), sp.measure(model, IDS, backward=False)
    ratio = predicted.forward["branch"].variance / measured.forward["branch"].variance
    assert np.abs(np.log(ratio)).max() < 0.5


def test_sequences_in_a_dictionary_are_taken_one_by_one() -> None:
    class InDictionary(Model):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["tokens"])

    torch.manual_seed(0)
    model = InDictionary()
    assert sp.predict(model, {"batch": {"tokens": IDS}}).architecture.n_heads == 4


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        (Model, lambda: nn.ModuleDict({name: Block() for name in ("low", "middle", "high")})),
        (PairsWithNone, pairs),
        pytest.param(LossAlone, lambda: None, marks=pytest.mark.slow),
        (InDataclass, lambda: None),
    ],
    ids=["dictionary", "pairs", "loss", "dataclass"],
)
def test_the_stream_is_what_enters_the_final_norm(kind: type[Model], blocks: Any) -> None:
    model = kind(blocks())
    seen: list[Tensor] = []
    handle = model.final.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double()))
    with torch.no_grad():
        model(IDS)
    handle.remove()
    profile = sp.measure(model, IDS)
    assert profile.n_sublayers == 6 and profile.gradient is not None
    np.testing.assert_allclose(profile.forward["stream_out"].variance[-1], float(seen[0].var(correction=0)), rtol=1e-5)
    sp.apply(model, "deepscalelm", seed=0)
    assert sp.check(model).ok


def test_losses_of_a_model_are_taken() -> None:
    alone, named, plain = (sp.measure(kind(), IDS) for kind in (LossAlone, InDataclass, Model))
    assert plain.gradient_scale == pytest.approx(alone.gradient_scale) == pytest.approx(named.gradient_scale)


def test_a_step_that_skips_layers_has_no_profile(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(skips=0.4)
    torch.manual_seed(1)
    profiles = []
    with sp.Probe(model.train()) as probe:
        for _ in range(12):
            model(IDS).logsumexp(-1).mean().backward()
            profiles.append(probe.profile())
    whole = [profile for profile in profiles if profile is not None]
    assert 0 < len(whole) < len(profiles)
    wanted = sp.measure(model.eval(), IDS, backward=False).forward["stream_out"].variance
    for profile in whole:
        np.testing.assert_allclose(profile.forward["stream_out"].variance, wanted, rtol=1e-6)
    assert sum("skipped layers" in record.message for record in caplog.records) == 1
