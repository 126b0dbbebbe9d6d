"""Measure the signal of a live model: `measure` for one batch, `Probe` inside a training loop."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, reading_batches
from signalprop.attachment.arguments import read_by
from signalprop.attachment.mapping import Mapping
from signalprop.attachment.parametrization_of import numbers_of
from signalprop.data.batches import Batch, beyond_positions, default_batch, shortened
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import is_compiled
from signalprop.measurement.losses import ASSUMED, Loss, lent_gradients, loss_of, takes_next
from signalprop.measurement.passes import output_of
from signalprop.measurement.result import NotReached, not_finite, profile_of, tables
from signalprop.network.architecture import Architecture
from signalprop.results.profile import Profile
from signalprop.results.series import SEQUENCES
from signalprop.streams.live_model import placed, without_gradient, without_numbers
from signalprop.watching.experts import ExpertLoad
from signalprop.watching.first_call import attached_now_or_later
from signalprop.watching.first_positions import FIRST, MASSIVE, FirstPositions
from signalprop.watching.recorders import Recorders
from signalprop.watching.recording import Recorder
from signalprop.watching.taps import Groups, TapRecorder

LOGGER = logging.getLogger("signalprop.measurement")
_LEFT_OUT = "the first {} positions of every sequence of the decoder are left out"
_LOCK = threading.Lock()
_turns: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # of threads that measure one model


@typed
def measure(
    model: nn.Module | Anatomy,
    inputs: Any = None,
    *,
    mapping: Mapping | None = None,
    backward: bool = True,
    loss: Loss | None = None,
    scheme: str = "",
    architecture: Architecture | None = None,
    skip_first: int | None = None,
) -> Profile:
    """The Profile of a model on one batch, from one forward and one backward pass.

    The model's mode (training or evaluation), parameters and gradients are left as they are; in training mode
    dropout draws random numbers. Threads that measure one model take turns. Statistics are over real tokens
    (`attention_mask`, or the batch's `keep`), in float32 with float64 sums where that is not enough.

    Args:
        model: a supported Hugging Face model, one with a method `signalprop_mapping()`, or any with
            `mapping`. Compiled models are run uncompiled, and a note says so.
        inputs: what the model is called with: a tensor, a tuple (a loader's batch), a dictionary of arguments, a
            function that is given the model and calls it, or a `signalprop.data.Batch`; default: 4 sequences of at most
            128 tokens of the embedded text.
        mapping: where the signal runs (see `Mapping`); default: by `signalprop_mapping()` or by family.
        backward: also measure gradients of the loss.
        loss: makes the loss from the model's output (of inputs that are a function, from what that returns). Default:
            the model's loss if it returns one, else the mean cross-entropy of its logits and the batch's targets,
            or of the next of the token ids that it was called with, which a note says.
        scheme: recorded in the Profile. architecture: likewise; default: the mapping's.
        skip_first: positions at the start of every sequence that statistics of a decoder leave out. Default: 4 where
            after some layer these have more than 100 times the variance of the others, as in many trained decoders
            (massive activations; a second pass then leaves them out, and a note says so), else none.

    Raises:
        InputError: unknown family, a batch that does not fit the model, no loss, NaN or infinite values (the
            message names the sublayer, the point and the parameter), or a mapping that does not fit the
            model.
    """
    attached = attach(model, mapping, inputs)
    batch: Any = inputs
    if inputs is not None and not isinstance(inputs, Batch):
        batch = attached.arguments
    else:
        attached = reading_batches(attached)
    model = attached.model
    if skip_first is not None and skip_first < 0:
        raise InputError(f"skip_first is {skip_first}; expected 0 or more, or None")
    if backward and (why := without_gradient(model)):
        raise InputError(f"give backward=False (--no-gradient): {why}, so no gradient goes through it")
    if batch is None:
        batch = default_batch(shortened(attached.mapping.architecture))
    batch = read_by(attached.mapping.arguments, batch)
    arguments = arguments_of(attached, batch)

    first = next((value for value in arguments.values() if isinstance(value, Tensor) and value.ndim > 1), None)
    experts = ExpertLoad(attached, 1 if first is None else len(first))
    assumed: list[bool] = []
    turned = attached.mapping.reads_tokens_first

    def passed(skip: int) -> Recorder:
        recorder = Recorder(attached, backward=backward, skip_first=skip)
        try:
            recorder.attach()
            experts.attach()
            with torch.inference_mode(False), torch.set_grad_enabled(backward):
                if backward:
                    with lent_gradients(model):
                        given = output_of(model, arguments, inputs)
                        told = loss is not None or isinstance(batch, Batch)
                        assumed.append(not told and takes_next(given, arguments, turned))
                        value = loss_of(given, batch, loss, tokens_first=turned, model=attached.model)
                        problem = not_finite(recorder, tables(recorder)[0])
                        if problem:
                            raise InputError(problem)
                        value.backward()  # type: ignore[no-untyped-call]
                else:
                    output_of(model, arguments, inputs)
        finally:
            recorder.detach()
            experts.detach()
        return recorder

    with _turn(model):
        if skip_first is not None:
            recorder, note = passed(skip_first), _LEFT_OUT.format(skip_first) if skip_first else ""
        else:
            with FirstPositions(attached, arguments) as seen:
                recorder, note = passed(0), ""
            if seen.ratio > MASSIVE:
                recorder = passed(FIRST)
                note = f"{_LEFT_OUT.format(FIRST)}: up to {seen.ratio:.3g} times the variance of the others"
    found = profile_of(recorder, scheme=scheme, architecture=architecture)
    ran = "compiled code ran uncompiled" if is_compiled(attached.outer) else ""
    far = beyond_positions(attached.mapping.architecture, found.architecture.seq_len)
    lines = (note, ran, far, _zero_rows(attached, arguments), ASSUMED * any(assumed))
    notes = tuple(line for line in lines if line)
    read = batch.source if isinstance(batch, Batch) else ""
    statistics = {**found.statistics, **experts.variation(), SEQUENCES: 1 if first is None else first.shape[turned]}
    return replace(found, reads=read, notes=(*found.notes, *notes), statistics=statistics)


def _zero_rows(attached: Anatomy, arguments: Dictionary[str, Any]) -> str:
    """A note where words that were read have a row of zeros in the token table; padding that is marked is none."""
    table = attached.ends.token
    if table is None or table.problem or attached.mapping.architecture.input == "patches":
        return ""
    weight = numbers_of(table.holder)
    said = []
    for name, mask in (
        ("input_ids", attached.mapping.padding),
        ("decoder_input_ids", attached.mapping.decoder_padding),
    ):
        ids, kept = arguments.get(name), arguments.get(mask)
        if weight is None or weight.is_meta or not isinstance(ids, Tensor) or ids.ndim != 2:
            continue
        words = ids[kept != 0] if isinstance(kept, Tensor) and kept.shape == ids.shape else ids.flatten()
        known, counts = torch.unique(words, return_counts=True)
        empty = ~weight[known.to(weight.device)].any(1)
        if empty.any():
            share = float(counts[empty.to(counts.device)].sum()) / max(1, words.numel())
            which = ", ".join(map(str, known[empty.to(known.device)].tolist()[:5]))
            said.append(f"{share:.2%} of {name} (ids {which}) read rows of zeros: unknown words, or padding not marked")
    return "; ".join(said)


def _turn(model: nn.Module) -> threading.RLock:
    """What a thread holds while it measures a model, whose gradients it borrows."""
    with _LOCK:
        return _turns.setdefault(model, threading.RLock())


def arguments_of(attached: Anatomy, batch: Batch | Dictionary[str, Any]) -> dict[str, Any]:
    """The model's keyword arguments for a batch, on its device."""
    model, mapping = attached.model, attached.mapping
    if isinstance(batch, Batch):
        check_batch(batch, mapping.architecture)
        if mapping.arguments is None:
            raise InputError(
                "the mapping has no `arguments` to make the model's inputs from a Batch; give a dictionary of them"
            )
        arguments = dict(mapping.arguments(batch))
        needed = inspect.signature(model.forward).parameters.values()
        missing = [p.name for p in needed if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if missing := [name for name in missing if name not in arguments]:
            raise InputError(
                f"give inputs=, what the model is called with: {type(model).__name__} also reads {', '.join(missing)}, "
                "which a Batch does not hold"
            )
    else:
        arguments = dict(batch)
    empty = [name for name, value in arguments.items() if isinstance(value, Tensor) and not value.numel()]
    if empty:
        raise InputError(f"{empty[0]} is empty; expected at least one sequence of at least one token")
    mask = arguments.get(mapping.padding)
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.any():
        raise InputError(f"{mapping.padding} is zero everywhere, so there is no token to measure; expected 1 at tokens")
    if without_numbers(model):
        raise InputError(
            "the model's parameters are on the meta device and hold no numbers; load or initialise it first"
        )
    return placed(model, arguments)


class Probe:
    """Profiles during training.

    ```python
    with Probe(model, every=10) as probe:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            profile = probe.profile()  # a Profile on steps 0, 10, 20, ...; None on the others
            optimizer.step()
            optimizer.zero_grad()
    ```

    Between sampled steps no hook is attached, and leaving the block takes all of them off, also after an
    exception. Forward passes without gradients (evaluation) are not counted; of several passes in a step (gradient
    accumulation) the first is recorded, and the Profile's notes say so.

    A compiled model is measured inside its graph, without a graph break. Enter the block before the first step, or the
    model is compiled once more; pass `compiled=True` if you give the module and call torch.compile's result. All passes
    of a step are then recorded together. If the graph cannot be used (no backward pass, parallel layers, a module that
    is several sublayers), a line says so and sampled steps run uncompiled.

    A training step that skips layers (LayerDrop) gives None, with one warning; the next complete step gives a Profile.

    If signalprop cannot infer how the model is called, it waits for the first call inside the block.

    Args:
        model, mapping, backward, scheme, architecture: as in `measure`.
        inputs: what the model is called with, as in `measure`, if its first call comes too late (compiled models).
        every: sample every n-th step, beginning with the first.
        compiled: the model is compiled, or will be. Default: whether `model` is.
        data_group: a process group whose members read different sequences: the Profile covers all of them, and each
            calls `profile`. Default: this process alone. tokens_group: one whose members hold equal parts of the same
            sequences (context parallel). Losses of processes are averaged.

    Raises:
        InputError: as `measure`; groups, where the model cannot be measured inside its graph.
    """

    @typed
    def __init__(
        self,
        model: nn.Module | Anatomy,
        *,
        every: int = 1,
        mapping: Mapping | None = None,
        inputs: Any = None,
        backward: bool = True,
        scheme: str = "",
        architecture: Architecture | None = None,
        compiled: bool | None = None,
        data_group: Any = None,
        tokens_group: Any = None,
    ) -> None:
        if every < 1:
            raise InputError(f"every is {every}; expected a number of steps from 1 up")
        self.every = every
        self.steps = 0
        self._scheme = scheme
        self._architecture = architecture
        self._recorders: Recorders | None = None
        self._recorder: Recorder | TapRecorder | None = None
        self._left: Recorder | TapRecorder | None = None  # of a step that the block ended in
        self._inside = self._again = self._told = False
        groups = Groups(data_group, tokens_group)

        def take(attached: Anatomy) -> None:
            self._recorders = Recorders(attached, backward=backward, compiled=compiled, groups=groups)

        self._wait_no_longer = attached_now_or_later(
            model, mapping, inputs, take, self._first_call, now=bool(compiled) or bool(groups)
        )

    def __enter__(self) -> Self:
        self._inside = True
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        last = self._end()
        self._left = last if last is not None and last.calls else None
        self._wait_no_longer()
        if self._recorders is not None:
            self._recorders.close()

    @typed
    def profile(self, *, loss_scale: float = 1.0) -> Profile | None:
        """End the step (after its backward pass) and return its Profile, or None if the step was not sampled.

        After the block, it returns the Profile of the last step.

        Args:
            loss_scale: factor on the loss (a GradScaler's `get_scale()`); `gradient_scale` is divided by its
                square. The relative gradients do not depend on it.

        Raises:
            InputError: before the `with` block, a second time after it, the model did not run, or a signal that is not
                finite. Gradients that are not finite (a GradScaler looking for its scale) are left out, with a note.
        """
        recorder, self._left = self._end() if self._inside else self._left, None
        if not self._inside and recorder is None:
            raise InputError("the probe is not attached; use it as `with Probe(model) as probe:`")
        if self._recorders is None:
            raise InputError("the model did not run inside the block, so there is nothing to make a Profile of")
        self.steps += 1
        try:
            if recorder is None:
                return None
            recorder.finish()
            self._again = False
            return profile_of(
                recorder,
                scheme=self._scheme,
                architecture=self._architecture,
                loss_scale=loss_scale,
                strict=False,
            )
        except NotReached as error:
            if recorder is None or not recorder.model.training:
                raise
            if not self._told:
                LOGGER.warning(f"this step skipped layers, so it has no Profile; the next whole step has one: {error}")
            self._again = self._told = True
            return None
        finally:
            if self._inside:
                self._begin()

    def _first_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model that nobody knew how to call is being called."""
        if self._inside:
            self._begin()
        if isinstance(self._recorder, Recorder):
            self._recorder.starts(model, args, kwargs)

    def _begin(self) -> None:
        if self._recorders is not None and (self._again or self.steps % self.every == 0):
            self._recorder = self._recorders.recorder()
            self._recorder.attach()

    def _end(self) -> Recorder | TapRecorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.detach()
        return recorder


def check_batch(batch: Batch, architecture: Architecture) -> None:
    """Raise InputError for ids or lengths that the model has no row for."""
    a = architecture
    if batch.input != a.input:
        raise InputError(f"the model reads {a.input}, the batch holds {batch.input}")
    for name, ids in (("tokens", batch.tokens), ("decoder_tokens", batch.decoder_tokens)):
        if ids is None:
            continue
        if ids.size == 0:
            raise InputError(f"{name} is empty; expected ids of shape (batch, tokens)")
        if ids.min() < 0 or ids.max() >= a.vocab_size:
            raise InputError(
                f"{name} holds id {ids.max() if ids.min() >= 0 else ids.min()}; the vocabulary is 0..{a.vocab_size - 1}"
            )
        room = a.seq_len if name == "tokens" else a.target_len or a.seq_len
        learned = a.positions_of(decoder=name == "decoder_tokens") == "learned"
        if learned and ids.shape[1] > room:
            raise InputError(f"{name} has {ids.shape[1]} tokens per sequence; the model has {room} positions")
    if a.kind == "encoder-decoder" and batch.decoder_tokens is None:
        raise InputError("an encoder-decoder needs decoder_tokens in its batch")
