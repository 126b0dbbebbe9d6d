"""The Hugging Face Trainer with a recipe's data order, loss, optimizer and schedule. Its loop is used as it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from signalprop.errors import InputError, require

require("transformers", "training")

from accelerate import ParallelismConfig, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from signalprop_lab.training import checkpoints, weight_files  # noqa: E402
from signalprop_lab.training.checkpoints import step_of  # noqa: E402
from signalprop_lab.training.examples import IGNORED, Examples, Ordered, Prepared, Streamed, collate  # noqa: E402
from signalprop_lab.training.guard import Diverged, Pass, random_states  # noqa: E402
from signalprop_lab.training.networks import Network  # noqa: E402
from signalprop_lab.training.optimizers import make_optimizer  # noqa: E402
from signalprop_lab.training.position import Position  # noqa: E402
from signalprop_lab.training.processes import first, told  # noqa: E402
from signalprop_lab.training.recipe import Recipe, Schedule  # noqa: E402


def rate_factor(step: int, steps: int, schedule: Schedule) -> float:
    """Share of the peak learning rate at a step (from 0).

    Warm-up is linear and reaches the peak after its last step; cosine, linear and wsd end at `final` after the last
    step, wsd in a straight line over the last `decay` of the steps.
    """
    warmup = schedule.warmup if schedule.warmup >= 1 else round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "wsd":
        falling = round(schedule.decay * steps)
        return schedule.final + (1 - schedule.final) * min(1.0, max(steps - step, 0) / falling)
    passed = (step - warmup) / max(steps - warmup, 1)
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(passed, 1.0)))
    if schedule.kind == "linear":
        return schedule.final + (1 - schedule.final) * (1 - min(passed, 1.0))
    if schedule.kind == "inverse-sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    return 1.0


def cross_entropy(logits: Tensor, labels: Tensor, count: Tensor | float | None, smoothing: float = 0.0) -> Tensor:
    """Sum over labelled positions of the cross-entropy in nats, over `count` (default: their number)."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten().long(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / ((labels != IGNORED).sum().clamp(min=1) if count is None else count)


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's output."""
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return logits


