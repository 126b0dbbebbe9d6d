"""Any model, called as its user calls it: one home turns inputs into a call, and every verb takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from plain_block import Block
from signalprop.streams.calls import arguments_in, call, first_sequence

WIDTH, WORDS = 32, 60


class Conditioned(nn.Module):
    """Reads words and three numbers for each sequence, of which nobody can know."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.numbers = nn.Embedding(WORDS, WIDTH), nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        x = self.words(ids) + self.numbers(numbers)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class Scaled(Conditioned):
    """Reads words, and a factor that is the same for every batch."""

    def forward(self, ids: Tensor, *, factor: float) -> Tensor:  # type: ignore[override]
        x = factor * self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


IDS = torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


def by_hooks(model: Conditioned) -> tuple[list[float], list[float]]:
    """(variance, token correlation) of the stream after every block, by plain hooks."""
    seen: list[Tensor] = []
    handles = [b.register_forward_hook(lambda _, __, out: seen.append(out.detach().double())) for b in model.blocks]
    with torch.no_grad():
        model(IDS, NUMBERS)
    for handle in handles:
        handle.remove()
    correlations = []
    for x in seen:
        x = x - x.mean()
        tokens = x.shape[1]
        pairs = (x.sum(1).square().sum(-1) - x.square().sum((1, 2))) / (tokens * (tokens - 1))
        correlations.append(float(pairs.mean() / x.square().sum((1, 2)).mean() * tokens))
    return [float(x.var(correction=0)) for x in seen], correlations


@pytest.mark.parametrize(
    "inputs",
    [
        (IDS, NUMBERS),
        [IDS.numpy(), NUMBERS, IDS],  # a loader's batch, whose last tensor is the labels
        {"ids": IDS, "numbers": NUMBERS},
        lambda model: model(IDS, numbers=NUMBERS),
    ],
    ids=["tuple", "batch", "dictionary", "function"],
)
def test_measure_takes_what_the_model_takes(inputs: Any) -> None:
    model = Conditioned()
    profile = sp.measure(model, inputs)
    stream = profile.forward["stream_out"]
    variance, correlation = by_hooks(model)
    np.testing.assert_allclose(stream.variance[1::2], variance, rtol=1e-5)
    np.testing.assert_allclose(stream.token_correlation[1::2], correlation, rtol=1e-4, atol=1e-5)
    assert any("next token" in note for note in profile.notes)


def test_a_function_gives_the_loss() -> None:
    model = Conditioned()
    given = sp.measure(model, lambda m: m(IDS, NUMBERS).logsumexp(-1).mean())
    wanted = sp.measure(model, (IDS, NUMBERS), loss=lambda logits: logits.logsumexp(-1).mean())
    assert given.gradient is not None and wanted.gradient is not None
    np.testing.assert_allclose(given.gradient["stream_in"].variance, wanted.gradient["stream_in"].variance)
    np.testing.assert_allclose(given.gradient_scale, wanted.gradient_scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (lambda model: 3, "never calls the model"),
        (5, "inputs= is a int"),
        ({"words": IDS}, "do not fit the forward of Conditioned"),
        (IDS, "missing a required argument: 'numbers'"),
    ],
)
def test_what_is_no_call_is_refused(inputs: Any, said: str) -> None:
    with pytest.raises(sp.InputError, match=said):
        sp.measure(Conditioned(), inputs)


@pytest.mark.parametrize(
    "verb", [sp.anatomy, sp.predict, sp.check, sp.compare, sp.diagnose, lambda m: sp.apply(m, "deepscalelm")]
)
def test_every_verb_names_the_remedy_that_it_has(verb: Any) -> None:
    with pytest.raises(sp.InputError, match=r"^give its inputs") as refused:
        verb(Conditioned())
    assert "arguments=" not in str(refused.value)


