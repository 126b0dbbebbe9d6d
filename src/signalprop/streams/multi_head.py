"""PyTorch's attention, `nn.MultiheadAttention`, which calls its maps as functions: replayed from what it reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from signalprop.hooks import whole
from signalprop.streams.replay import AttentionShape, Replayed, attended, fused_rows

_ROLES = ("query", "key", "value")


def multi_head_attention(
    home: str, module: nn.MultiheadAttention, entry: Tensor, memory: Tensor | None, given: Tensor, limit: float
) -> Replayed | None:
    """The roles of its parameters, where attention with them gives the module's output; else nothing.

    Of one with keys of another width, or with keys that no token has, nothing either.

    Args:
        entry: the input of queries, (tokens, features), float64. memory: the input of keys and values; default:
            the same. given: what it output.
    """
    packed, bias, d = whole(module.in_proj_weight), whole(module.in_proj_bias), module.embed_dim
    weight, shift = whole(module.out_proj.weight), whole(module.out_proj.bias)
    if packed is None or module.bias_k is not None or module.add_zero_attn:
        return None
    rows = fused_rows(module.num_heads, module.num_heads, d // module.num_heads, "blocks")
    across = memory is not None

    def heads(role: str) -> Tensor:
        x = entry if memory is None or role == "query" else memory
        projected = x @ packed[rows[role]].double().cpu().mT
        projected = projected if bias is None else projected + bias[rows[role]].double().cpu()
        return projected.reshape(len(projected), module.num_heads, -1).transpose(0, 1)

    def error(found: Tensor) -> float:
        projected = found @ weight.double().cpu().mT
        projected = projected if shift is None else projected + shift.double().cpu()
        return float((projected - given).abs().max()) / (float(given.abs().max()) or 1.0)

    with torch.no_grad():
        q, k, v = map(heads, _ROLES)
        for causal in (False,) if across else (False, True):
            shape = AttentionShape(
                module.num_heads, module.num_heads, (d // module.num_heads) ** -0.5, causal, "blocks"
            )
            off = error(attended(q, k, v, shape))
            if off <= limit and error(attended(0 * q, k, v, shape)) > 64 * off:  # else any queries and keys would do
                packed_roles = {role: (f"{home}.in_proj_weight", rows[role]) for role in _ROLES}
                return Replayed({**packed_roles, "output": (f"{home}.out_proj", None)}, off, shape, across=across)
    return None


def bias_beside(owner: object, name: str) -> Tensor | None:
    """The bias of a bare weight as PyTorch's attention names them: in_proj_weight, in_proj_bias."""
    found = getattr(owner, f"{name.removesuffix('weight')}bias", None) if name.endswith("weight") else None
    return found if isinstance(found, Tensor) else None
