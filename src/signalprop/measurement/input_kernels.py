"""The token kernels of a live model's input, for `signalprop.trace` to start from."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, require_roles
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import Hooks
from signalprop.measurement.measuring import arguments_of
from signalprop.measurement.passes import output_of
from signalprop.network.moments import FloatArray


@typed
def input_kernels(
    model: nn.Module | Anatomy, batch: Batch | Dictionary[str, Any], *, mapping: Mapping | None = None
) -> FloatArray:
    """X X^T / d of the stream that enters the first sublayer, for every sequence of a batch: (batch, tokens, tokens).

    One forward pass without gradients, in the mode that the model is in. Padding is not left out.

    Args:
        model, batch, mapping: as in `signalprop.measure`.

    Raises:
        InputError: as `signalprop.measure`; or the first sublayer does not read (batch, tokens, features).
    """
    attached = require_roles(attach(model, mapping))
    mapping, places = attached.mapping, attached.plan
    seen: list[Tensor] = []

    def keep(_: int, tensor: Tensor | None) -> None:
        if tensor is None or tensor.ndim != 3:
            got = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise InputError(f"the first sublayer reads {got}; expected a stream (batch, tokens, features)")
        if not seen:
            seen.append(tensor.detach().double())

    hooks = Hooks()
    hooks.sites([places.sites[places.stream_in[0]]], keep)
    with hooks, torch.no_grad():
        output_of(attached.model, arguments_of(attached, batch))
    if not seen:
        raise InputError("the model did not run its first sublayer; fix the mapping")
    x = seen[0] * attached.rows[0].units[0]
    kernels: FloatArray = (x @ x.transpose(1, 2) / x.shape[2]).cpu().numpy()
    return kernels
