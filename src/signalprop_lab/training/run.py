"""A training run: from a recipe to a directory that holds everything about it."""

from __future__ import annotations

import copy
import math
import shutil
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.storage import make_folder, write_json, write_text, written_whole
from signalprop.files.validation import typed
from signalprop.repair import fold, save
from signalprop.repair.record import is_pretrained, record_of
from signalprop.results.findings import Finding, Findings
from signalprop.results.profile import Profile
from signalprop.results.verdicts import findings_of
from signalprop_lab.training.checkpoints import clear_leftovers, last_good
from signalprop_lab.training.devices import compile_layers, recompute_layers
from signalprop_lab.training.divergence import Diverged
from signalprop_lab.training.environment import environment
from signalprop_lab.training.examples import Ordered, as_batch, collate
from signalprop_lab.training.interrupts import Interrupts
from signalprop_lab.training.json_lines import JsonLines, read_lines
from signalprop_lab.training.loop import Loop
from signalprop_lab.training.networks import Network, network_of
from signalprop_lab.training.plateau import left_at
from signalprop_lab.training.processes import by_first, first, meet, sharded, told
from signalprop_lab.training.recipe import Recipe, load_recipe
from signalprop_lab.training.result import Result
from signalprop_lab.training.run_folder import alone, begun_earlier
from signalprop_lab.training.run_logs import (
    EndsWhenLearning,
    Metrics,
    Progress,
    Signal,
    Watcher,
)
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.weight_files import fill_weights, weights_of

__all__ = ["Result", "train"]

_SIGNAL_EXAMPLES = 4  # sequences on which the signal is measured through training


