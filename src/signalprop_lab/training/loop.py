"""The training loop, on accelerate: from a network and its data to trained weights, step by step.

accelerate gives devices, mixed precision, several processes (DDP, FSDP2) and batches of each process. All else is here:
the loss over the labels of the global batch, the schedule, what is logged, evaluated and kept, and what ends a run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from signalprop.errors import InputError
from signalprop.streams.wrappers import unwrapped
from signalprop_lab.training import checkpoints, weight_files
from signalprop_lab.training.devices import accelerator_of, passes_of
from signalprop_lab.training.divergence import Diverged, Pass, explained, random_states
from signalprop_lab.training.examples import IGNORED, Examples, Ordered, Prepared, Streamed, collate
from signalprop_lab.training.interrupts import Interrupts
from signalprop_lab.training.networks import Network, network_of
from signalprop_lab.training.optimizers import make_optimizer, rate_factor
from signalprop_lab.training.processes import anywhere, first, gathered, several, sharded, told
from signalprop_lab.training.recipe import Recipe
from signalprop_lab.training.recipe_files import flat
from signalprop_lab.training.run_logs import Watcher, by_group

# A scale of float16's loss below which gradients still overflow: they would in any case.
_SMALLEST_SCALE = 1.0


def cross_entropy(logits: Tensor, labels: Tensor, count: Tensor | float, smoothing: float = 0.0) -> Tensor:
    """Sum over labelled positions of the cross-entropy in nats, over `count`; logits (..., classes), labels (...)."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten().long(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / count


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's output."""
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return logits


