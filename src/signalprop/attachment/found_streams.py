"""Where the signal of transformers' models with several residual streams runs: for measuring them.

Their layers keep one module per branch that collapses the streams, `attn_hc` before `self_attn` and `ffn_hc` before
`mlp` (DeepSeek-V4, GLM-5.3, Hy4): the streams, (batch, tokens, n, features), are what it is given.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from signalprop.attachment.arguments import batch_arguments
from signalprop.attachment.mapping import Mapping, SublayerMap
from signalprop.network.architecture import Architecture
from signalprop.streams.arguments import text_config

_BRANCHES = (("attn_hc", "self_attn"), ("ffn_hc", "mlp"))


def mapping_of_streams(model: nn.Module, architecture: Architecture | None = None) -> Mapping | None:
    """The mapping of a model all of whose layers have those modules; None of any other.

    Args:
        architecture: the model's, where its family is known; default: what its configuration says of its streams.
    """
    names = {name for pair in _BRANCHES for name in pair}
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for path, layers in lists:
        if len(layers) and all(names <= dict(layer.named_children()).keys() for layer in layers):
            return _mapping(model, path, layers, architecture or _architecture(model, len(layers)))
    return None


def _architecture(model: Any, n_layers: int) -> Architecture:
    text = text_config(model)
    fields: dict[str, Any] = {
        "kind": "decoder",
        "n_layers": n_layers,
        "d_model": text.hidden_size,
        "n_heads": 1,
        "norm": "rmsnorm",
        "streams": {"n": text.hc_mult, "mixing": "mhc" if hasattr(text, "hc_sinkhorn_iters") else "independent"},
        "positions": "none",
        "vocab_size": text.vocab_size,
        "tied_embeddings": False,
        "head": "none" if model.get_output_embeddings() is None else "lm",
        "family": model.config.model_type,
    }
    return Architecture(**fields)


def _mapping(model: Any, path: str, layers: nn.ModuleList, architecture: Architecture) -> Mapping:
    last = f"{path}.{len(layers) - 1}"
    inputs = {"tokens": "input_ids", "keep": "attention_mask"}
    return Mapping(
        architecture=architecture,
        sublayers=[
            SublayerMap(
                branch=f"{path}.{i}.{branch}",
                norm=f"{path}.{i}.{norm}",
                reads=f"{path}.{i}.{gates}",
                writes=last if i == len(layers) - 1 and gates == "ffn_hc" else None,
            )
            for i in range(len(layers))
            for (gates, branch), norm in zip(_BRANCHES, ("input_layernorm", "post_attention_layernorm"), strict=True)
        ],
        arguments=batch_arguments(model, architecture, inputs, model.get_input_embeddings()),
        notes=("several residual streams: moments are means over them",),
        stream_only=True,
    )
