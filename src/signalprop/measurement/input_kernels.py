"""The token kernels of a live model's own input, for `signalprop.trace` to start from."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.families import mapping_for
from signalprop.attachment.live_model import unwrapped
from signalprop.attachment.mapping import Mapping, plan
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.measuring import arguments_of
from signalprop.network.moments import FloatArray
from signalprop.watching.recording import first_tensor, uncompiled


@typed
def input_kernels(
    model: nn.Module, batch: Batch | Dictionary[str, Any], *, mapping: Mapping | None = None
) -> FloatArray:
    """X X^T / d of the stream that enters the first sublayer, for every sequence of a batch: (batch, tokens, tokens).

    One forward pass without gradients, in the mode that the model is in. Padding is not left out.

    Args:
        model, batch, mapping: as in `signalprop.measure`.

    Raises:
        InputError: as `signalprop.measure`; or the first sublayer does not read (batch, tokens, features).
    """
    model = unwrapped(model)
    mapping = mapping_for(model, mapping)
    places = plan(model, mapping)
    site = places.sites[places.stream_in[0]]
    seen: list[Tensor] = []

    def keep(tensor: Tensor | None) -> None:
        if tensor is None or tensor.ndim != 3:
            got = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise InputError(f"the first sublayer reads {got}; expected a stream (batch, tokens, features)")
        if not seen:
            seen.append(tensor.detach().double())

    def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(first_tensor(args) if args else first_tensor(kwargs.values()))

    def leaves(_: nn.Module, __: Any, output: Any) -> None:
        keep(output if isinstance(output, Tensor) else first_tensor(output))

    if site.side == "input":
        handle = site.module.register_forward_pre_hook(enters, with_kwargs=True)
    else:
        handle = site.module.register_forward_hook(leaves)
    try:
        with uncompiled(model), torch.no_grad():
            model(**arguments_of(model, mapping, batch))
    finally:
        handle.remove()
    if not seen:
        raise InputError("the model did not run its first sublayer; mend the mapping")
    x = seen[0] * mapping.sublayers[0].units[0]
    kernels: FloatArray = (x @ x.transpose(1, 2) / x.shape[2]).cpu().numpy()
    return kernels
