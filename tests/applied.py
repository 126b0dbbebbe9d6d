"""Applied models beside built ones: tiny Hugging Face models, the same weights in both, and what to compare."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp
from signalprop.attachment.anatomy import attach
from signalprop.attachment.parameters_by_role import Part, assignments
from signalprop.data.batches import Batch, default_statistics
from signalprop.models.synthetic import synthetic_batch
from signalprop.models.transformer import Transformer, batch_tensors
from signalprop.network.parametrization import Parametrization
from signalprop.repair import apply, saving
from signalprop.repair.splices import TrainedMultiplier

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 61
# One scheme of every way to change a model: weights alone, uniform draws, gains, fixed and trained multipliers, skips,
# factors on scores and head, learning rates, the embedding's factor. The other schemes are slow tests.
WAYS = (
    "xavier", "ds-init", "lns", "deepscalelm", "layerscale", "normalised-skip", "mup", "depth-mup", "minicpm", "bamboo",
)  # fmt: skip
FIXED = {
    name: {"trainable": "fixed"} for name in ("admin", "normalised-gates")
}  # whose skips train, which is other wiring
IDS = 3 + torch.arange(2 * 12).reshape(2, 12) * 5 % (VOCABULARY - 3)
_LLAMA = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# class of the model, class of its configuration, name of its number of layers, the rest
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", "num_hidden_layers", {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", "n_layer", {
        "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 24, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", "num_hidden_layers", _LLAMA),
    "vit": ("ViTForImageClassification", "ViTConfig", "num_hidden_layers", {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16, "patch_size": 4,
        "num_labels": 10}),
    "t5": ("T5ForConditionalGeneration", "T5Config", "num_layers", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": VOCABULARY, "dropout_rate": 0.0,
        "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", "num_hidden_layers", {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", "num_hidden_layers", _LLAMA | {"head_dim": 8}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", "num_hidden_layers", _LLAMA | {"head_dim": 8}),
}  # fmt: skip


def vanilla(name: str, n_layers: int = 2, **changes: Any) -> nn.Module:
    """A tiny model of a family, with transformers' own weights."""
    model_class, config_class, depth, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options | {depth: n_layers} | changes)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model


def batch_of(model: nn.Module, n_tokens: int = 13) -> Batch:
    """Two sequences that a model can read, without the ids of padding."""
    a = attach(model).mapping.architecture
    if a.input == "tokens":
        a = a.replace(seq_len=n_tokens)
    batch = synthetic_batch(a, default_statistics(a), 2, 0)
    if batch.tokens is None:
        return batch
    later = None if batch.decoder_tokens is None else np.maximum(batch.decoder_tokens, 3)
    return replace(batch, tokens=np.maximum(batch.tokens, 3), decoder_tokens=later)


