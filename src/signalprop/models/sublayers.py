"""The sublayers of the network that a parametrization and a seed describe, one by one."""

from __future__ import annotations

import torch
from torch import nn

from signalprop.errors import InputError
from signalprop.kernels.stack import attention_shapes
from signalprop.models.connections import SublayerOfStreams, connections_of
from signalprop.models.multipliers import trainable
from signalprop.models.residual import Branch, Sublayer, make_norm
from signalprop.models.shaping import TorchShape, torch_shape
from signalprop.models.weights import draw
from signalprop.network.embedding_and_head import Distribution
from signalprop.network.kinds import kind_of
from signalprop.network.parametrization import PLACEMENTS, Parametrization


def torch_shapes(parametrization: Parametrization) -> list[TorchShape | None]:
    """How every sublayer's attention is shaped; None where a softmax of the scores does."""
    a = parametrization.architecture
    length = max(a.seq_len, a.target_len or 0)
    shapes = attention_shapes(parametrization)
    made = {one: torch_shape(one, length) for one in set(shapes)}  # once for sublayers that share it
    return [made[one] for one in shapes]


def make_sublayer(
    parametrization: Parametrization,
    index: int,
    seed: int,
    dtype: torch.dtype,
    shape: TorchShape | None,
) -> Sublayer:
    """Sublayer `index` of the network that a parametrization and a seed describe, by itself.

    Args:
        shape: of `torch_shapes`, which makes those of all sublayers at once: calibration passes through the stack.
    """
    p, a = parametrization, parametrization.architecture
    kind = kind_of(p, index)
    biases = {
        role.name: bool(role.biased(a) or p.biases[role.name][index] > 0) for role in kind.roles if role.exists(a)
    }
    function: nn.Module = kind.part("module").make(p, index, biases, dtype, shape)
    for role in biases:
        linear = getattr(function, role)
        made: tuple[Distribution, int, str] = (p.distribution[role], seed, str(index))
        draw(linear.weight, float(p.weights[role][index]), *made, role)
        if linear.bias is not None:
            draw(linear.bias, float(p.biases[role][index]), *made, f"{role} bias")
    placement = PLACEMENTS[p.placement[index]]
    first = None if placement == "none" else make_norm(a, float(p.norm_gain[index]), dtype, float(p.norm_slope[index]))
    if p.norm_bias[index]:
        bias = getattr(first, "bias", None)
        if bias is None:
            raise InputError(
                f"norm_bias of sublayer {index} is {p.norm_bias[index]:g}, and this {a.norm} has no bias; "
                "expected an architecture of norms with one (norm_bias=True)"
            )
        draw(bias, float(p.norm_bias[index]), "normal", seed, str(index), "norm bias")
    second = make_norm(a, float(p.post_norm_gain[index]), dtype) if placement == "sandwich" else None
    if placement == "res-post":
        first, second = None, first
    parallel = bool(p.parallel[index])
    sublayer = Sublayer(
        Branch(function, a.dropout, second),
        first,
        placement=placement,
        # a parallel sublayer's skip is that of the one before it; a parameter would never be read
        skip=trainable(float(p.skip[index]), "fixed" if parallel else p.skip_trainable, a.d_model, dtype),
        multiplier=trainable(float(p.branch[index]), p.branch_trainable, a.d_model, dtype),
        parallel=parallel,
        norm_scale=float(p.norm_scale[index]),
    )
    if a.streams is not None:
        return SublayerOfStreams.of(sublayer, connections_of(p, index, seed, dtype))
    return sublayer
