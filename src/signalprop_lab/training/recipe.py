"""Recipes: what a training run is, as one validated value; read from YAML, changed by `key=value`, written whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from signalprop.errors import InputError, require, unknown
from signalprop.files.validation import Value, typed
from signalprop.network.architecture import Architecture
from signalprop.network.presets import PRESETS
from signalprop_lab.training.recipe_files import AsTuple, read_recipe, with_settings

__all__ = ["Recipe", "load_recipe"]

Task = Literal[
    "masked-lm", "causal-lm", "image-classification", "speech-to-text", "translation", "sequence-classification"
]
SCHEMA = "signalprop/recipe/1"


class LoRA(Value):
    """Low-rank adapters (peft): only they and a new head are trained.

    Attributes:
        rank, alpha, dropout: as peft has them. targets: names of modules; default: every linear map but the head.
    """

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Annotated[tuple[str, ...], AsTuple] = ()


class Model(Value):
    """Which network is trained. Exactly one of `architecture`, `huggingface` and `pretrained`.

    Attributes:
        architecture: fields of an Architecture, built by signalprop; `preset` names what they change.
        huggingface: a configuration of transformers: `model_type` and its fields; fresh weights.
        pretrained: a checkpoint's directory or hub name; its weights are kept, and a scheme is not drawn anew.
        scheme: name of a scheme; none: the model as its library makes it (not for `architecture`).
        options: of the scheme.
        ends: the scheme whose embeddings and head are taken in place of the scheme's, so that methods can be
            compared at one embedding scale. weights: likewise the scheme whose initial weights are taken, so that
            initialisation and multipliers can be distinguished. rates: factors on the learning rates of roles' weights,
            beside the scheme's, such as those that a study of first steps calls even. All three for `architecture`.
        lora: adapters instead of full training.
    """

    architecture: dict[str, Any] | None = None
    huggingface: dict[str, Any] | None = None
    pretrained: str | None = None
    scheme: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    ends: str | None = None
    weights: str | None = None
    rates: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    lora: LoRA | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("architecture", "huggingface", "pretrained") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give one of architecture, huggingface and pretrained; got {' and '.join(given) or 'none of them'}"
            )
        if self.architecture is not None and self.scheme is None:
            raise ValueError("a network that signalprop builds needs a scheme; see `signalprop schemes`")
        own = next((name for name in ("ends", "weights", "rates") if getattr(self, name)), None)
        if own is not None and self.architecture is None:
            raise ValueError(
                f"{own} belongs to a network that signalprop builds, by architecture; leave it out (of a base: null)"
            )
        if self.options and self.scheme is None:
            raise ValueError("there are options, but no scheme that they belong to")
        if self.huggingface is not None and "model_type" not in self.huggingface:
            raise ValueError("huggingface needs model_type, such as llama, gpt2, bert or vit")
        return self


class Tokenizer(Value):
    """How text becomes ids.

    Attributes:
        kind: `bytes` (256 values); `bpe` (byte-level), `wordpiece`, `unigram`: trained on the training text and cached;
            `pretrained`: that of `path`.
        vocab_size: of a trained one. path: a tokenizer's directory, its tokenizer.json, or a hub name.
        lowercase: of a trained one; WordPiece only.
    """

    kind: Literal["bytes", "bpe", "wordpiece", "unigram", "pretrained"] = "bpe"
    vocab_size: int = Field(4096, ge=260, le=1_000_000)
    path: str | None = None
    lowercase: bool = False

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.kind == "pretrained") != (self.path is not None):
            raise ValueError("path belongs to kind `pretrained`, which needs it")
        return self


class Data(Value):
    """What is read.

    Attributes:
        source: `sotu` (the embedded text), `digits` (scikit-learn's images), `synthetic-speech`, a file or directory,
            or the name of a set for the package `datasets`.
        validation: a share of the documents (or examples) that is held out, by their content's hash, so that copies
            stay together; or a separate file, directory or split.
        subset, split: of a `datasets` name; the split of `sotu` is `train` or some years, such as `1790-1899`.
        streaming: read it as it comes, without a copy on disk.
        text, target, label, image, audio: names of columns or JSON fields, where they are not the usual ones.
        tokenizer: for text.
        seq_len: tokens that a model reads; target_len: of a decoder's text.
        mask_fraction: share of the positions that carry loss in masked-lm.
        image_size, patch_size: pixels (images are resized); channels.
        augment: random crops and flips of images.
        sample_rate, frame_dim: of audio: Hz, and log-mel features per 10 ms.
        limit: read only so many documents or examples.
        cache: directory for tokenizers and tokenized text; default: the user's cache directory.
    """

    source: str = "sotu"
    validation: float | str = 0.05
    subset: str | None = None
    split: str = "train"
    streaming: bool = False
    text: str | None = None
    target: str | None = None
    label: str | None = None
    image: str | None = None
    audio: str | None = None
    tokenizer: Tokenizer = Field(default_factory=lambda: Tokenizer.model_validate({}))
    seq_len: int = Field(128, ge=2, le=1_000_000)
    target_len: int | None = Field(None, ge=2, le=1_000_000)
    mask_fraction: float = Field(0.15, gt=0, lt=1)
    image_size: int = Field(32, ge=4, le=4096)
    patch_size: int = Field(4, ge=1, le=1024)
    channels: Literal[1, 3] = 1
    augment: bool = False
    sample_rate: int = Field(16_000, ge=1000, le=192_000)
    frame_dim: int = Field(80, ge=4, le=512)
    limit: int | None = Field(None, ge=1)
    cache: str | None = None

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError(f"validation is {self.validation}; expected a share between 0 and 1, or a path")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        return self


class Optimizer(Value):
    """How weights follow their gradients.

    Attributes:
        name: `adamw`, `adam` (no decoupled decay), `sgd` (`betas[0]` is its momentum) or `muon` (for the layers'
            matrices, and AdamW for all else).
        learning_rate: the peak; factors of a scheme multiply it. rest_rate: AdamW's beside Muon, whose rate is some ten
            times as large; default: `learning_rate`.
        embedding_rate: of token, position and segment tables, where it differs (SPA appendix H).
        betas, eps, weight_decay: decay is for matrices only. clip: of the gradient's norm; none: no clipping.
        label_smoothing: share of the targets' weight that all classes get.
    """

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    rest_rate: float | None = Field(None, gt=0)
    embedding_rate: float | None = Field(None, gt=0)
    betas: Annotated[tuple[float, float], AsTuple] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip: float | None = Field(1.0, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _beside_muon(self) -> Self:
        if self.rest_rate is not None and self.name != "muon":
            raise ValueError(f"rest_rate is for AdamW in a run with Muon; {self.name} has learning_rate alone")
        return self


class Schedule(Value):
    """The learning rate over the steps, as a share of its peak.

    Attributes:
        kind: after the warm-up. warmup: steps (1 or more), or a share of all steps (below 1).
        final: what cosine, linear and wsd end at. decay: share of all steps over which wsd (warm-up, stable, decay)
            falls linearly at the end.
    """

    kind: Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"] = "cosine"
    warmup: float = Field(0.1, ge=0)
    final: float = Field(0.0, ge=0, le=1)
    decay: float = Field(0.2, gt=0, le=1)

    @model_validator(mode="after")
    def _no_floor(self) -> Self:
        if self.final and self.kind not in ("cosine", "linear", "wsd"):
            raise ValueError(f"final belongs to cosine, linear and wsd; {self.kind} has none")
        return self


class Budget(Value):
    """How much is trained.

    Attributes:
        steps: optimizer steps. batch_size: sequences (or images, ...) per step, over all processes.
        micro_batch: per process and pass; default: as many as there are (no gradient accumulation).
        until_learning: end as soon as the run has left the plateau at chance (`plateau.left_at`), for studies of when
            that happens.
    """

    steps: int = Field(500, ge=1)
    batch_size: int = Field(16, ge=1)
    micro_batch: int | None = Field(None, ge=1)
    until_learning: bool = False


class Cadence(Value):
    """Every how many steps something happens; 0: never (but for the last step, which is always logged and evaluated).

    Attributes:
        log: loss, rate, gradient norm. evaluate: on the first `validation_examples` of the validation data.
        save: checkpoints, of which the last `keep` stay. signal: the Profile of the model on a fixed batch.
        monitor: the numbers of `sp.SignalCallback`, with its warnings.
    """

    log: int = Field(10, ge=1)
    evaluate: int = Field(100, ge=0)
    save: int = Field(100, ge=0)
    signal: int = Field(50, ge=0)
    monitor: int = Field(0, ge=0)
    keep: int = Field(2, ge=1)
    validation_examples: int = Field(128, ge=1)


class Parallel(Value):
    """How several processes (torchrun) share the work; one process needs nothing of it.

    Attributes:
        fsdp: shard parameters, gradients and optimizer. fsdp_config: fields of accelerate's
            FullyShardedDataParallelPlugin. replicas: groups of processes, each of which shards among itself (HSDP): as
            many as there are machines.
    """

    fsdp: bool = False
    replicas: int = Field(1, ge=1)
    fsdp_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_shards(self) -> Self:
        if self.replicas > 1 and not self.fsdp:
            raise ValueError("replicas are of a sharded model; set fsdp too")
        return self


class Recipe(Value):
    """A training run.

    Attributes:
        name: of the run directory. description: what it is for, and where its numbers come from.
        task: what is learnt.
        model, data, optimizer, schedule, budget, cadence, parallel: sections, field by field in docs/training.md.
        seed: of weights, order of the data, masks and dropout.
        precision: of the arithmetic; weights and optimizer stay float32.
        compile: torch.compile of every layer.
        gradient_checkpointing: layers are computed again in the backward pass, for less memory.
        report_to: trackers of accelerate beside signalprop's files, such as tensorboard; each has to be installed.
        schema_: version of the format.
    """

    schema_: Literal["signalprop/recipe/1"] = Field("signalprop/recipe/1", alias="schema")
    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    task: Task
    model: Model
    data: Data = Field(default_factory=lambda: Data.model_validate({}))
    optimizer: Optimizer = Field(default_factory=lambda: Optimizer.model_validate({}))
    schedule: Schedule = Field(default_factory=lambda: Schedule.model_validate({}))
    budget: Budget = Field(default_factory=lambda: Budget.model_validate({}))
    cadence: Cadence = Field(default_factory=lambda: Cadence.model_validate({}))
    parallel: Parallel = Field(default_factory=lambda: Parallel.model_validate({}))
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    report_to: Annotated[tuple[str, ...], AsTuple] = ()
    seed: int = Field(0, ge=0, le=2**32 - 1)

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON and YAML have it."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self, *, short: bool = False) -> str:
        """The whole recipe, defaults included, so that it means the same after defaults have changed.

        Args:
            short: without fields that have their default, on few lines of a terminal.
        """
        yaml = require("yaml", "training")
        data = self.to_json()
        options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 110}
        if short:
            data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            options |= {"width": 66, "default_flow_style": None}
        return str(yaml.safe_dump(data, **options))


def parse(data: Mapping[str, Any]) -> Recipe:
    """A recipe of a mapping."""
    shaped = dict(data)
    schema = shaped.get("schema")
    if isinstance(schema, str) and schema.startswith("signalprop/") and schema != SCHEMA:
        raise InputError(f"this is of {schema}; expected a recipe, {SCHEMA}")
    for name in ("data", "optimizer", "schedule", "budget", "cadence", "parallel"):
        if name in shaped and shaped[name] is None:  # a heading in YAML with nothing below it
            del shaped[name]
    recipe = Recipe(**shaped)
    _check_architecture(recipe)
    return recipe


@typed
def load_recipe(source: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, or one that comes with the package (`source`), with `key=value` `settings`.

    Raises:
        InputError: as `read_recipe`, `with_settings` and `parse`.
    """
    return parse(with_settings(read_recipe(source), settings))


def _check_architecture(recipe: Recipe) -> None:
    """Names of fields and presets are checked before any data are read."""
    given = recipe.model.architecture
    if given is None:
        return
    preset = given.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise unknown("model.architecture preset", preset, PRESETS)
    wrong = sorted(given.keys() - Architecture.model_fields.keys() - {"preset"})
    if wrong:
        raise unknown("model.architecture field", wrong[0], Architecture.model_fields)


def architecture_of(recipe: Recipe, facts: Mapping[str, Any]) -> Architecture:
    """The architecture that is built: the recipe's fields, and those that the data decide.

    Args:
        facts: fields that follow from the data: vocab_size, seq_len, n_classes, ...
    """
    given = dict(recipe.model.architecture or {})
    preset = given.pop("preset", None)
    for name, value in facts.items():
        if name in given and given[name] is not None and given[name] != value:
            raise InputError(f"model.architecture.{name} is {given[name]}, but the data make it {value}; leave it out")
    fields = given | dict(facts)
    return Architecture.preset(preset, **fields) if preset is not None else Architecture(**fields)
