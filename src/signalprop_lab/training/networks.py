"""The network of a recipe, with its scheme, and how it is fed."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach
from signalprop.attachment.mapping import Mapping, find
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.data.batches import Batch
from signalprop.errors import InputError, refusing, require, unknown
from signalprop.files import checkpoint_loading
from signalprop.models import build
from signalprop.models.transformer import Transformer
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.repair import apply, load, parameter_groups
from signalprop.repair.record import record_of
from signalprop.repair.saving import RECORD
from signalprop.schemes import scheme as scheme_of
from signalprop_lab.training.examples import Examples, Ordered, Prepared, as_batch, collate
from signalprop_lab.training.recipe import Model, Optimizer, Recipe, architecture_of

_STATISTICS_OF = 32  # examples whose statistics a scheme is given
_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "speech-to-text": "AutoModelForSpeechSeq2Seq",
    "translation": "AutoModelForSeq2SeqLM",
}
# Fields of transformers' configurations that follow from the data, where a family has them.
_FACTS = {"vocab_size": "vocab_size", "n_classes": "num_labels", "seq_len": "max_position_embeddings"}


@dataclass(frozen=True)
class Network:
    """A model that can be trained.

    Attributes:
        module: what is trained. base: the same without adapters, whose layers the mapping speaks of.
        mapping: of the base.
        parametrization: the numbers it started with; read from the weights where no scheme made them.
    """

    module: nn.Module
    base: nn.Module
    mapping: Mapping
    parametrization: Parametrization

    @property
    def anatomy(self) -> Anatomy:
        """The base as it is now; a scheme that it carries says the rest of its mapping."""
        return attach(self.base, None if record_of(self.base) is not None else self.mapping)

    def arguments(self, tensors: Dictionary[str, Tensor]) -> dict[str, Tensor]:
        """A collated batch as arguments of the model's forward, with its `labels`."""
        assert self.mapping.arguments is not None
        given = self.mapping.arguments(as_batch(tensors))
        wanted = {
            name: value.float() if value.dtype == torch.float64 else value
            for name, value in given.items()
            if isinstance(value, Tensor) and name not in ("targets", "labels")
        }
        return wanted | {"labels": tensors["labels"]}

    def groups(self, recipe: Recipe) -> list[dict[str, Any]]:
        """Parameters for a PyTorch optimizer: learning rates of the scheme, decay for matrices and tables only."""
        o = recipe.optimizer
        if isinstance(self.base, Transformer) or (record_of(self.base) is not None and self.module is self.base):
            groups = parameter_groups(
                self.base,
                lr=o.learning_rate,
                weight_decay=o.weight_decay,
                eps=o.eps,
                optimizer=o.name,
                rest_lr=o.rest_rate,
            )
        else:
            groups = self._plain_groups(o)
        if o.name == "sgd":
            groups = [{key: value for key, value in group.items() if key != "eps"} for group in groups]
        if o.embedding_rate is not None:
            groups = _with_embedding_rate(groups, self._tables(), o.embedding_rate)
        return [{key: value for key, value in group.items() if key != "names"} for group in groups]

    @property
    def layers(self) -> list[nn.Module]:
        """The modules of the layers, in order."""
        paths = [path for item in self.mapping.layers for path in (item if isinstance(item, tuple) else (item,))]
        return [find(self.base, path, "layer") for path in paths]

    def _plain_groups(self, o: Optimizer) -> list[dict[str, Any]]:
        """Groups of a model that no scheme has numbers for."""
        by_muon = {id(p) for layer in self.layers for p in layer.parameters() if p.ndim == 2 and o.name == "muon"}
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in self.module.parameters():
            if p.requires_grad:
                groups.setdefault((p.ndim > 1, id(p) in by_muon), []).append(p)
        return [
            {"params": found, "weight_decay": o.weight_decay if decays else 0.0}
            | ({"lr": o.learning_rate} if muon else {"lr": o.rest_rate or o.learning_rate, "eps": o.eps})
            | ({"use_muon": muon} if o.name == "muon" else {})
            for (decays, muon), found in groups.items()
        ]

    def _tables(self) -> set[int]:
        """Identities of the embedding tables' parameters."""
        e = self.mapping.embedding
        tables = (e.token, e.position, e.segment, e.decoder_position)
        found = [x for x in tables if isinstance(x, (nn.Module, nn.Parameter))]
        found += [self.base.get_submodule(x) for x in tables if isinstance(x, str)]
        return {id(p) for x in found for p in ([x] if isinstance(x, nn.Parameter) else x.parameters())}


def _with_embedding_rate(groups: list[dict[str, Any]], tables: set[int], rate: float) -> list[dict[str, Any]]:
    out = []
    for group in groups:
        inside = [p for p in group["params"] if id(p) in tables]
        outside = [p for p in group["params"] if id(p) not in tables]
        for parameters, changed in ((outside, {}), (inside, {"lr": rate})):
            if parameters:
                out.append(group | {"params": parameters} | changed)
    return out


# --- making it --------------------------------------------------------------------------------------------------------


def sample_batch(prepared: Prepared, n: int) -> Batch:
    """`n` training examples (of a stream, of those at its beginning), in the order of seed 0, as one batch."""
    listed = prepared.train if isinstance(prepared.train, Examples) else prepared.train.sample
    ordered = Ordered(listed, min(n, len(listed)), 0)
    return as_batch(collate([ordered[i] for i in range(len(ordered))], prepared.pads), prepared.source)