class Loop:
    """A training run while it lasts.

    Attributes:
        step: how many are done. folder: where checkpoints are. live: the model whose parameters are trained, sharded
            where the run shards it. monitor: a SignalMonitor, or None.
        watchers: who is notified, in this order. ends: whether the run is to end after the step that is being
            done. stopping: whether a signal asked for that. scores: `evaluate` after the last
            step; empty of a run that diverged or was stopped.
        labels: of the validation examples, in order (-100: none). chance: loss of the best guess of them that reads no
            input, nats.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        prepared: Prepared,
        folder: Path,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.network, self.recipe, self.prepared, self.folder = network, recipe, prepared, folder
        self.watchers: Sequence[Watcher] = ()
        self.monitor: Any = None
        self.interrupts = Interrupts() if interrupts is None else interrupts
        self.step, self.ends, self.stopping = 0, False, False
        self.scores: dict[str, float] = {}
        self._scored = -1
        self._begun, self._earlier_seconds = time.perf_counter(), 0.0
        self.accelerator = accelerator_of(recipe, network, folder.parent)
        self._micro, self._n_passes = passes_of(recipe, self.accelerator.num_processes)
        self._take_validation()
        self.passes: list[Pass] = []
        self._norm, self._rate = torch.tensor(0.0), 0.0  # of the step: the gradient's before it is clipped
        self._waiting = torch.tensor(0.0, device=self.accelerator.device)  # losses since the step that was logged last
        self._logged = 0
        config: Any = getattr(network.base, "config", None)
        if config is not None:
            config.use_cache = False  # of keys and values, which training does not read

    def _take_validation(self) -> None:
        asked_for, there = self.recipe.cadence.validation_examples, len(self.prepared.validation)
        if there < asked_for and first():
            print(
                f"signalprop: there are only {there:,} of the {asked_for:,} validation examples that "
                "cadence.validation_examples asks for, so the loss is noisier; hold out more with data.validation",
                file=sys.stderr,
            )
        self._validation = Ordered(self.prepared.validation, min(asked_for, there), 0, shuffle=False)
        n = len(self._validation)
        labels = np.concatenate([np.ravel(self._validation[i]["labels"]) for i in range(n)])
        self.labels, self.chance = labels[labels != IGNORED], self.prepared.chance(labels)
        # mean number of labels, so that a mean over examples is the mean over labels
        self._labels_per_example = float(self.labels.size) / n

    def _loader(self, examples: Any) -> Any:
        """The batches of this process."""
        loader = DataLoader(
            examples,
            batch_size=self._micro,
            collate_fn=lambda some: self.network.arguments(collate(some, self.prepared.pads)),
            pin_memory=torch.cuda.is_available(),
        )
        return self.accelerator.prepare_data_loader(loader)

    def train(self, checkpoint: Path | None = None) -> None:
        """Train to the last step, or until the run is asked to end.

        Args:
            checkpoint: of this run, to go on from.

        Raises:
            Diverged: a number is not finite. Watchers are notified of the end all the same.
            InputError: a checkpoint of another run; a full disk.
        """
        self._prepare(checkpoint)
        if self.recipe.report_to:
            settings = {name: str(value) for name, value in flat(self.recipe.to_json()).items()}
            self.accelerator.init_trackers(self.recipe.name, settings)
        for watcher in self.watchers:
            watcher.begins(self.step)
        try:
            for batches in self._steps(checkpoint):
                self._one_step(batches)
                self._after_step()
                if self.ends:
                    break
            if self.stopped:
                self.scores = {}
            elif self._scored != self.step:
                self._evaluate()
        except Diverged:
            self.scores = {}
            self._tell_end()
            raise
        self._tell_end()

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the run before its last step."""
        return self.stopping and self.step < self.recipe.budget.steps

    def _tell_end(self) -> None:
        for watcher in self.watchers:
            watcher.ended(self.step, stopping=self.stopping)
        if self.monitor is not None:
            self.monitor.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _prepare(self, checkpoint: Path | None) -> None:
        """Model, optimizer, schedule and data, where the checkpoint left them."""
        recipe, network, accelerator = self.recipe, self.network, self.accelerator
        if not recipe.parallel.fsdp:  # each process takes its share of a sharded one when accelerate has it
            if checkpoint is not None:
                checkpoints.load_weights(network.module, checkpoint)
            network.module.to(accelerator.device)
        optimizer = make_optimizer(network.groups(recipe), recipe)
        self.model, self.optimizer = accelerator.prepare(network.module, optimizer)
        self.live = unwrapped(self.model)
        if recipe.parallel.fsdp and several() and not sharded(self.live):
            raise InputError("parallel.fsdp is set, and accelerate has not sharded the model; see its configuration")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            cast(Any, self.optimizer), lambda step: rate_factor(step, recipe.budget.steps, recipe.schedule)
        )
        train, n = self.prepared.train, recipe.budget.steps * recipe.budget.batch_size  # exactly what a run reads
        self._data = (
            Ordered(train, n, recipe.seed)
            if isinstance(train, Examples)
            else Streamed(train, n, recipe.seed, recipe.budget.batch_size)
        )
        if checkpoint is not None:
            self._go_on_from(checkpoint)
        self._batches = self._loader(self._data)
        self._validation_batches = self._loader(self._validation)
        self.model.zero_grad()

    def _go_on_from(self, checkpoint: Path) -> None:
        if self.recipe.parallel.fsdp:
            checkpoints.load_weights(self.model, checkpoint)
        self.step = checkpoints.step_of(checkpoint)
        state = checkpoints.load_optimizer(checkpoint, self._optimized, self.live)
        self.schedule.load_state_dict(state["schedule"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._earlier_seconds = float(state["seconds"])
        self._logged = state["last_logged"]
        self._waiting += checkpoints.waiting_loss(
            checkpoint, self.accelerator.process_index, self.accelerator.num_processes
        )
        self._data.begin(self.step * self.recipe.budget.batch_size, checkpoints.offset_of(checkpoint))

    @property
    def _optimized(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's."""
        return cast(torch.optim.Optimizer, self.optimizer.optimizer)

    def _steps(self, checkpoint: Path | None) -> Iterator[list[dict[str, Tensor]]]:
        """The batches of every step that is left, as this process passes over them."""
        batches = iter(self._batches)
        while self.step < self.recipe.budget.steps:
            found = list(islice(batches, self._n_passes))
            if not found:
                return
            if checkpoint is not None:  # after the loader, which has drawn a number for its seed
                checkpoints.restore_random(checkpoint, self.accelerator.process_index)
                checkpoint = None
            yield found

    # --- one step -----------------------------------------------------------------------------------------------------

    def loss_of(self, logits: Tensor, labels: Tensor, count: Tensor | float) -> Tensor:
        """The loss that is trained on, of one pass: its labels' sum over `count`, those of the whole step."""
        return cross_entropy(logits, labels, count, self.recipe.optimizer.label_smoothing)

    def _one_step(self, batches: list[dict[str, Tensor]]) -> None:
        """Forward and backward passes, clipping, the optimizer.

        Raises:
            Diverged: before the optimizer's step, a loss or gradient is not finite.
        """
        accelerator, number = self.accelerator, self.step + 1
        count = sum(batch["labels"].ne(IGNORED).sum() for batch in batches)
        count = accelerator.gather(cast(Tensor, count)).sum() / 1  # of all processes, as a float
        self.passes.clear()
        self.model.train()
        due = self.monitor is not None and self.monitor.due(number)
        for i, batch in enumerate(batches):
            seen = self.monitor.sampling(number) if due and i == 0 else nullcontext()
            alone = accelerator.no_sync(self.model) if i < len(batches) - 1 else nullcontext()
            with alone, seen:
                self._waiting += self._one_pass(batch, count)
        if self.monitor is not None:
            self.monitor.record(number, self.passes[-1].loss)
        clip = self.recipe.optimizer.clip
        norm: Any = accelerator.clip_grad_norm_(self.model.parameters(), math.inf if clip is None else clip)
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        numbers = None if self.monitor is None else self.monitor.end()
        self._refuse_not_finite()
        self.optimizer.step()
        self._rate = float(self.schedule.get_last_lr()[0])
        if not accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.model.zero_grad()
        self.step = number
        if numbers is not None:
            self.monitor.write(numbers, number)
            self._log(numbers)

    def _one_pass(self, batch: dict[str, Tensor], count: Tensor) -> Tensor:
        before = random_states()
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        loss = self.loss_of(logits_of(self.model(**inputs)), batch["labels"], count)
        loss = loss * int(self.accelerator.num_processes)  # the mean over the processes is taken of gradients
        self.accelerator.backward(loss)
        self.passes.append(Pass(batch, count, loss.detach(), before))
        return loss.detach()

    def _refuse_not_finite(self) -> None:
        """Look at the numbers of the step before they get into the weights; one look at the device.

        With float16 a gradient that is not finite is part of looking for the loss scale, and such steps are left out.
        """
        losses = [one.loss for one in self.passes]
        seen = torch.stack([torch.stack(losses).sum().float(), self._norm.float().to(losses[0].device)])
        loss_bad, norm_bad = (not math.isfinite(x) for x in seen.tolist())
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() >= _SMALLEST_SCALE:
            norm_bad = False
        wish = self.interrupts.received is not None
        loss_bad, norm_bad, self.stopping = anywhere([loss_bad, norm_bad, wish], self.accelerator.device)
        if loss_bad or norm_bad:
            what = "the loss" if loss_bad else "the gradient"
            raise Diverged(f"{what} is not finite in step {self.step + 1}: {self._place()}")

    def _place(self) -> str:
        """Where the passes of the step went wrong first, in words; every process calls it."""
        one: Callable[[Network, Sequence[Pass]], str] = partial(
            explained, logits_of=logits_of, loss_of=self.loss_of, autocast=self.accelerator.autocast
        )
        if not sharded(self.live):
            return next((place for place in gathered(one(self.network, self.passes)) if place), _NOT_AGAIN)
        # a sharded model runs in all processes or in none, so the first one repeats the step with a whole model
        weights = weight_files.weights_of(self.live)
        everyone = gathered([some.on_cpu() for some in self.passes])
        place = None
        if first():
            network = network_of(self.recipe, self.prepared)
            weight_files.fill_weights(network.module, weights, self.folder)
            network.module.train()
            place = next((p for p in (one(network, some) for some in everyone) if p), None)
        return told(place) or _NOT_AGAIN

    # --- after a step -------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        """Log, evaluate, save and stop, where it is time to."""
        step, last, c = self.step, self.step >= self.recipe.budget.steps, self.recipe.cadence
        self.ends = last or self.stopping
        for watcher in self.watchers:
            watcher.stepped(step)
        if step == 1 or step % c.log == 0:
            loss = self.accelerator.gather(self._waiting.reshape(1)).mean().item()
            self._waiting -= self._waiting
            mean, norm = loss / (step - self._logged), self._norm.item()
            self._log({"loss": mean, "grad_norm": norm, "learning_rate": self._rate})
            self._logged = step
        if c.evaluate and (last or step % c.evaluate == 0):
            self._evaluate()
        if (c.save and (last or step % c.save == 0)) or (self.stopping and not last):
            self._save()

    def _log(self, numbers: dict[str, float]) -> None:
        if self.recipe.report_to:
            self.accelerator.log(by_group(numbers), step=self.step)
        for watcher in self.watchers:
            if not watcher.logged(self.step, numbers):
                self.ends = True

    def _evaluate(self) -> None:
        self.scores, self._scored = self.evaluate(), self.step
        self._log(self.scores)

    def evaluate(self) -> dict[str, float]:
        """`eval_loss`, nats per label of the validation examples, and `eval_...` for every other score."""
        self.model.eval()
        losses: list[Tensor] = []
        seen: list[tuple[Tensor, Tensor]] = []
        for batch in self._validation_batches:
            labels = batch.pop("labels")
            # compiling it once more, without gradients, would take longer than it saves
            uncompiled = torch.compiler.set_stance("force_eager") if self.recipe.compile else nullcontext()
            with torch.no_grad(), uncompiled:
                logits = logits_of(self.live(**batch))
                loss = cross_entropy(logits, labels, len(labels) * self._labels_per_example)
            losses.append(self.accelerator.gather_for_metrics(loss.repeat(self._micro)))
            if self.prepared.score is not None:
                both = (logits.argmax(-1), labels)
                both = self.accelerator.pad_across_processes(both, dim=1, pad_index=IGNORED)
                guessed, asked = self.accelerator.gather_for_metrics(both)
                seen.append((guessed[asked != IGNORED], asked[asked != IGNORED]))
        found = {"eval_loss": torch.cat(losses).cpu().numpy().mean().item()}
        if self.prepared.score is not None:
            guessed, asked = (torch.cat(some).cpu().numpy() for some in zip(*seen, strict=True))
            found |= {f"eval_{name}": value for name, value in self.prepared.score(guessed, asked).items()}
        return found

    def seconds(self) -> float:
        """Time that the run has taken up to now, over all restarts."""
        return self._earlier_seconds + time.perf_counter() - self._begun

    def _save(self) -> None:
        """Write a checkpoint; every process calls it."""
        weights = weight_files.weights_of(self.live)
        bad = told(weight_files.not_finite(weights))
        if bad is not None:
            raise Diverged(f"parameter {bad} is not finite after step {self.step}")
        scaler = self.accelerator.scaler
        state = {
            "schedule": self.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "last_logged": self._logged,
            "seconds": self.seconds(),
        }
        given = self.step * self.recipe.budget.batch_size
        checkpoints.write(
            self.folder / f"checkpoint-{self.step}",
            weights,
            (self._optimized, self.live),
            state,
            checkpoints.process_state(self._waiting.item()),
            self._data.offset(given) if first() else None,
            keep=self.recipe.cadence.keep,
        )


_NOT_AGAIN = "it was finite when the step was repeated"
