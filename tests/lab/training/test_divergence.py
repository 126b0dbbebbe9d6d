"""A number that is not finite ends a run before it reaches the weights, and the place is named; so does SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trained
from signalprop.models.transformer import Transformer
from signalprop_lab.training.divergence import Diverged, Pass, random_states
from signalprop_lab.training.interrupts import Interrupts


class Overflowing(torch.autograd.Function):
    """The identity, whose gradient overflows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1e38 * 1e38


def guarded(folder: Path, **changes: Any) -> Any:
    """A loop of 3 steps, a checkpoint after each."""
    quiet = {"save": 1, "evaluate": 0, "signal": 0}
    short = {"budget": {"steps": 3}} | changes
    return trained.loop_of(trained.recipe_of(folder, cadence=quiet, **short), folder)


def sublayers(loop: Any) -> list[nn.Module]:
    base = loop.network.base
    assert isinstance(base, Transformer)
    return list(base.sublayers())


class TestDiverged:
    def test_an_overflow_is_named(self, tmp_path: Path) -> None:
        loop = guarded(tmp_path)
        function: Any = sublayers(loop)[3].branch.function
        with torch.no_grad():
            for p in function.parameters():
                p.mul_(1e30)
        with pytest.raises(Diverged) as caught:
            loop.train()
        assert str(caught.value).startswith(
            "the loss is not finite in step 1: layer 1 feed-forward, branch: the signal holds"
        )
        assert "the parameters are finite, so the computation overflowed there" in str(caught.value)
        assert trained.checkpoint_steps(tmp_path) == [] and loop.step == 0

    def test_a_weight_is_named(self, tmp_path: Path) -> None:
        loop = guarded(tmp_path)
        names = {id(p): name for name, p in loop.network.base.named_parameters()}
        weight = next(sublayers(loop)[2].branch.function.parameters())
        with torch.no_grad():
            weight[0] = float("nan")
        with pytest.raises(Diverged, match=r"layer 1 attention, branch: .*parameter .* is not finite") as caught:
            loop.train()
        assert names[id(weight)] in str(caught.value)

    def test_a_gradient_is_named(self, tmp_path: Path) -> None:
        loop = guarded(tmp_path)
        sublayers(loop)[1].branch.register_forward_hook(lambda *given: Overflowing.apply(given[-1]))
        with pytest.raises(Diverged) as caught:
            loop.train()
        # behind the branch it is as it was, before the branch it is bad
        assert str(caught.value) == (
            "the gradient is not finite in step 1: layer 0 feed-forward, stream_in: "
            "the gradient holds NaN or infinite values first here"
        )

    def test_weights_that_the_step_itself_spoilt_are_not_kept(self, tmp_path: Path) -> None:
        loop = guarded(tmp_path, optimizer={"learning_rate": 1e39})
        with pytest.raises(Diverged, match=r"parameter .* is not finite after step 1"):
            loop.train()
        assert trained.checkpoint_steps(tmp_path) == []


class TestLossScaling:
    """With float16 accelerate leaves out steps whose gradient overflows, while it looks for the loss scale."""

    @pytest.fixture(scope="class")
    @staticmethod
    def loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
        """After a step."""
        folder = tmp_path_factory.mktemp("scaling")
        quiet = {"save": 0, "evaluate": 0, "signal": 0}
        loop = trained.loop_of(trained.recipe_of(folder, cadence=quiet, budget={"steps": 1}), folder)
        loop.train()
        return loop

    def step(self, loop: Any, scale: float | None, loss: float, norm: float) -> None:
        loop.accelerator.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        ids = torch.zeros(1, 4, dtype=torch.long)
        loop.passes[:] = [Pass({"inputs": ids, "labels": ids}, 4.0, torch.tensor(loss), random_states())]
        loop._norm = torch.tensor(norm)
        loop._refuse_not_finite()

    def test_an_overflown_gradient_is_normal(self, loop: Any) -> None:
        self.step(loop, 65536.0, 2.0, float("inf"))
        self.step(loop, 1.0, 2.0, float("nan"))

    @pytest.mark.parametrize(
        ("scale", "loss", "norm"),
        [(65536.0, float("nan"), 1.0), (0.5, 2.0, float("inf")), (None, 2.0, float("nan")), (None, float("inf"), 1.0)],
    )
    def test_these_are_not(self, loop: Any, scale: float | None, loss: float, norm: float) -> None:
        with pytest.raises(Diverged, match="it was finite when the step was repeated"):
            self.step(loop, scale, loss, norm)


class TestInterrupts:
    def test_sigterm_is_a_wish(self, capfd: pytest.CaptureFixture[str]) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == before
        assert capfd.readouterr().err.count("\n") == 1

    @pytest.fixture
    def handler(self) -> Iterator[Callable[[Any], Any]]:
        """Sets what SIGINT does until the test is over; a shell's background jobs are started with it ignored."""
        before = signal.getsignal(signal.SIGINT)
        yield partial(signal.signal, signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    def test_a_second_ctrl_c_interrupts(self, handler: Callable[[Any], Any]) -> None:
        handler(signal.default_int_handler)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.received == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