def network_of(recipe: Recipe, prepared: Prepared) -> Network:
    """The network that a recipe asks for, drawn with its seed."""
    torch.manual_seed(recipe.seed)
    model = recipe.model
    if model.architecture is not None:
        architecture = architecture_of(recipe, prepared.facts)
        statistics = sample_batch(prepared, _STATISTICS_OF).statistics(architecture)
        base: nn.Module = build(table_of(model, architecture, statistics), seed=recipe.seed)
    elif model.huggingface is not None:
        base = _fresh(recipe, prepared)
    else:
        base = _pretrained(recipe, prepared)
    config: Any = getattr(base, "config", None)
    if recipe.task == "sequence-classification" and config is not None:
        # decoders of transformers classify at the last token that is not padding, which they find by its id
        config.pad_token_id = int(prepared.pads["tokens"])
    if model.scheme is not None and model.architecture is None:
        data, fresh = sample_batch(prepared, _STATISTICS_OF), model.pretrained is None
        apply(base, model.scheme, data=data, initialize=fresh, redraw=fresh, seed=recipe.seed, **model.options)
    mapping = attach(base).mapping
    record = record_of(base)
    if isinstance(base, Transformer):
        parametrization = base.parametrization
    else:
        parametrization = record.parametrization if record is not None else read_parametrization(base, mapping)
    module = base if model.lora is None else _with_adapters(base, model)
    return Network(module, base, mapping, parametrization)


def table_of(model: Model, architecture: Architecture, statistics: InputStatistics) -> Parametrization:
    """The numbers of a network: its scheme's, with weights and ends of other schemes where the recipe says so."""
    assert model.scheme is not None
    table = scheme_of(model.scheme, **model.options)(architecture, statistics)
    if model.ends is not None:
        other = scheme_of(model.ends)(architecture, statistics)
        table = replace(table, embedding=other.embedding, head=other.head)
    if model.weights is not None:
        other = scheme_of(model.weights)(architecture, statistics)
        table = replace(table, weights=other.weights, biases=other.biases, distribution=other.distribution)
    present = [role for role, std in table.weights.items() if (std > 0).any()]
    for role, factor in model.rates.items():
        if role not in present:
            raise unknown("role of model.rates", role, present)
        table = replace(table, learning_rates={**table.learning_rates, role: table.learning_rates[role] * factor})
    return table


def _auto(recipe: Recipe) -> Any:
    transformers: Any = require("transformers", "training")
    return getattr(transformers, _AUTO[recipe.task])


def _fresh(recipe: Recipe, prepared: Prepared) -> nn.Module:
    """A model of transformers with fresh weights."""
    given = dict(recipe.model.huggingface or {})
    family = given.pop("model_type")
    try:
        blank = checkpoint_loading.configuration_of(family)
    except ValueError:
        raise InputError(f"model.huggingface.model_type {family!r} is unknown to transformers") from None
    unknown = [name for name in given if not hasattr(blank, name)]
    if unknown:
        raise InputError(f"model.huggingface.{unknown[0]}: the configuration of {family} has no such field")
    given = _facts_of(recipe, prepared, blank) | given
    config = checkpoint_loading.configuration_of(family, **given)
    with refusing(f"transformers cannot make a {family} for {recipe.task}", "correct model.huggingface"):
        model: nn.Module = checkpoint_loading.fresh(_auto(recipe), config)
    return model


def _facts_of(recipe: Recipe, prepared: Prepared, config: Any) -> dict[str, Any]:
    """What the data decide, in the names of a configuration."""
    out = {
        name: prepared.facts[fact] for fact, name in _FACTS.items() if fact in prepared.facts and hasattr(config, name)
    }
    if recipe.task == "image-classification":
        d = recipe.data
        out |= {"image_size": d.image_size, "patch_size": d.patch_size, "num_channels": d.channels}
        out.pop("max_position_embeddings", None)
    return out


def _pretrained(recipe: Recipe, prepared: Prepared) -> nn.Module:
    """A checkpoint's model: with the scheme that it carries, or plain."""
    from pathlib import Path

    source = recipe.model.pretrained
    assert source is not None
    if (Path(source) / RECORD).is_file():
        return load(source)
    extra = {"num_labels": prepared.facts["n_classes"]} if "n_classes" in prepared.facts else {}
    with refusing(f"cannot load {source} for {recipe.task}", "expected a checkpoint of transformers with such a head"):
        model: nn.Module = checkpoint_loading.pretrained(_auto(recipe), source, dtype=torch.float32, **extra)
    return model


def _with_adapters(base: nn.Module, model: Model) -> nn.Module:
    peft: Any = require("peft", "training")
    assert model.lora is not None
    heads = [name for name in ("classifier", "score", "lm_head") if hasattr(base, name)]
    config = peft.LoraConfig(
        r=model.lora.rank,
        lora_alpha=model.lora.alpha,
        lora_dropout=model.lora.dropout,
        target_modules=list(model.lora.targets) or "all-linear",
        modules_to_save=heads if "lm_head" not in heads else None,
    )
    with refusing("model.lora does not fit this model", "name its maps with model.lora.targets"):
        adapted: nn.Module = peft.get_peft_model(base, config)
    return adapted
