"""What watches a run: metrics to a file, the signal through training, the progress bar, a sweep's veto."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from signalprop.attachment.live_model import evaluating
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.network.layout import KINDS, layout
from signalprop.results.profile import Profile
from signalprop_lab.training.guard import Guard
from signalprop_lab.training.lines import Lines
from signalprop_lab.training.networks import Network

KeepGoing = Callable[[int, float], bool]


def validated(logs: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer says of validation data, but for how long that took."""
    return {k: v for k, v in logs.items() if k.startswith("eval_") and not k.endswith(("_runtime", "_per_second"))}


class Metrics(TrainerCallback):
    """Loss, rate, gradient norm, throughput and validation losses, as JSON lines."""

    def __init__(self, lines: Lines, per_step: int, unit: str) -> None:
        self._lines, self._per_step, self._unit = lines, per_step, unit
        self._since: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = (time.perf_counter(), state.global_step)
        if state.is_world_process_zero:
            self._lines.keep_until(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """The Trainer's own numbers, under the names of docs/training.md."""
        if not state.is_world_process_zero or not logs:
            return
        step = state.global_step
        if "loss" in logs:
            now = time.perf_counter()
            seconds, before = (now - self._since[0], self._since[1]) if self._since else (math.inf, step)
            line = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
            rate = (step - before) * self._per_step / seconds
            self._lines.append(
                {"step": step} | line | {self._unit: step * self._per_step, f"{self._unit}_per_second": round(rate, 1)}
            )
            self._since = (now, step)
        elif "eval_loss" in logs:
            self._lines.append({"step": step} | validated(logs))
            self._since = (time.perf_counter(), step)


class Signal(TrainerCallback):
    """The Profile of the model on one fixed batch, before training, every so many steps, and at the end."""

    def __init__(self, network: Network, batch: Batch, lines: Lines, every: int, guard: Guard) -> None:
        self._network, self._batch, self._lines, self._every = network, batch, lines, every
        self._guard = guard
        self._done: int | None = None
        self.latest: Profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._lines.keep_until(state.global_step)
            if state.global_step == 0:
                self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._measure(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # a run that will go on has its end elsewhere
        if state.is_world_process_zero and self._done != state.global_step and not self._guard.stopping:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        self._done = step
        scheme = self._network.parametrization.scheme
        try:
            with evaluating(self._network.base), torch.random.fork_rng([]):
                self.latest = measure(self._network.base, self._batch, mapping=self._network.mapping, scheme=scheme)
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


class Veto(TrainerCallback):
    """Ends a run that a sweep has seen enough of."""

    def __init__(self, keep_going: KeepGoing) -> None:
        self._keep_going = keep_going
        self.said: int | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not self._keep_going(state.global_step, float(loss)):
            self.said = state.global_step
            control.should_training_stop = True


class Progress(TrainerCallback):
    """A bar with the loss, the throughput and the sublayer whose gradient is furthest off."""

    def __init__(self, name: str, per_step: int, unit: str, signal: Signal | None) -> None:
        self._name, self._per_step, self._unit, self._signal = name, per_step, unit, signal
        self._bar: Any = None
        self._shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from tqdm import tqdm

        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self._name,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no animation
            )
            self._started = (time.perf_counter(), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._bar is None or not logs:
            return
        if "loss" in logs:
            self._shown["loss"] = f"{logs['loss']:.3f}"
            seconds = time.perf_counter() - self._started[0]
            rate = (state.global_step - self._started[1]) * self._per_step / seconds
            self._shown[f"{self._unit}/s"] = f"{rate:,.0f}"
        if "eval_loss" in logs:
            self._shown["eval"] = f"{logs['eval_loss']:.3f}"
        latest = None if self._signal is None else self._signal.latest
        if latest is not None and (found := worst(latest)) is not None:
            place, ratio = found
            self._shown["worst"] = f"{place} (grad {math.exp(min(ratio, 700)):.2g})"
        self._bar.set_postfix(self._shown, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the bar's line, so that what is said next has a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
