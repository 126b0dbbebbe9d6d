"""A training run: from a recipe to a directory that holds everything about it."""

from __future__ import annotations

import copy
import errno
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from signalprop.errors import InputError
from signalprop.files.storage import make_folder, read_json, read_text, write_json, write_text, written_whole
from signalprop.files.validation import typed
from signalprop.repair import fold, save
from signalprop.repair.record import is_pretrained, record_of
from signalprop_lab.training.callbacks import KeepGoing, Lines, Metrics, Progress, Signal, Veto, read_lines
from signalprop_lab.training.checkpoints import alone, clear_leftovers, fill_weights, last_good, step_of, weights_of
from signalprop_lab.training.examples import Ordered, Prepared, as_batch, collate
from signalprop_lab.training.guard import Diverged, Guard, Interrupts
from signalprop_lab.training.networks import Network, network_of
from signalprop_lab.training.plateau import EndsWhenLearning, left_at
from signalprop_lab.training.processes import by_first, first, meet, sharded, told
from signalprop_lab.training.recipe import Recipe, load_recipe, parse, read_yaml
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.trainer import RecipeTrainer, recompute_layers, training_arguments

__all__ = ["Result", "train"]

RUN_SCHEMA = "signalprop/run/1"
_SIGNAL_EXAMPLES = 4  # sequences on which the signal is measured through training
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_PACKAGES = ("signalprop", "torch", "transformers", "accelerate", "numpy", "peft", "datasets", "tokenizers")


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        name: of the recipe.
        status: `finished`; `diverged` (a loss or gradient was not finite); `stopped` (by a signal; resume it);
            `pruned` (by a sweep). reason: why it did not finish.
        steps: that were done. train_loss: mean over the last tenth of them; eval_loss: after the last one; in nats.
        chance: loss of the best guess that reads no input, on the same examples (`Prepared.chance`).
        parameters, trained_parameters: counts. seconds: of training, over all restarts.
        throughput: tokens (or images, ...) per second, median over the logged stretches. unit: of what.
        scores: what else was measured on validation data, and `plateau_steps`, the step at which the run had left the
            plateau at chance (None: not yet; `plateau.left_at`). folded: why there is no folded checkpoint, or "".
    """

    name: str
    status: str
    reason: str | None
    steps: int
    train_loss: float | None
    eval_loss: float | None
    chance: float
    parameters: int
    trained_parameters: int
    seconds: float
    throughput: float | None
    unit: str
    scores: dict[str, float | None] = field(default_factory=dict)
    folded: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in result.json."""
        return {"schema": RUN_SCHEMA} | asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Result:
        """A result that `to_json` made (`data`).

        Raises:
            InputError: something else.
        """
        if not isinstance(data, dict) or data.get("schema") != RUN_SCHEMA:
            raise InputError(f"this is not the result of a run; expected schema {RUN_SCHEMA}")
        try:
            return cls(**{key: value for key, value in data.items() if key != "schema"})
        except TypeError as error:
            raise InputError(f"this is not the result of a run: {error}") from None


