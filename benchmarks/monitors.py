"""Training steps that are watched: by signalprop's Probe, by hooks written by hand, and by two other packages.

What each records on a watched step of a decoder with L layers (2 L sublayers, a stream of 2 L + 1 tensors):

    probe                 variance, mean and token correlation of every stream and branch tensor, forward and backward
    by hand               the same, for this one model: no padding, no float64 where float32 is not enough, no names
    read once             nothing of use: the sum of the same tensors, which is what reading them costs at least
    torch-module-monitor  variance and token correlation, forward only: outputs of attention, feed-forward and layers
    unit-scaling          mean, mean absolute value, deviation, largest and smallest absolute value of every tensor of
                          the graph and of its gradient, weights too; no token correlation

The last two are imported only where they are asked for: they live in an environment of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Decoder
from signalprop.measurement import Probe
from signalprop.results.profile import Profile

Reduce = Callable[[Tensor], tuple[Tensor, ...]]


def sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """All that the moments of (batch, tokens, features) need: the sum of squares, and sums over tokens."""
    flat = x.reshape(-1)
    return torch.dot(flat, flat), x.sum(1)


def finished(squares: Tensor, sums: Tensor, tokens: int) -> Tensor:
    """Mean, variance and token correlation (n, 3) of the sums (n,) and (n, batch, features) of n tensors."""
    batch, features = sums.shape[1:]
    entries, pairs = batch * tokens * features, batch * tokens * (tokens - 1) * features
    mean = sums.sum((1, 2)) / entries
    variance = squares / entries - mean * mean
    covariance = (sums.square().sum((1, 2)) - squares) / pairs - mean * mean
    return torch.stack([mean, variance, covariance / variance], 1)


def moments(x: Tensor) -> Tensor:
    """Mean, variance and token correlation (3) of (batch, tokens, features)."""
    squares, added = sums(x)
    return finished(squares[None], added[None], x.shape[1])[0]


def read_once(x: Tensor) -> tuple[Tensor]:
    """One pass over the tensor."""
    return (x.sum(),)


class Hooks:
    """A reduction of every stream and branch tensor of a Decoder, forward and backward; of the gradients those of the
    stream alone, since an addition hands its branch the same one."""

    def __init__(self, model: Decoder, reduce: Reduce) -> None:
        self.forward: list[tuple[Tensor, ...]] = []
        self.backward: list[tuple[Tensor, ...]] = []
        self.reduce = reduce
        blocks = list(model.blocks)
        norms: list[Any] = [norm for block in blocks for norm in (block.norm_1, block.norm_2)]
        branches: list[Any] = [branch for block in blocks for branch in (block.attention, block.feed_forward)]
        self.handles = [norm.register_forward_pre_hook(self.enters) for norm in (*norms, model.norm)]
        self.handles += [branch.register_forward_hook(self.leaves) for branch in branches]

    def enters(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A stream tensor: this one, and its gradient when that is known."""
        self.forward.append(self.reduce(args[0].detach()))
        args[0].register_hook(self.flows_back)

    def leaves(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A branch."""
        self.forward.append(self.reduce(output.detach()))

    def flows_back(self, gradient: Tensor) -> None:
        """The gradient of a stream tensor."""
        self.backward.append(self.reduce(gradient))

    def read(self) -> list[Tensor]:
        """What the reduction gave, for all tensors together; and no hooks any more."""
        for handle in self.handles:
            handle.remove()
        return [torch.stack(parts) for parts in zip(*self.forward, *self.backward, strict=True)]


class Steps:
    """Training steps (forward, cross-entropy, backward, AdamW) of one set of weights, watched or not.

    Every monitor that leaves something in the model has modules of its own around the same weights.
    """

    def __init__(
        self,
        n_layers: int,
        width: int,
        heads: int,
        batch: int,
        tokens: int,
        vocab_size: int = 1000,
        prepare: Callable[[Decoder], None] = lambda model: None,
        device: torch.device | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = Decoder(n_layers, width, heads, vocab_size, tokens)
        prepare(self.model)
        self.model.to(device)
        self.ids = torch.randint(0, vocab_size, (batch, tokens), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.probe = Probe(self.model, every=10)

    def update(self, model: nn.Module) -> None:
        """Forward and backward."""
        F.cross_entropy(model(self.ids).flatten(0, 1), self.ids.flatten()).backward()

    def finish(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bare(self) -> None:
        """A step that nobody watches."""
        self.update(self.model)
        self.finish()

    def probed(self, step: int) -> Profile | None:
        """A step with a probe of every tenth step, of which this is number `step`; and what it saw."""
        self.probe.steps = step
        with self.probe:
            self.update(self.model)
            profile = self.probe.profile()
        self.finish()
        return profile

    def hooked(self, reduce: Reduce) -> list[Tensor]:
        """A step with hooks written by hand, and what they saw."""
        hooks = Hooks(self.model, reduce)
        self.update(self.model)
        seen = hooks.read()
        self.finish()
        return seen

    def by_hand(self) -> list[list[float]]:
        """A step with hooks for the moments, and the moments."""
        found: list[list[float]] = finished(*self.hooked(sums), self.ids.shape[1]).tolist()
        return found

    def read_once(self) -> list[float]:
        """A step that reads all the tensors, and their sums."""
        found: list[float] = self.hooked(read_once)[0].tolist()
        return found

    def module_monitor(self) -> Callable[[int], dict[str, float]]:
        """A step with torch-module-monitor on every tenth, by its number; its hooks stay in the model all the time.

        It can reduce outputs of modules only, and no gradients but those of weights. So that it does no more than it
        must, all other modules are excluded, and one function makes both numbers.
        """
        from torch_module_monitor import ModuleMonitor  # type: ignore[import-not-found]

        watched = r"blocks\.\d+(\.attention|\.feed_forward)?$"
        model = twin(self.model)
        monitor = ModuleMonitor(lambda step: step % 10 == 0, excluded_modules_regex=rf"^(?!{watched})")
        monitor.set_module(model)
        names = (".mean", ".variance", ".correlation")
        monitor.add_activation_metric(
            "signal", moments, watched, lambda seen: dict(zip(names, seen.tolist(), strict=True))
        )

        def step(number: int) -> dict[str, float]:
            monitor.current_step = None
            monitor.begin_step(number)
            self.update(model)
            monitor.end_step()
            self.finish()
            found: dict[str, float] = monitor.get_step_metrics() if number % 10 == 0 else {}
            monitor.storage.clear()
            return found

        return step

    def scale_tracking(self) -> Callable[[], Any]:
        """A step with unit-scaling's `track_scales`; it has no steps in between. Gives the graph with its numbers."""
        from unit_scaling.transforms import track_scales  # type: ignore[import-not-found]

        tracked = track_scales(self.model)
        for own, other in zip(self.model.modules(), tracked.modules(), strict=True):
            other._parameters = own._parameters  # it tracks a copy

        def step() -> Any:
            self.update(tracked)
            self.finish()
            return tracked.scales_graph()

        return step


def twin(model: nn.Module) -> nn.Module:
    """Other modules around the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
