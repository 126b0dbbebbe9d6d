"""Models with nothing wrong: none may be given a fault or a warning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.doctor import models
from benchmarks.doctor.changes import blocks
from benchmarks.doctor.table import Healthy
from benchmarks.small_configs import small_config
from benchmarks.small_models import model_classes
from signalprop.attachment.anatomy import attach
from signalprop.data.batches import Batch
from signalprop.diagnosis.loading import load
from signalprop.diagnosis.stream import token_batches

FAMILIES = (
    "llama", "gpt2", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3", "mistral", "mixtral", "phi", "phi3", "opt",
    "gpt_neox", "gptj", "bloom", "bert", "roberta", "distilbert", "t5", "bart", "olmo2", "cohere", "stablelm", "falcon",
    "mpnet", "whisper",
)  # fmt: skip


def family(config_type: str) -> Any:
    """A fresh small model, as its constructor leaves it."""
    config = small_config(config_type)
    torch.manual_seed(0)
    return model_classes(config_type, config)[0](config).eval()


def muted(*layers: int) -> Any:
    """New blocks whose output and down maps are 0."""
    model = models.fresh("llama")
    for i in layers:
        for name, p in blocks(model)[i].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(p)
    return model


def all_muted() -> Any:
    """Every branch ends in zeros, as in ReZero and Fixup."""
    return muted(*range(12))


def adapted(name: str) -> Any:
    """A trained model with fresh adapters of rank 4."""
    from peft import LoraConfig, get_peft_model

    target = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    model = models.trained(name, FOLDER)
    return get_peft_model(model, LoraConfig(r=4, target_modules=target)).eval()


def encoder() -> tuple[Any, list[Batch]]:
    """A fresh one that reads all words, on a text of which some are masked."""
    return models.decoder("no mask"), models.masked_words()


def released(directory: str) -> tuple[Any, list[Batch]]:
    """A checkpoint on disk, and the embedded text by its tokenizer."""
    loaded = load(directory)
    a = attach(loaded.model).mapping.architecture
    return loaded.model, list(token_batches(None, loaded.tokenizer, 128, 4, 8, architecture=a))


FOLDER: Path | None = None
HEALTHY = (
    *(Healthy(f"fresh {name}", partial(family, name)) for name in FAMILIES),
    *(Healthy(f"trained {name}", lambda name=name: models.trained(name, FOLDER), name) for name in models.TRAINED
      if name not in models.ASKED),  # type: ignore[misc]
    *(Healthy(f"fresh {name}, of the faults' size", partial(models.fresh, name)) for name in models.FRESH
      if name not in ("mixtral, top-1", "t5")),  # whose starts are faults of their own
    Healthy("three blocks muted by zero outputs", partial(muted, 3, 7, 11)),
    Healthy("every block muted by zero outputs", all_muted),
    Healthy("a decoder in plain PyTorch", models.decoder),
    Healthy("an encoder in plain PyTorch", encoder),
    Healthy("a post-norm decoder in plain PyTorch", partial(models.decoder, "post-norm")),
    Healthy("a post-norm decoder that calls its norms first", partial(models.decoder, "norm on the skip")),
    Healthy("trained llama with adapters", partial(adapted, "llama"), "llama"),
    Healthy("trained gpt2 with adapters", partial(adapted, "gpt2"), "gpt2"),
)  # fmt: skip
