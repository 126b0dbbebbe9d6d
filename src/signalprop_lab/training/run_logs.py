"""What watches a run: metrics and the signal to files, the progress bar, and what may end it early."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.network.layout import KINDS, layout
from signalprop.results.profile import Profile
from signalprop.streams.live_model import evaluating
from signalprop_lab.training.json_lines import JsonLines, read_lines
from signalprop_lab.training.networks import Network
from signalprop_lab.training.plateau import left_at
from signalprop_lab.training.processes import by_first

Numbers = Mapping[str, float]


class Watcher:
    """What is notified of a run. Steps count from 1; 0 is before the first."""

    def begins(self, step: int) -> None:
        """The training goes on after this step."""

    def stepped(self, step: int) -> None:
        """A step was done."""

    def logged(self, step: int, numbers: Numbers) -> bool:
        """Of a step: `loss`, `grad_norm` and `learning_rate`; or `eval_loss` and other scores; or those of a monitor.
        Whether the run may go on."""
        return True

    def ended(self, step: int, *, stopping: bool) -> None:
        """The training is over; or it is stopping, and will go on elsewhere."""


def by_group(numbers: Numbers) -> dict[str, float]:
    """The numbers as loggers show them: train/loss, eval/loss."""
    return {f"eval/{k.removeprefix('eval_')}" if k.startswith("eval_") else f"train/{k}": v for k, v in numbers.items()}


class Metrics(Watcher):
    """Loss, rate, gradient norm, throughput and validation losses, as JSON lines."""

    def __init__(self, lines: JsonLines, per_step: int, unit: str) -> None:
        self._lines, self._per_step, self._unit = lines, per_step, unit

    def begins(self, step: int) -> None:
        self._since = (time.perf_counter(), step)
        self._lines.keep_until(step)

    def logged(self, step: int, numbers: Numbers) -> bool:
        now = time.perf_counter()
        if "loss" in numbers:
            (since, before), unit = self._since, self._unit
            rate = (step - before) * self._per_step / (now - since)
            read = {unit: step * self._per_step, f"{unit}_per_second": round(rate, 1)}
            self._lines.append({"step": step, **numbers, **read})
            self._since = (now, step)
        elif "eval_loss" in numbers:
            self._lines.append({"step": step, **numbers})
            self._since = (now, step)
        return True


class Signal(Watcher):
    """The Profile of the model on one fixed batch, before training, every so many steps, and at the end."""

    def __init__(self, network: Network, batch: Batch, lines: JsonLines, every: int) -> None:
        self._network, self._batch, self._lines, self._every = network, batch, lines, every
        self._done: int | None = None
        self.latest: Profile | None = None

    def begins(self, step: int) -> None:
        self._lines.keep_until(step)
        if step == 0:
            self._measure(0)

    def stepped(self, step: int) -> None:
        if step % self._every == 0:
            self._measure(step)

    def ended(self, step: int, *, stopping: bool) -> None:
        if self._done != step and not stopping:
            self._measure(step)

    def _measure(self, step: int) -> None:
        self._done = step
        scheme = self._network.parametrization.scheme
        try:
            with evaluating(self._network.base), torch.random.fork_rng([]):
                self.latest = measure(self._network.anatomy, self._batch, scheme=scheme)
        except InputError as error:
            self._lines.append({"step": step, "error": str(error)})
            return
        self._lines.append({"step": step, "profile": self.latest.to_json()})


def worst(profile: Profile) -> tuple[str, float] | None:
    """The sublayer whose gradient is furthest from that of the last one, and the log of that ratio of variances; None:
    no gradient was measured."""
    if profile.gradient is None:
        return None
    ratios = profile.gradient["stream_in"].log_variance
    i = int(np.nanargmax(np.abs(ratios)))
    rows = layout(profile.architecture)
    return f"{KINDS[rows.kind[i]]} {rows.layer[i]}", float(ratios[i])


class EndsWhenLearning(Watcher):
    """Ends a run that has left the plateau. It reads what `Metrics`, which is notified before it, has written."""

    def __init__(self, metrics: Path, chance: float) -> None:
        self._metrics, self._chance = metrics, chance

    def logged(self, step: int, numbers: Numbers) -> bool:
        return by_first(lambda: left_at(read_lines(self._metrics), self._chance)) is None


class Progress(Watcher):
    """A bar with the loss, the throughput and the sublayer whose gradient is furthest off."""

    def __init__(self, name: str, steps: int, per_step: int, unit: str, signal: Signal | None) -> None:
        self._name, self._steps, self._per_step, self._unit, self._signal = name, steps, per_step, unit, signal
        self._bar: Any = None
        self._shown: dict[str, str] = {}

    def begins(self, step: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._steps,
            initial=step,
            desc=self._name,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no animation
        )
        self._started = (time.perf_counter(), step)

    def stepped(self, step: int) -> None:
        self._bar.update(step - self._bar.n)

    def logged(self, step: int, numbers: Numbers) -> bool:
        if "loss" in numbers:
            self._shown["loss"] = f"{numbers['loss']:.3f}"
            began, before = self._started
            rate = (step - before) * self._per_step / (time.perf_counter() - began)
            self._shown[f"{self._unit}/s"] = f"{rate:,.0f}"
        if "eval_loss" in numbers:
            self._shown["eval"] = f"{numbers['eval_loss']:.3f}"
        latest = None if self._signal is None else self._signal.latest
        if latest is not None and (found := worst(latest)) is not None:
            place, ratio = found
            self._shown["worst"] = f"{place} (grad {math.exp(min(ratio, 700)):.2g})"
        self._bar.set_postfix(self._shown, refresh=False)
        return True

    def close(self) -> None:
        """End the bar's line, so that what is said next starts a new line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
