"""What a compiled graph keeps for its backward pass where layers are checkpointed.

Such a graph keeps what the forward pass needs and what is marked, and makes the rest again.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

_LIBRARY = torch.library.Library("signalprop", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("kept(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("told(Tensor x, Tensor sums) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "kept", "CompositeImplicitAutograd")
def _kept(x: Tensor) -> Tensor:
    nodes = _nodes()
    before = len(nodes)
    out = torch.maximum(x, x)  # inductor takes copies out before it looks for marks
    for node in islice(reversed(nodes), len(nodes) - before):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return out


@torch.library.impl(_LIBRARY, "told", "CompositeImplicitAutograd")
def _told(x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    checkpointed = any("recompute" in node.meta for node in islice(reversed(_nodes()), 1))
    if not checkpointed:
        return x.view_as(x), sums.clone()
    sums = _kept(sums)
    return torch.where(sums[0] < 0, x, x), sums


def _nodes() -> Any:
    """Of the graph that is being traced; none where a tensor is computed."""
    tracing = get_proxy_mode()
    return [] if tracing is None else tracing.tracer.graph.nodes


def kept(x: Tensor) -> Tensor:
    """The tensor, which is kept.

    Between two checkpointed layers that is the stream, and a layer is computed again from there; a view, which is never
    kept, would have it compute all layers again from the first one's input.
    """
    out: Tensor = torch.ops.signalprop.kept(x)
    return out


def told(x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor, and its sums; in a checkpointed layer the sums are kept.

    The graph has that tensor only when it has the sums, so that the forward pass needs these. For the sums of a layer's
    last branch its last product of matrices would be made again, which nothing else needs.
    """
    both: tuple[Tensor, Tensor] = torch.ops.signalprop.told(x, sums)
    return both
