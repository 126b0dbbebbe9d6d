"""Layers to leave unquantised, in the words of the runtimes that quantise: names of modules, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from signalprop.attachment.attached import is_transposed

# What vLLM makes one map of: it refuses a checkpoint in which some of these are left out and others not, by
# `ignored_layers` and by llm-compressor's `ignore` alike (is_layer_skipped, should_ignore_layer in its sources).
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def left_out(model: nn.Module, reasons: Mapping[str, str]) -> dict[str, Any]:
    """The list of every runtime (docs/diagnosing.md: where each goes), and the reason of every module; empty without.

    A list that is given replaces the default of transformers, which spares the head; llm-compressor's default is empty,
    and torchao's filter takes every linear map: so the head is in. Names are held against whole paths (vLLM,
    llm-compressor without "re:", torchao).

    Experts' weights, which one parameter holds, are left out with their module: no runtime takes them apart. As vLLM
    matches names of experts, and llm-compressor's models, which have them one by one, need a pattern.

    Args:
        reasons: by path of a linear map in the model, or of experts' module or its parameter, in words.
    """
    if not reasons:
        return {"reasons": {}, "runtimes": {}}
    named = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ends = {name: "the head, which no runtime spares by itself where a list is given" for name, module in named.items()
            if module is head and name not in reasons}  # fmt: skip
    every = {**reasons, **ends}
    maps = [name for name in every if hasattr(named.get(name), "weight")]
    stacks = list(dict.fromkeys(n if n in named else n.rpartition(".")[0] for n in every if n not in maps))
    together = sorted({one for name in maps for one in _together(name, named)}, key=[*named].index)
    return {
        "reasons": every,
        "runtimes": {
            "transformers": maps + stacks,
            "llm-compressor": together + [f"re:{re.escape(name)}.*" for name in stacks],
            "torchao": maps,
            "onnxruntime": [f"{_scope(name)}/{'Gemm' if is_transposed(named[name]) else 'MatMul'}" for name in maps],
            "vllm": together + stacks,
        },
    }


def _scope(name: str) -> str:
    """`model.layers.3.mlp` as the exporter has it: /model/layers.3/mlp."""
    return "/" + re.sub(r"\.(?!\d+(\.|$))", "/", name)


def _together(name: str, named: Mapping[str, nn.Module]) -> Iterable[str]:
    """The map and those that vLLM computes with it."""
    parent, _, last = name.rpartition(".")
    group = next((names for names in _FUSED if last in names), (last,))
    return [path for one in group if (path := f"{parent}.{one}".lstrip(".")) in named]
