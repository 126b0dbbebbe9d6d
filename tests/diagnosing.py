"""Tiny models of transformers and batches for the tests of `diagnose`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalprop.attachment.anatomy import attach
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch, load_text, word_ids
from signalprop.diagnosis.result import Diagnosis
from signalprop.diagnosis.run import diagnose

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY, LENGTH = 97, 24
_COMMON = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCABULARY,
    "max_position_embeddings": 40, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
_GQA = {"num_key_value_heads": 2}
_FAIRSEQ = {
    "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 2, "init_std": 0.2, "max_position_embeddings": 40,
}  # fmt: skip
# class of the model, class of its configuration, names of its numbers of layers, the rest
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", ("num_hidden_layers",), _COMMON | {"pad_token_id": 1}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", ("n_layer",), {
        "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 40, "initializer_range": 0.2,
        "bos_token_id": 2, "eos_token_id": 3}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", ("num_hidden_layers",), _COMMON | _GQA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", ("num_hidden_layers",), _COMMON | _GQA | {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", ("num_hidden_layers",), _COMMON | _GQA | {
        "head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 6, "sliding_window_pattern": 3,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")}}),
    "opt": ("OPTForCausalLM", "OPTConfig", ("num_hidden_layers",), {
        "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": VOCABULARY, "init_std": 0.2,
        "max_position_embeddings": 40, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "t5": ("T5ForConditionalGeneration", "T5Config", ("num_layers", "num_decoder_layers"), {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": VOCABULARY, "pad_token_id": 0,
        "eos_token_id": 3, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", ("encoder_layers", "decoder_layers"), _FAIRSEQ),
}  # fmt: skip


def tiny(family: str, n_layers: int = 4, seed: int = 0, **changes: Any) -> Any:
    """A model of a family in evaluation mode, whose biases and gains have moved off their start."""
    model_class, config_class, depths, options = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**options | dict.fromkeys(depths, n_layers) | changes)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model


def with_weights(model: Any, other: Any) -> Any:
    """The model, with the weights of another."""
    model.load_state_dict(other.state_dict())
    return model


@cache
def words() -> np.ndarray:
    """The ids of a text's words."""
    return np.maximum(word_ids(load_text()[:40_000], VOCABULARY), 4)


def text_batch(model: nn.Module, n: int = 2, length: int = LENGTH, start: int = 0) -> Batch:
    """Words of a text, as a model reads them."""
    a = mapping_of(model).architecture
    ids = words()[start : start + n * (length + 1)].reshape(n, length + 1)
    if a.kind == "encoder-decoder":
        return Batch(ids[:, :-1], ids[:, 1:], decoder_tokens=ids[:, :-1], source="words")
    return Batch(ids[:, :-1], ids[:, 1:], source="words")


def mapping_of(model: nn.Module) -> Mapping:
    """The model's mapping."""
    return attach(model).mapping


def logits_of(model: nn.Module, batch: Batch, mapping: Mapping | None = None) -> torch.Tensor:
    """What a model says about a batch, without a cache."""
    make = (mapping or mapping_of(model)).arguments
    assert make is not None
    lean = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    with torch.no_grad():
        out = model(**{k: v for k, v in make(batch).items() if v is not None}, **lean)
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return found


# What is true of models of random weights that are no initialiser's.
UNTRAINED = ("no better than guessing", "head not loaded", "unlike its initialiser", "first loss far above ln V")


def diagnosed(model: nn.Module, **options: Any) -> Diagnosis:
    """The diagnosis on one small batch."""
    return diagnose(model, [text_batch(model)], **{"trials": False} | options)


def findings(found: Diagnosis, *severities: str) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, layers) of the verdicts of these severities; that random weights predict nothing goes without saying."""
    return [(v.name, v.layers) for v in found.findings if v.severity in severities and v.name not in UNTRAINED]


def weights_of(model: nn.Module, layer: int, roles: Sequence[str]) -> list[tuple[torch.Tensor, Any]]:
    """(weight, rows or None) of some roles in a layer; rows are columns where a map is turned."""
    from signalprop.attachment.mapping import find_any, split
    from signalprop.attachment.rows import is_transposed
    from signalprop.diagnosis.layers import groups
    from signalprop.network.layout import layout

    mapping = mapping_of(model)
    out = []
    for i in groups(layout(mapping.architecture))[layer]:
        for role, reference in mapping.sublayers[i].weights.items():
            if role in roles:
                place, rows = split(reference)
                owner = find_any(model, place, role)
                weight = owner.weight.data
                view = weight.T if is_transposed(owner) else weight
                out.append((view, slice(None) if rows is None else rows))
    return out