def arguments_of(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The model's arguments for a batch, in its own type."""
    dtype = next(model.parameters()).dtype
    mapping = attach(model).mapping
    given = mapping.arguments(batch)
    return {k: v.to(dtype) if torch.is_floating_point(v) else v for k, v in given.items() if v is not None}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """What the model says about a batch."""
    out: Tensor = model(**arguments_of(model, batch)).logits
    return out


def outputs(model: nn.Module) -> Tensor:
    """What the model says about its own batch, without gradients."""
    with torch.no_grad():
        return logits_of(model, batch_of(model))


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference over the largest number."""
    return float((one - other).abs().max() / other.abs().max())


@contextmanager
def double_norms() -> Iterator[None]:
    """RMS norms of transformers compute in float32 whatever the model's type; here they compute in the model's type."""
    from importlib import import_module
    from importlib.util import find_spec

    def plain(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def offset(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)

    def scaled(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight if self.with_scale else None, self.eps)

    names = {"llama": "LlamaRMSNorm", "mistral": "MistralRMSNorm", "qwen2": "Qwen2RMSNorm", "qwen3": "Qwen3RMSNorm",
             "olmo2": "Olmo2RMSNorm", "t5": "T5LayerNorm", "gemma": "GemmaRMSNorm", "gemma3": "Gemma3RMSNorm",
             "mt5": "MT5LayerNorm", "smollm3": "SmolLM3RMSNorm", "arcee": "ArceeRMSNorm", "olmo3": "Olmo3RMSNorm",
             "ministral": "MinistralRMSNorm", "hunyuan_v1_dense": "HunYuanDenseV1RMSNorm",
             "exaone4": "Exaone4RMSNorm", "seed_oss": "SeedOssRMSNorm", "cwm": "CwmRMSNorm",
             "eurobert": "EuroBertRMSNorm", "gemma2": "Gemma2RMSNorm", "phi3": "Phi3RMSNorm",
             "lfm2": "Lfm2RMSNorm", "qwen2_moe": "Qwen2MoeRMSNorm", "glm4_moe": "Glm4MoeRMSNorm",
             "flex_olmo": "FlexOlmoRMSNorm", "granite": "GraniteRMSNorm", "gemma4": "Gemma4RMSNorm"}  # fmt: skip
    there = [name for name in names if find_spec(f"transformers.models.{name}") is not None]  # in this release
    found = {n: getattr(import_module(f"transformers.models.{n}.modeling_{n}"), names[n]) for n in there}
    own = {"gemma": offset, "gemma2": offset, "gemma3": offset, "gemma4": scaled}
    changed = [(cls, own.get(name, plain)) for name, cls in found.items()]
    before = [(cls, cls.forward) for cls, _ in changed]
    try:
        for cls, forward in changed:
            cls.forward = forward
        yield
    finally:
        for cls, forward in before:
            cls.forward = forward


@dataclass
class Pair:
    """An applied model, and the model built from the same table with the same weights."""

    applied: nn.Module
    built: Transformer
    table: Parametrization
    batch: Batch


def pair(name: str, scheme: Any, n_layers: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> Pair:
    """Apply a scheme to a vanilla model, and build what it then is."""
    model = vanilla(name, n_layers).to(dtype)
    if name == "vit":  # patches of real images are alike, those of the default are not
        options.setdefault(
            "inputs", replace(default_statistics(attach(model).mapping.architecture), token_correlation=0.3)
        )
    table = apply(model, scheme, seed=3, **FIXED.get(scheme, {}) | options)
    built = sp.build(table, seed=3, dtype=dtype)
    with torch.no_grad():  # what a table does not speak of
        if name == "vit":
            built.encoder.embedding.class_token.copy_(model.vit.embeddings.cls_token.flatten())
        if name == "bert":
            built.encoder.embedding.token.weight[0] = 0.0  # the row of padding
        if name == "t5":
            built.encoder.embedding.token.weight[0] = model.shared.weight[0]
            for stack in ("encoder", "decoder"):
                theirs = getattr(model, stack).block[0].layer[0].SelfAttention.relative_attention_bias
                getattr(built, stack).relative.table.weight.copy_(theirs.weight)
        if name in ("llama", "gemma", "qwen3"):
            built.decoder.embedding.token.weight[0] = 0.0
    return Pair(model, built, table, batch_of(model))


def loss_of(logits: Tensor) -> Tensor:
    """Cross-entropy against targets that depend on nothing but the shape."""
    targets = torch.arange(logits[..., 0].numel()) * 7 % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, -2), targets)


def built_logits(made: Pair) -> Tensor:
    """Logits of the built model."""
    dtype = next(made.built.parameters()).dtype
    given = {
        k: v.to(dtype) if v is not None and torch.is_floating_point(v) else v
        for k, v in batch_tensors(made.batch).items()
    }
    out = made.built(**given).logits
    assert out is not None
    return out


def role_gradients(model: nn.Module, table: Parametrization) -> dict[tuple[str, str, int], Tensor]:
    """Gradient of every role of every sublayer, as (outputs, inputs); multipliers too. Key biases have none."""
    out: dict[tuple[str, str, int], Tensor] = {}

    def put(where: str, role: str, gradient: Tensor | None) -> None:
        if gradient is None or role in ("key bias", "head bias"):  # zero, and not mapped in a built model
            return
        count = 0
        while (where, role, count) in out:
            count += 1
        out[where, role, count] = gradient.double().flatten()

    attached = attach(model)
    for item in assignments(attached, table):
        for part in item.parts:
            put(part.where, part.role, None if item.tensor.grad is None else rows_of(item.tensor.grad, part))
    for i in range(len(attached.rows)):
        for module in multipliers(model, i):
            if isinstance(value := getattr(module, "multiplier", None), nn.Parameter):
                put(f"sublayer {i}", "multiplier", value.grad)
    return out


def multipliers(model: nn.Module, i: int) -> list[nn.Module]:
    """The modules that hold the trainable multipliers of a sublayer."""
    if isinstance(model, Transformer):
        sublayer = model.sublayers()[i]
        return [sublayer, sublayer.branch.function]
    carrier = attach(model).rows[i].ending
    return [carrier] if isinstance(carrier, TrainedMultiplier) else []


def rows_of(tensor: Tensor, part: Part) -> Tensor:
    """The part of a tensor that plays a role, as (outputs, inputs)."""
    rows: Any = slice(None) if part.rows is None else part.rows
    return tensor[:, rows].T if part.transposed else tensor[rows]


def distance(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> float:
    """Relative L2 distance of all gradients together."""
    assert one.keys() == other.keys(), sorted(map(str, one.keys() ^ other.keys()))
    a = torch.cat([one[key] for key in one])
    b = torch.cat([other[key] for key in one])
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def seal(folder: Path) -> None:
    """Give an edited signalprop.json, its multipliers and config.json the id that fits its contents."""
    path = folder / saving.RECORD
    document = json.loads(path.read_text())
    named = document["tensors"]
    tensors = saving.read_tensors(folder / saving.TENSORS, document["id"]) if named else {}
    document["id"] = saving.digest(document, tensors)
    path.write_text(json.dumps(document))
    if named:
        saving.write_tensors(folder / saving.TENSORS, tensors, document["id"])
    config = json.loads((folder / "config.json").read_text())
    config["signalprop"]["id"] = document["id"]
    (folder / "config.json").write_text(json.dumps(config))


def trained(model: nn.Module) -> nn.Module:
    """The model with its trainable multipliers away from their start, at which some branches are off."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, q in model.named_parameters():
            if name.rpartition(".")[2] == "multiplier":
                q.add_(0.3 + 0.1 * torch.randn(q.shape, generator=generator))
    return model


def close(one: Tensor, other: Tensor, bound: float = 1e-5) -> None:
    """Largest difference over the largest number."""
    error = float((one - other).detach().abs().max() / other.detach().abs().max())
    assert error <= bound, error
