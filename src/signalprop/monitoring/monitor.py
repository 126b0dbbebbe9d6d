"""`SignalMonitor`: the signal of a model in training, every so many steps, as numbers by name.

It is the callback of a bare training loop, and what the callbacks of the Hugging Face Trainer and of Lightning hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, bare, reading_batches
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.result import NotReached, not_finite, profile_of, tables
from signalprop.monitoring.arguments import Arguments
from signalprop.monitoring.attention_scores import Layers, attention_scores, random_states_kept
from signalprop.monitoring.bands import TOLERANCES, Departure, checked
from signalprop.monitoring.checks import Checks, weights_of
from signalprop.monitoring.events import finding_of
from signalprop.monitoring.jumps import Jump
from signalprop.monitoring.layer_numbers import first_not_finite, per_layer, per_sublayer, summary
from signalprop.monitoring.logs import Log, Logs, opened
from signalprop.monitoring.movement import Movement, movement_of
from signalprop.monitoring.places import sublayers_of
from signalprop.monitoring.processes import EveryRank, is_other_rank, mesh_of, together
from signalprop.network.parametrization import Parametrization
from signalprop.results.findings import Findings
from signalprop.watching.experts import ExpertLoad
from signalprop.watching.first_call import attached_now_or_later
from signalprop.watching.passes import Pass
from signalprop.watching.recorders import Recorders
from signalprop.watching.recording import Recorder
from signalprop.watching.taps import Groups, TapRecorder

# Sequences of the first sampled step that are kept, for what is measured on a fixed batch and for input statistics.
_KEPT_SEQUENCES = 2
# Steps that are kept for a loss that jumps.
_RING = 64
# Samples from one prediction of the bands of today's weights to the next.
_BANDS_EVERY = 8


class SignalMonitor:
    """Logs the signal of every layer of a model in training, and warns where it leaves the band of the theory.

    ```python
    with SignalMonitor(model, every=50, writer=SummaryWriter("runs/1")) as monitor:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            monitor.step(loss)  # after the backward pass; the numbers on sampled steps, None on the others
            optimizer.step()
            optimizer.zero_grad()
    ```

    The first step is sampled, and every step whose number (from 1) is a multiple of `every`. A sampled step runs its
    usual forward and backward pass, watched through hooks that are removed before the next step; of several passes
    (gradient accumulation) the first is watched. A compiled model is measured inside its graph, as by a `Probe`.
    Attention scores are measured on a fixed batch, in evaluation mode and uncompiled; random states are restored.
    Training is not changed. In a distributed run rank 0 measures its sequences, or those of all processes of the
    groups; parameters that are sharded (FSDP2, tensor parallel) are read by all processes together. Every process of
    the run must create the monitor. Names and meanings of the numbers: docs/monitoring.md.

    The loss and each sublayer's gradient and update are stored for the last `ring` steps. When the loss or the norm of
    the gradients jumps, a warning names the sublayer that moved first, and those steps are written to `jsonl`.

    Args:
        model: as for `measure`; compiled and DistributedDataParallel models too.
        every: steps from one sample to the next.
        writer: something with `add_scalar(name, value, step)`, such as a TensorBoard SummaryWriter. jsonl: a file to
            which one line of JSON is appended per sample. log: called with (numbers, step), such as `wandb.log` or
            `mlflow.log_metrics`.
        scores: measure attention scores, by one pass over a small batch per sample.
        batch: what scores are measured on. Default: the first 2 sequences of the first sampled step, if the model reads
            one sequence of tokens; other models need a batch for scores.
        tolerance: factors by which quantities may leave the prediction: by name, replacing those of
            `signalprop.monitoring.bands.TOLERANCES`, or one for all; None: warn only about values that are not finite.
        start: the weights at the start of the training. Default: those at the first sample.
        skip_first: positions that statistics leave out at the start of every sequence of a decoder (there trained ones
            park activations thousands of times larger than all others); none in sequences of up to twice that length.
        compiled, data_group, tokens_group: as for a `Probe`.
        logs: whether this process logs. Default: only rank 0 does; pass True in one process of every pipeline stage.
        ring: how many steps to store in case the loss jumps; 0: none, and updates are not measured.
        mapping, inputs, scheme: as in `measure` and `Probe`. steps_done: steps before this run. prefix: of the numbers'
            names.

    Attributes:
        warnings: every Departure so far; `findings` gives the same with cause and next action. The logger
            `signalprop.monitoring` writes one line for each.

    Raises:
        InputError: an unknown family, or numbers out of range.
    """

    @typed
    def __init__(
        self,
        model: nn.Module | Anatomy,
        *,
        every: int = 50,
        writer: Any = None,
        jsonl: str | Path | None = None,
        log: Log | None = None,
        scores: bool = True,
        batch: Batch | None = None,
        tolerance: float | Dictionary[str, float] | None = TOLERANCES,
        start: Parametrization | None = None,
        skip_first: int = 4,
        ring: int = _RING,
        mapping: Mapping | None = None,
        inputs: Any = None,
        scheme: str = "",
        steps_done: int = 0,
        prefix: str = "signal",
        compiled: bool | None = None,
        data_group: Any = None,
        tokens_group: Any = None,
        logs: bool | None = None,
    ) -> None:
        tolerances = checked(every, tolerance, skip_first, steps_done, ring)
        self.every, self.prefix, self._tolerances = every, prefix, tolerances
        self.steps = steps_done
        self.active = not is_other_rank() if logs is None else logs
        self._every_rank = EveryRank.here()
        self._model = bare(model)
        self._batch, self._given = batch, start
        self._path, self._scheme = jsonl, scheme
        self._logs = Logs(writer, jsonl, log)
        self.warnings = self._logs.warnings
        self._groups = Groups(data_group, tokens_group)
        self._recorder: Recorder | TapRecorder | None = None
        self._checks: Checks | None = None
        self._sampling: int | None = None
        self._samples = 0
        self._inside = False
        self._ring = ring
        self._known = False
        self._wanted = scores, skip_first, compiled
        self._wait_no_longer = attached_now_or_later(
            model, mapping, inputs, self._take, self._first_call, now=bool(compiled) or bool(self._groups)
        )
        if jsonl is not None and self.active:  # before the training; later a log that fails does not end it
            opened(jsonl).close()

    def _take(self, attached: Anatomy) -> None:
        """The model is known."""
        scores, skip_first, compiled = self._wanted
        batch, start = self._batch, self._given
        self._attached = attached if batch is None else reading_batches(attached)
        self._model, self._mapping, self._plan = self._attached.model, self._attached.mapping, self._attached.plan
        self._arguments = Arguments(self._mapping, _KEPT_SEQUENCES)
        seen = self._arguments
        self._recorders = Recorders(
            self._attached,
            compiled=compiled,
            groups=self._groups,
            begins=seen.see,
            skip_first=skip_first if seen.reads_tokens and self._mapping.architecture.causal else 0,
            reads=seen.names(self._model),
        )
        self._scores = scores and (batch is not None or self._arguments.reads_tokens)
        if start is not None and start.n_sublayers != len(self._attached.rows):
            raise InputError(
                f"start has {start.n_sublayers} sublayers, the model {len(self._attached.rows)}; expected the "
                "Parametrization of the same model"
            )
        self._experts = ExpertLoad(self._attached)
        self._sublayers = sublayers_of(self._attached.layout)
        self._known = True

    def _first_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model that nobody knew how to call is being called."""
        if self._sampling is not None:
            self.attach(self._sampling)
        if isinstance(self._recorder, Recorder):
            self._recorder.starts(model, args, kwargs)

    @property
    def findings(self) -> Findings:
        """What the rules say of the last sampled signal, then every event so far: what, where, cause, next action."""
        return self._logs.found + [finding_of(item) for item in self.warnings]

    @cached_property
    def _mesh(self) -> Any:  # parameters may be sharded after the monitor is made
        return mesh_of(self._model)

    @cached_property
    def _movement(self) -> Movement | None:
        return movement_of(self._attached, self._ring) if self.active or self._mesh is not None else None

    # --- a bare loop -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._inside = True
        self._attach_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self.close()

    def step(self, loss: Tensor | float | None = None) -> dict[str, float] | None:
        """End a step, after its backward pass and before the optimizer's: the numbers if it was sampled, else None.

        Args:
            loss: of the step, a number or a tensor; needed to detect jumps.

        Raises:
            InputError: not inside the `with` block.
        """
        if not self._inside:
            raise InputError("the monitor is not attached; use it as `with SignalMonitor(model) as monitor:`")
        self.record(self.steps + 1, loss)
        numbers = self.end()
        self.steps += 1
        if numbers is not None:
            self.write(numbers, self.steps)
        self._attach_if_due()
        return numbers

    def close(self) -> None:
        """Take all hooks off and close the file; harmless when there is nothing to do."""
        self.detach()
        self._wait_no_longer()
        if self._known:
            self._recorders.close()
        self._sampling = self._recorder = None
        if "_movement" in vars(self) and self._movement is not None:
            self._tell(self._movement.look())
        self._logs.close()

    def _attach_if_due(self) -> None:
        if self.due(self.steps + 1):
            self.attach(self.steps + 1)

    # --- for callbacks -----------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the step of that number (from 1) is to be sampled.

        Raises:
            InputError: the first time, if a process of the run has no monitor.
        """
        self._every_rank.check()
        return (self.active or self._everyone()) and (not self._samples or step % self.every == 0)

    @typed
    def record(self, step: int, loss: Tensor | float | None = None) -> None:
        """Record how every sublayer moves; call it at every step (from 1), after the backward pass, before the
        optimizer.

        Args:
            loss: of the step, a number or a tensor.
        """
        if self._known and self._movement is not None:
            self._tell(self._movement.record(step, loss))

    def attach(self, step: int) -> None:
        """Put the hooks on, before the first forward pass of a step."""
        self.detach()
        if self._known and (self.active or self._everyone()):
            self._recorder = self._recorders.recorder()
            self._recorder.attach()
            if isinstance(self._recorder, Recorder):  # inside a graph nobody counts
                self._experts.attach()
        self._sampling = step

    def detach(self) -> None:
        """Remove the hooks; what they recorded stays for `end`."""
        if self._recorder is not None:
            self._recorder.detach()
        if self._known:
            self._experts.detach()

    @contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """A context in which the hooks are on; what they record belongs to `step`. An error inside drops the sample."""
        self.attach(step)
        try:
            yield
        except BaseException:
            self.detach()
            self._recorder = self._sampling = None
            raise
        finally:
            self.detach()

    def end(self) -> dict[str, float] | None:
        """The numbers of the sampled step, before the weights change; None if the step was not sampled.

        A signal that cannot be measured (the step did not reach a layer) is a warning, once.
        """
        self.detach()
        recorder, step = self._recorder, self._sampling
        self._recorder = self._sampling = None
        if step is None or recorder is None:
            return None
        recorder.finish()
        self._arguments.keep(self._model, recorder.read())
        scores, due = Layers(), self._samples % _BANDS_EVERY == 0
        read: Callable[[], Parametrization | None] = partial(weights_of, self._attached, self._logs)
        self._samples += 1
        if self._mesh is not None:  # all processes have to take part in reading parameters that are sharded over them
            gathered = read() if due and self._tolerances is not None else None
            read, scores = (lambda: gathered), self._attention(step)
        if not self.active:
            return None
        try:
            return self._numbers(recorder, step, scores, read, due)
        except NotReached as error:
            self._samples -= not self._samples - 1  # of a first sample that skipped layers the next step is one again
            self._logs.say_once(f"step {step}: the signal was not measured: {error}", key="layers are skipped")
            return None
        except InputError as error:
            self._logs.say_once(f"step {step}: the signal was not measured: {error}")
            return None

    def write(self, numbers: Dictionary[str, float], step: int) -> None:
        """Hand the numbers of `step` to the writer, the file and the function that were given.

        If a writer or file fails, one warning is given and later samples try again: logging never ends a training.
        Exceptions of the function reach the caller.
        """
        self._logs.write(numbers, step)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _numbers(
        self, recorder: Pass, step: int, scores: Layers, read: Callable[[], Parametrization | None], due: bool
    ) -> dict[str, float]:
        problem = not_finite(recorder, tables(recorder)[0])
        self._logs.found = Findings()
        if problem:
            return {f"{self.prefix}/not_finite_layer": float(self._not_finite(recorder, problem, step))}
        profile = profile_of(recorder, scheme=self._scheme, strict=False)
        self._logs.judge(profile, step)
        if profile.gradient is None:
            self._logs.say_once(f"step {step}: {profile.notes[-1]}", key=profile.notes[-1].split(";")[0])
        scores = self._attention(step) if self._mesh is None else scores
        updates, by_sublayer, stalls = ([], [], []) if self._movement is None else self._movement.sampled(step)
        self._logs.tell(stalls)
        moved: Layers = {"update": updates} if any(v is not None for v in updates) else {}
        layers = per_layer(profile) | moved | self._experts.loads() | scores
        out = {
            f"{self.prefix}/layer_{k:0{len(str(len(values) - 1))}d}/{quantity}": float(value)
            for quantity, values in layers.items()
            for k, value in enumerate(values)
            if value is not None and math.isfinite(value)
        }
        out |= {f"{self.prefix}/{name}": value for name, value in summary(profile, layers).items()}
        if self._tolerances is not None:
            if self._checks is None:
                places = () if self._movement is None else self._movement.places
                inputs = self._arguments.statistics()
                self._checks = Checks(self._attached, self._tolerances, self._logs, self._given, inputs, places)
            finer = per_sublayer(profile) | ({"update": by_sublayer} if moved else {})
            out[f"{self.prefix}/outside"] = float(self._checks.outside(step, profile, layers | finer, read, due))
        return out

    def _attention(self, step: int) -> Layers:
        """Attention scores; nothing where they cannot be measured, with a warning where a batch was given for them."""
        if not self._scores:
            return {}
        try:
            batch = together(lambda: self._batch or self._arguments.batch(), self._mesh)
            with random_states_kept(self._model):
                return attention_scores(self._attached.as_known, batch, self._wanted[1], self._mesh)
        except InputError as error:
            if self._batch is not None:
                self._logs.say_once(f"step {step}: attention scores not measured: {error}")
            return {}

    def _everyone(self) -> bool:
        """Whether all processes take part in a sample."""
        return bool(self._groups) or self._mesh is not None

    def _tell(self, jumps: Sequence[Jump]) -> None:
        if self.active:
            self._logs.tell_jumps(jumps)

    def _not_finite(self, recorder: Pass, problem: str, step: int) -> int:
        """The layer where the signal is not finite first, after a warning."""
        place = self._sublayers[first_not_finite(recorder, self._plan)]
        self._logs.tell([Departure(step, "finite", (place,), place, math.nan, f"step {step}: {problem}")])
        return place.layer