def test_every_verb_takes_inputs() -> None:
    model = Scaled()
    called = {"ids": IDS, "factor": 2.0}
    with pytest.raises(sp.InputError, match="give its inputs"):
        sp.anatomy(model)
    assert sp.anatomy(model, called).proved
    comparison = sp.compare(model, inputs=called)
    measured = sp.measure(model, called)
    np.testing.assert_allclose(
        comparison.measured.forward["stream_out"].variance, measured.forward["stream_out"].variance
    )
    predicted = sp.predict(Scaled(), called)
    np.testing.assert_allclose(
        predicted.forward["stream_out"].variance, measured.forward["stream_out"].variance, rtol=0.1
    )
    assert sp.diagnose(Scaled(), inputs=called).signal
    fresh = Scaled()
    sp.apply(fresh, "deepscalelm", inputs=called, seed=0)
    assert sp.check(fresh).ok


def test_probe_looks_at_the_first_call() -> None:
    model = Conditioned()
    profiles = []
    with sp.Probe(model, every=2) as probe:
        for _ in range(3):
            model(IDS, NUMBERS).logsumexp(-1).mean().backward()
            profiles.append(probe.profile())
    wanted = sp.measure(model, (IDS, NUMBERS), loss=lambda logits: logits.logsumexp(-1).mean())
    assert profiles[1] is None
    for profile in (profiles[0], profiles[2]):
        assert profile is not None and profile.gradient is not None and wanted.gradient is not None
        np.testing.assert_allclose(
            profile.forward["stream_out"].variance, wanted.forward["stream_out"].variance, rtol=1e-6
        )
        np.testing.assert_allclose(
            profile.gradient["stream_in"].variance, wanted.gradient["stream_in"].variance, rtol=1e-5
        )
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_probe_that_saw_no_call_says_so() -> None:
    with sp.Probe(Conditioned()) as probe, pytest.raises(sp.InputError, match="did not run"):
        probe.profile()


def test_monitor_looks_at_the_first_call() -> None:
    model = Conditioned()
    with sp.SignalMonitor(model, every=2, skip_first=0) as monitor:
        numbers = []
        for _ in range(2):
            loss = model(IDS, NUMBERS).logsumexp(-1).mean()
            loss.backward()
            numbers.append(monitor.step(loss))
    variance, _ = by_hooks(model)
    assert numbers[0] is not None and numbers[1] is not None
    for layer, value in enumerate(variance):
        assert numbers[0][f"signal/layer_{layer}/variance"] == pytest.approx(value, rel=1e-5)


def test_arguments_by_position_and_by_name() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, /, *more: Tensor, scale: float = 1.0, **rest: float) -> Tensor:
            return scale * sum(more, x) + rest.get("shift", 0.0)

    model, x = Odd(), torch.ones(2, 3)
    arguments = arguments_in(model, lambda m: m(x, x, x, scale=2.0, shift=1.0))
    assert call(model, arguments).eq(7).all()


def test_one_sequence_is_kept_unless_tokens_come_first() -> None:
    assert first_sequence({"ids": IDS, "numbers": NUMBERS})["ids"].shape == (1, 16)
    assert first_sequence({"ids": IDS.T})["ids"].shape == (16, 4)
    assert first_sequence({"ids": IDS.flatten()})["ids"].shape == (64,)


def test_what_nobody_can_run_is_one_line() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(WIDTH), Block(WIDTH)).eval()
    with pytest.raises(sp.InputError, match=r"ids is empty, of shape \(4, 0\)"):
        sp.measure(Conditioned(), {"ids": IDS[:, :0], "numbers": NUMBERS})
    with pytest.raises(sp.InputError, match=r"do not fit the forward of Conditioned: .*'ids'"):
        arguments_in(Conditioned(), {"input_ids": IDS})
    with pytest.raises(sp.InputError, match="TorchScript hides its modules"):
        sp.measure(torch.jit.trace(model, IDS), IDS)  # type: ignore[no-untyped-call]


class OfTheLast(Conditioned):
    """Gives the logits of the last token alone where it is given no targets, as nanoGPT does."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(ids, torch.zeros(len(ids), 3))
        if targets is None:
            return logits[:, [-1]], None
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_what_its_loss_needs_is_named_as_it_names_it() -> None:
    with pytest.raises(sp.InputError, match="add `targets` to the arguments"):
        sp.measure(OfTheLast(), IDS)
    assert sp.measure(OfTheLast(), {"ids": IDS, "targets": IDS.roll(-1, 1)}).gradient is not None