@typed
def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    settings: Sequence[str] = (),
    progress: bool = True,
    final: bool = True,
) -> Result:
    """Train what a recipe says, into a directory. In several processes under torchrun, every one calls it.

    Args:
        recipe: a Recipe, a YAML file, or the name of one that comes with the package. settings: `key=value`.
        out: the run's directory (docs/training.md says what is in it).
        resume: go on from the last whole checkpoint, or from the start if there is none; a finished run is left
            as it is, unless the recipe now has more steps and nothing else is new: then it goes on, with the schedule
            of all the steps. Without it, a directory that holds a run is refused.
        progress: a bar on stderr. final: write the trained model (and the folded one).

    Raises:
        InputError: a bad recipe, data or model; a directory that holds another run, or that another process trains in;
            a full disk (the last whole checkpoint stays).
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, settings)
    folder = Path(out)
    meet()
    with ExitStack() as held:

        def take() -> Result | None:
            earlier = begun_earlier(folder, chosen, resume)
            if earlier is None:
                held.enter_context(alone(folder))
                earlier = begun_earlier(folder, chosen, resume)  # another process may have just ended here
            return earlier

        earlier = by_first(take)
        if earlier is not None:
            return earlier
        return _Run(chosen, folder, progress, final).go()


class _Run:
    """One run while it lasts."""

    def __init__(self, recipe: Recipe, folder: Path, progress: bool, final: bool) -> None:
        self.recipe, self.folder, self.final = recipe, folder, final
        self.prepared = prepared = prepare(recipe)
        self.network = network = network_of(recipe, prepared)
        self.counts = [(p.numel(), p.requires_grad) for p in network.module.parameters()]  # before they are sharded
        self.main = first()
        if recipe.gradient_checkpointing:
            recompute_layers(network)
        if recipe.compile:
            compile_layers(network)
        self.interrupts = Interrupts()
        self.loop = Loop(network, recipe, prepared, folder / "checkpoints", interrupts=self.interrupts)
        by_first(self._describe)
        self.metrics = folder / "metrics.jsonl"
        self.progress: Progress | None = None
        self._watch(progress)

    def _watch(self, progress: bool) -> None:
        """Say what watches the run."""
        recipe, loop, c = self.recipe, self.loop, self.recipe.cadence
        unit, size = self.prepared.unit
        per_step, whole = size * recipe.budget.batch_size, not recipe.parallel.fsdp
        watchers: list[Watcher] = []
        if self.main:
            watchers.append(Metrics(JsonLines(self.metrics), per_step, unit))
            if (c.signal or c.monitor) and not whole:
                print("signalprop: the signal is not measured while the model is sharded (parallel)", file=sys.stderr)
            signal = None
            if c.signal and whole:
                signal = Signal(self.network, self._signal_batch(), JsonLines(self.folder / "signal.jsonl"), c.signal)
                watchers.append(signal)
            if progress:
                self.progress = Progress(recipe.name, recipe.budget.steps, per_step, unit, signal)
                watchers.append(self.progress)
        if recipe.budget.until_learning:
            watchers.append(EndsWhenLearning(self.metrics, loop.chance))
        loop.watchers = watchers
        if c.monitor and whole:
            from signalprop.monitoring.monitor import SignalMonitor

            loop.monitor = SignalMonitor(self.network.module, every=c.monitor, compiled=recipe.compile or None)

    def _signal_batch(self) -> Batch:
        validation = Ordered(self.prepared.validation, _SIGNAL_EXAMPLES, 0, shuffle=False)
        examples = [validation[i] for i in range(min(_SIGNAL_EXAMPLES, len(self.prepared.validation)))]
        return as_batch(collate(examples, self.prepared.pads), self.prepared.source)

    def go(self) -> Result:
        """Train, evaluate, save, and say how it went."""
        loop, diverged = self.loop, None
        try:
            with self.interrupts:
                checkpoint = by_first(self._start)
                try:
                    loop.train(checkpoint)
                except Diverged as error:
                    diverged = str(error)
                status, reason, losses = told(self._verdict(diverged))
                folded = self._save() if self.final and status == "finished" else "not saved"
                result = by_first(lambda: self._write_result(status, reason, losses, folded))
        finally:
            if self.progress:
                self.progress.close()
        if not loop.stopped:
            self.interrupts.pass_on()
        return result

    def _start(self) -> Path | None:
        """The checkpoint to go on from; what a killed process left half-written goes."""
        folder = self.folder / "checkpoints"
        make_folder(folder)
        clear_leftovers(self.folder)
        clear_leftovers(folder)
        return last_good(folder)

    def _verdict(self, diverged: str | None) -> tuple[str, str | None, list[float]]:
        """Status, reason, and the losses of the last tenth of what was logged."""
        step = self.loop.step
        losses = [line["loss"] for line in read_lines(self.metrics) if "loss" in line] if self.main else []
        tail = [x for x in losses[-max(1, len(losses) // 10) :] if x is not None]
        if diverged is not None:
            return "diverged", diverged, tail
        if self.loop.stopped:
            return "stopped", f"{self.interrupts.received or 'a signal'} after step {step}; it can be resumed", tail
        if not math.isfinite(self.loop.scores["eval_loss"]):
            return "diverged", f"the validation loss is not finite after step {step}", tail
        return "finished", None, tail

    def _write_result(self, status: str, reason: str | None, losses: list[float], folded: str) -> Result:
        found = self.loop.scores
        lines = read_lines(self.metrics)
        rates = [line[key] for line in lines for key in line if key.endswith("_per_second") and line["step"] > 1]
        eval_loss = float(found.get("eval_loss", math.nan))
        result = Result(
            name=self.recipe.name,
            status=status,
            reason=reason,
            steps=self.loop.step,
            train_loss=float(np.mean(losses)) if losses and status != "diverged" else None,
            eval_loss=eval_loss if math.isfinite(eval_loss) else None,
            chance=self.loop.chance,
            parameters=sum(n for n, _ in self.counts),
            trained_parameters=sum(n for n, trained in self.counts if trained),
            seconds=round(self.loop.seconds(), 1),
            throughput=float(np.median(rates)) if rates else None,
            unit=self.prepared.unit[0],
            scores={k.removeprefix("eval_"): v for k, v in found.items() if k != "eval_loss"}
            | self._of_text(eval_loss)
            | {"plateau_steps": left_at(lines, self.loop.chance)},
            folded=folded,
            findings=_findings(self.folder / "signal.jsonl"),
        )
        write_json(self.folder / "result.json", result.to_json())
        return result

    def _of_text(self, loss: float) -> dict[str, float | None]:
        """A language model's loss (nats a token) in the units of others: perplexity, and bits per byte of UTF-8, which
        does not depend on the tokenizer."""
        if self.recipe.task not in ("causal-lm", "masked-lm") or not math.isfinite(loss):
            return {}
        scores: dict[str, float | None] = {"perplexity": math.exp(min(loss, 700.0))}
        if self.recipe.task == "causal-lm":
            asked = self.loop.labels
            n_bytes = len(self.prepared.tokenizer.decode(asked.tolist()).encode())
            scores["bits_per_byte"] = loss * len(asked) / math.log(2) / max(n_bytes, 1)
        return scores

    def _describe(self) -> None:
        make_folder(self.folder)
        write_text(self.folder / "recipe.yaml", self.recipe.to_yaml())
        write_json(self.folder / "environment.json", environment())
        write_json(self.folder / "parametrization.json", self.network.parametrization.to_json())

    def _save(self) -> str:
        """Write the trained model, and the folded one; why it was not folded, or "". Every process calls it."""
        network = self.network
        if sharded(self.loop.live):
            weights = weights_of(self.loop.live)
            if self.main:
                network = network_of(self.recipe, self.prepared)
                fill_weights(network.module, weights, self.folder)
        return by_first(lambda: self._write_models(network))

    def _write_models(self, network: Network) -> str:
        model = network.module
        self._write_model(model, "final")
        if model is not network.base:
            merged: Any = copy.deepcopy(model)
            self._write_model(merged.merge_and_unload(), "folded")
            return ""
        if not is_pretrained(type(model)):
            return "only models of transformers are folded"
        if record_of(model) is None:
            return "it has no scheme"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                folded: Any = fold(copy.deepcopy(model))
        except InputError as error:
            return str(error)
        self._write_model(folded, "folded")
        return ""

    def _write_model(self, model: nn.Module, name: str) -> None:
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)  # of a run that was killed before its result was written
        with written_whole(target) as beside:
            if hasattr(model, "save_pretrained") and record_of(model) is None:
                model.save_pretrained(beside)  # type: ignore[operator]
            else:
                save(model, beside)
            if hasattr(self.prepared.tokenizer, "save_pretrained"):
                self.prepared.tokenizer.save_pretrained(beside)


def _findings(path: Path) -> Findings:
    """What the rules say of a run's first signal and of the last, with the step; what is not finite is a fault."""
    lines = read_lines(path)
    found = Findings()
    for line in [lines[0], *lines[1:][-1:]] if lines else ():
        if "error" in line:
            said = Findings([Finding(name="not finite", severity="fault", text=line["error"])])
        else:
            said = findings_of(Profile.from_json(line["profile"]), step=line["step"] or None)
        found += [item.model_copy(update={"step": line["step"]}) for item in said]
    return found