@typed
def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    settings: Sequence[str] = (),
    keep_going: KeepGoing | None = None,
    progress: bool = True,
    final: bool = True,
) -> Result:
    """Train what a recipe says, into a directory. In several processes under torchrun, every one calls it.

    Args:
        recipe: a Recipe, a YAML file, or the name of one that comes with the package. settings: `key=value`.
        out: the run's directory (docs/training.md says what is in it).
        resume: go on from the last whole checkpoint, or from the start where there is none; a finished run is left
            as it is, unless the recipe now has more steps and nothing else is new: then it goes on, with the schedule
            of all the steps. Without it, a directory that holds a run is refused.
        keep_going: asked with (step, loss) whenever the loss is logged; False ends the run.
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
            earlier = _open(folder, chosen, resume)
            if earlier is None:
                held.enter_context(alone(folder))
                earlier = _open(folder, chosen, resume)  # another process may have just ended here
            return earlier

        earlier = by_first(take)
        if earlier is not None:
            return earlier
        prepared = prepare(chosen)
        network = network_of(chosen, prepared)
        return _Run(chosen, folder, prepared, network, keep_going, progress, final).go()


def _open(folder: Path, recipe: Recipe, resume: bool) -> Result | None:
    """Refuse a directory of something else; the result, where the run is over."""
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected a directory, or a path for a new one")
    written = folder / "recipe.yaml"
    if written.is_file():
        if not resume:
            raise InputError(f"{folder} holds a run already; go on with --resume, or choose a new directory")
        before = parse(read_yaml(written))
        if _prolongs(before, recipe):
            if last_good(folder / "checkpoints") is None:
                raise InputError(f"{folder} has no checkpoint that {recipe.budget.steps} steps could go on from")
            return None
        if before != recipe:
            raise InputError(
                f"{folder} holds a run of another recipe ({_difference(before, recipe)}); choose a new one"
            )
        if (folder / "result.json").is_file():
            result = Result.from_json(read_json(folder / "result.json"))
            if result.status in ("finished", "diverged", "pruned"):
                return result
    elif folder.is_dir() and any(not item.name.startswith(".") for item in folder.iterdir()):
        raise InputError(f"{folder} holds files that are not a run; choose a new directory")
    return None


def _prolongs(before: Recipe, now: Recipe) -> bool:
    """Whether two recipes differ in nothing but that the second one takes more steps."""
    longer = now.budget.steps > before.budget.steps
    return longer and before.model_copy(update={"budget": now.budget}) == now


def _difference(one: Recipe, other: Recipe) -> str:
    """The first fields in which two recipes differ."""
    a, b = _flat(one.to_json()), _flat(other.to_json())
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(f"{name}: {a.get(name)!r}, now {b.get(name)!r}" for name in names[:3])


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for name, item in data.items() for k, v in _flat(item, f"{prefix}.{name}".lstrip(".")).items()}


class _Run:
    """One run while it lasts."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        prepared: Prepared,
        network: Network,
        keep_going: KeepGoing | None,
        progress: bool,
        final: bool,
    ) -> None:
        self.recipe, self.folder, self.prepared, self.network = recipe, folder, prepared, network
        self.final = final
        unit, size = prepared.unit
        self.unit, per_step = unit, size * recipe.budget.batch_size
        arguments = training_arguments(recipe, folder / "checkpoints", int(os.environ.get("WORLD_SIZE", "1")), network)
        self.counts = network.parameter_count()
        self.main = first()
        by_first(self._describe)  # before the Trainer makes its directory: only a recipe tells that it is a run's
        if recipe.gradient_checkpointing:
            recompute_layers(network)
        self.trainer = RecipeTrainer(network, recipe, prepared, args=arguments)
        _quiet(self.trainer)
        self.metrics = folder / "metrics.jsonl"
        self.interrupts = Interrupts()
        self.guard = Guard(self.trainer, self.interrupts)
        callbacks: list[Any] = [self.guard, Metrics(Lines(self.metrics), per_step, unit)]
        signal = None
        whole = not recipe.parallel.fsdp
        if (recipe.cadence.signal or recipe.cadence.monitor) and not whole and self.main:
            print("signalprop: the signal is not measured while the model is sharded (parallel)", file=sys.stderr)
        if recipe.cadence.signal and whole:
            validation = Ordered(prepared.validation, _SIGNAL_EXAMPLES, 0, shuffle=False)
            examples = [validation[i] for i in range(min(_SIGNAL_EXAMPLES, len(prepared.validation)))]
            batch = as_batch(collate(examples, prepared.pads), prepared.source)
            signal = Signal(network, batch, Lines(folder / "signal.jsonl"), recipe.cadence.signal, self.guard)
            callbacks.append(signal)
        if recipe.budget.until_learning:
            callbacks.append(EndsWhenLearning(self.metrics, self.trainer.chance))
        self.veto = Veto(keep_going) if keep_going is not None else None
        callbacks += [self.veto] if self.veto else []
        self.progress = Progress(recipe.name, per_step, unit, signal) if progress and self.main else None
        callbacks += [self.progress] if self.progress else []
        for callback in callbacks:
            self.trainer.add_callback(callback)
        if recipe.cadence.monitor and whole:
            from signalprop.monitoring.trainer import SignalCallback

            self.trainer.add_callback(SignalCallback(self.trainer, every=recipe.cadence.monitor))

    def go(self) -> Result:
        """Train, evaluate, save, and say how it went.

        Raises:
            InputError: the disk is full, or an output cannot be written.
        """
        try:
            return self._go()
        except OSError as error:  # of TensorBoard, whose writer takes its time
            if error.errno not in _NO_ROOM:
                raise
            raise InputError(
                f"cannot write in {self.folder}: {error.strerror}; fix that, and go on with --resume"
            ) from None
        finally:
            if self.progress:
                self.progress.close()

    def _go(self) -> Result:
        trainer = self.trainer
        with self.interrupts, _writers_leave_errors():
            trainer.goes_on_from = by_first(self._start)
            for callback in self._tensorboard():
                trainer.add_callback(callback)
            diverged = self._train()
            state = trainer.state
            stopped = self.guard.stopping and state.global_step < state.max_steps
            evaluated = {} if stopped or diverged else trainer.evaluate()
            status, reason, losses = told(self._verdict(evaluated, diverged, stopped))
            folded = self._save() if self.final and status == "finished" else "not saved"
            result = by_first(lambda: self._write_result(status, reason, losses, evaluated, folded))
        if not stopped:
            self.interrupts.pass_on()
        return result

    def _start(self) -> Path | None:
        """The checkpoint to go on from; what a killed process left half-written goes."""
        folder = self.folder / "checkpoints"
        clear_leftovers(self.folder)
        clear_leftovers(folder)
        return last_good(folder)

    def _train(self) -> str | None:
        """Why the run diverged, or None."""
        trainer = self.trainer
        checkpoint = trainer.goes_on_from
        if checkpoint is not None:
            trainer.go_on_from(checkpoint)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except Diverged as error:
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            return str(error)
        return None

    def _verdict(
        self, evaluated: dict[str, float], diverged: str | None, stopped: bool
    ) -> tuple[str, str | None, list[float]]:
        """Status, reason, and the losses of the last tenth of what was logged."""
        step = self.trainer.state.global_step
        losses = [line["loss"] for line in read_lines(self.metrics) if "loss" in line] if self.main else []
        tail = [x for x in losses[-max(1, len(losses) // 10) :] if x is not None]
        if diverged is not None:
            return "diverged", diverged, tail
        if stopped:
            return "stopped", f"{self.interrupts.received or 'a signal'} after step {step}; it can be resumed", tail
        if evaluated and not math.isfinite(evaluated["eval_loss"]):
            return "diverged", f"the validation loss is not finite after step {step}", tail
        if self.veto is not None and self.veto.said is not None:
            return "pruned", f"pruned after step {self.veto.said}", tail
        return "finished", None, tail

    def _write_result(
        self, status: str, reason: str | None, losses: list[float], evaluated: dict[str, float], folded: str
    ) -> Result:
        lines = read_lines(self.metrics)
        rates = [line[key] for line in lines for key in line if key.endswith("_per_second") and line["step"] > 1]
        eval_loss = float(evaluated.get("eval_loss", math.nan))
        result = Result(
            name=self.recipe.name,
            status=status,
            reason=reason,
            steps=self.trainer.state.global_step,
            train_loss=float(np.mean(losses)) if losses and status != "diverged" else None,
            eval_loss=eval_loss if math.isfinite(eval_loss) else None,
            chance=self.trainer.chance,
            parameters=self.counts[0],
            trained_parameters=self.counts[1],
            seconds=round(self.trainer.seconds(), 1),
            throughput=float(np.median(rates)) if rates else None,
            unit=self.unit,
            scores={
                key.removeprefix("eval_"): float(value)
                for key, value in evaluated.items()
                if key.startswith("eval_")
                and key not in ("eval_loss", "eval_runtime")
                and not key.endswith("_per_second")
            }
            | self._of_text(eval_loss)
            | {"plateau_steps": left_at(lines, self.trainer.chance)},
            folded=folded,
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
            asked = self.trainer.asked
            n_bytes = len(self.prepared.tokenizer.decode(asked.tolist()).encode())
            scores["bits_per_byte"] = loss * len(asked) / math.log(2) / max(n_bytes, 1)
        return scores

    def _describe(self) -> None:
        make_folder(self.folder)
        write_text(self.folder / "recipe.yaml", self.recipe.to_yaml())
        write_json(self.folder / "environment.json", environment())
        write_json(self.folder / "parametrization.json", self.network.parametrization.to_json())

    def _tensorboard(self) -> list[Any]:
        try:
            from torch.utils.tensorboard import SummaryWriter
            from transformers.integrations import TensorBoardCallback  # type: ignore[attr-defined]
        except ImportError:
            return []
        if not self.main:
            return []
        start = self.trainer.goes_on_from
        purge = None if start is None else step_of(start) + 1
        directory = str(self.folder / "tensorboard")
        said = False

        class Guarded(TensorBoardCallback):
            """Does not end the run where its files cannot be written; begins new ones as soon as that is possible."""

            def _tried(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
                nonlocal said
                try:
                    event(*args, **kwargs)
                except Exception as error:  # of TensorBoard's thread too, which hands on what it met
                    self.tb_writer = None
                    if not said:
                        said = True
                        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                        print(f"signalprop: cannot write {directory} ({reason}); the run goes on", file=sys.stderr)

            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                self._tried(super().on_train_begin, *args, **kwargs)

            def on_log(self, *args: Any, **kwargs: Any) -> None:
                self._tried(super().on_log, *args, **kwargs)

            def on_train_end(self, *args: Any, **kwargs: Any) -> None:
                self._tried(super().on_train_end, *args, **kwargs)

        callback = Guarded()  # type: ignore[no-untyped-call]
        callback.logging_dir = directory  # it makes a new writer for what is logged after the training
        callback._tried(lambda: setattr(callback, "tb_writer", SummaryWriter(directory, purge_step=purge)))
        return [callback]

    def _save(self) -> str:
        """Write the trained model, and the folded one; why there is no folded one, or "". Every process calls it."""
        network = self.network
        if sharded(self.trainer.live):
            weights = weights_of(self.trainer.live)
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
        if record_of(model) is None or not is_pretrained(type(model)):
            return "it is not a Hugging Face model with a scheme"
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


@contextmanager
def _writers_leave_errors() -> Iterator[None]:
    """No traceback of a thread that cannot write: TensorBoard's raises its error again when it is next called."""
    before = threading.excepthook

    def hook(thrown: threading.ExceptHookArgs) -> None:
        full = isinstance(thrown.exc_value, OSError) and thrown.exc_value.errno in _NO_ROOM
        if not full and not type(thrown.thread).__module__.startswith("tensorboard"):
            before(thrown)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _quiet(trainer: Any) -> None:
    """The Trainer's own printing goes: the bar and the files say it."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)


def environment() -> dict[str, Any]:
    """Where a run happened: versions, machine, command, git revision."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores",
        "device": device,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": sys.argv,
        "git": _revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _revision() -> str | None:
    """The git revision of the signalprop that runs, with `-dirty` where its files have been changed since; None: it is
    installed, not a clone. The current directory may be a user's own repository, and does not count."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=10)
        if tracked.returncode:
            return None  # it lies in somebody's repository, as a virtual environment may
        described = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        done = subprocess.run(described, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    with suppress(InputError):
        for line in read_text("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