class RecipeTrainer(Trainer):
    """The Trainer of a recipe.

    The loss is computed here, for every kind of model alike, over all labels of the global batch. Examples are read in
    the order of the dataset, which the seed fixes. Checkpoints are those of `signalprop_lab.training.checkpoints`. The
    Trainer documents what is replaced of it here but for
    `_get_train_sampler`, `_get_grad_norm`, `_save_checkpoint` and the `_load_...`.

    Attributes:
        passes: of the step that is being done. last_norm: of the gradient of the step, before it is clipped.
        asked: validation labels, in order. chance: loss of the best guess of them that reads no input, nats.
        goes_on_from: the checkpoint that the run starts from, or None.
    """

    def __init__(self, network: Network, recipe: Recipe, prepared: Prepared, **options: Any) -> None:
        self.network, self.recipe, self.prepared = network, recipe, prepared
        self.passes: list[Pass] = []
        self.last_norm: Tensor | float | None = None
        self.goes_on_from: Path | None = None
        self._begun = time.perf_counter()
        self._earlier_seconds = 0.0
        asked_for, there = recipe.cadence.validation_examples, len(prepared.validation)
        if there < asked_for and first():
            print(
                f"signalprop: only {there:,} of the {asked_for:,} validation examples that cadence.validation_examples "
                "asks for are there, and the validation loss is the noisier; hold out more with data.validation",
                file=sys.stderr,
            )
        validation = Ordered(
            prepared.validation,
            min(asked_for, there),
            0,
            shuffle=False,
        )
        asked = np.concatenate([np.ravel(validation[i]["labels"]) for i in range(len(validation))])
        self.asked = asked[asked != IGNORED]
        self.chance = prepared.chance(asked)
        # mean number of labels, so that a mean over examples is the mean over labels
        self._labels_per_example = float(np.sum(asked != IGNORED)) / len(validation)
        score: Any = prepared.score
        train, n = prepared.train, recipe.budget.steps * recipe.budget.batch_size  # exactly what a run reads
        super().__init__(
            model=network.module,
            train_dataset=Ordered(train, n, recipe.seed)
            if isinstance(train, Examples)
            else Streamed(train, n, recipe.seed, recipe.budget.batch_size),
            eval_dataset=validation,
            data_collator=lambda examples: network.arguments(collate(examples, prepared.pads)),
            compute_loss_func=lambda outputs, labels, num_items_in_batch=None: self.loss_of(
                logits_of(outputs), labels, num_items_in_batch
            ),
            compute_metrics=None if score is None else lambda seen: score(seen.predictions, seen.label_ids),
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            **options,
        )
        # transformers' own causal models would have their labels shifted; these are aligned already
        self._loss_shifts_labels = False

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(cast(Any, train_dataset if train_dataset is not None else self.train_dataset))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The recipe's optimizer on the groups that the scheme asks for."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.network.groups(self.recipe), self.recipe)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule."""
        if self.lr_scheduler is None:
            steps, schedule = self.recipe.budget.steps, self.recipe.schedule
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                cast(Any, self.optimizer if optimizer is None else optimizer),
                lambda step: rate_factor(step, steps, schedule),
            )
        return self.lr_scheduler

    def logits_of(self, outputs: Any) -> Tensor:
        """What the loss is made of."""
        return logits_of(outputs)

    def loss_of(self, logits: Tensor, labels: Tensor, count: Tensor | float | None) -> Tensor:
        """The loss that is trained on."""
        return cross_entropy(logits, labels, count, self.recipe.optimizer.label_smoothing)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One pass, kept as it was until the step is over."""
        before, given = random_states(), dict(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.passes.append(Pass(given, num_items_in_batch, loss, before))
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As the Trainer's, for models of any kind."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss, {"logits": logits_of(outputs)}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, logits and labels of a validation batch; the loss is such that its mean over examples is exact."""
        given = dict(self._prepare_inputs(inputs))
        labels = given.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = logits_of(model(**given))
            loss = cross_entropy(logits, labels, len(labels) * self._labels_per_example)
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self.last_norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return self.last_norm

    # --- checkpoints ---------------------------------------------------------------------------------

    @property
    def live(self) -> nn.Module:
        """The model whose parameters are trained, sharded where the run shards it."""
        return cast(nn.Module, self.model)

    @property
    def schedule(self) -> Any:
        """The learning rates' schedule."""
        return self.lr_scheduler

    @property
    def folder(self) -> Path:
        """Where checkpoints are."""
        return Path(str(self.args.output_dir))

    def seconds(self) -> float:
        """Time that the run has taken up to now, over all restarts."""
        return self._earlier_seconds + time.perf_counter() - self._begun

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        weights = weight_files.weights_of(self.live)
        bad = told(weight_files.not_finite(weights))
        if bad is not None:
            raise Diverged(f"parameter {bad} is not finite after step {self.state.global_step}")
        checkpoints.write(self, weights, self.recipe.cadence.keep)

    @property
    def position(self) -> Position | None:
        """Where the stream is that this process reads; None: it is not a stream, or its position cannot be kept."""
        data = self.train_dataset
        done = self.state.global_step * self.recipe.budget.batch_size
        return data.position(done) if isinstance(data, Streamed) else None

    def go_on_from(self, checkpoint: Path) -> None:
        """Begin the data where a checkpoint says that they were; else what was read before is read again."""
        found = checkpoints.position_of(checkpoint)
        data = self.train_dataset
        if found is not None and isinstance(data, Streamed):
            if found.given != step_of(checkpoint) * self.recipe.budget.batch_size:
                raise InputError(f"{checkpoint} is of a run with another budget.batch_size; start the run anew")
            data.begins = found
            self.args.ignore_data_skip = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.load_weights(self.live if model is None else model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_optimizer(self, Path(checkpoint))
            self._earlier_seconds = checkpoints.seconds_of(Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """It comes with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(Path(checkpoint), self.args.process_index)


def training_arguments(recipe: Recipe, out: Path, world_size: int, network: Network) -> TrainingArguments:
    """A recipe in the Trainer's words."""
    b, c = recipe.budget, recipe.cadence
    if b.batch_size % world_size:
        raise InputError(
            f"budget.batch_size {b.batch_size} is not a multiple of the {world_size} processes; choose another"
        )
    per_process = b.batch_size // world_size
    micro = min(b.micro_batch or per_process, per_process)
    if per_process % micro:
        raise InputError(f"budget.micro_batch {micro} does not divide the {per_process} examples of a process")
    options: dict[str, Any] = {}
    if recipe.parallel.fsdp:
        units = {
            "version": 2,
            "transformer_layer_cls_to_wrap": sorted({type(layer).__name__ for layer in network.layers}),
        }
        options |= {"fsdp": True, "fsdp_config": units | recipe.parallel.fsdp_config}
        if (replicas := recipe.parallel.replicas) > 1:
            if world_size % replicas:
                raise InputError(f"parallel.replicas {replicas} does not divide the {world_size} processes")
            sizes = {"dp_replicate_size": replicas, "dp_shard_size": world_size // replicas}
            options |= {"parallelism_config": ParallelismConfig(**sizes)}
    if recipe.compile:
        options |= {"torch_compile": True}
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=b.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=per_process // micro,
        learning_rate=recipe.optimizer.learning_rate,
        max_grad_norm=recipe.optimizer.clip or 0.0,
        logging_strategy="steps",
        logging_steps=c.log,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if c.evaluate else "no",
        eval_steps=c.evaluate or None,
        save_strategy="steps" if c.save else "no",
        save_steps=c.save or 1,
        seed=recipe.seed,
        data_seed=recipe.seed,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        use_cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        report_to=list(_installed(recipe.report_to)),
        run_name=recipe.name,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        **options,
    )
    if recipe.parallel.fsdp and world_size > 1 and arguments.device.type == "cpu":
        # accelerate would take the processes of a CPU for those of DistributedDataParallel, without a word
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return arguments


def _installed(loggers: Sequence[str]) -> Sequence[str]:
    from transformers.integrations import get_available_reporting_integrations  # type: ignore[attr-defined]

    known: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    for name in loggers:
        if name not in known:
            raise InputError(
                f"report_to names {name!r}, which transformers does not know or is not installed; available: "
                f"{', '.join(sorted(known)) or 'none'}"
            )
    return loggers


def recompute_layers(network: Network) -> None:
    """Have the layers compute their activations again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for layer in network.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
