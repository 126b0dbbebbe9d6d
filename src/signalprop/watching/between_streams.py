"""The covariance of several residual streams, of a tensor that holds them side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from signalprop.network.moments import FloatArray
from signalprop.results.between_streams import over_their_mean
from signalprop.watching.reduction import Padding


def products(x: Tensor, n: int, padding: Padding | None) -> Tensor:
    """Mean products of n streams' entries, less their mean, over real tokens, (n, n) in float64, on x's device.

    Args:
        x: (batch, tokens, n * features), stream by stream.
    """
    rows = (x if padding is None else x[padding.keep]).reshape(-1, n, x.shape[-1] // n)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    total = torch.zeros(n, n, dtype=wide, device=x.device)
    mean = rows.mean(dtype=wide)
    for part in torch.split(rows, 1024):
        centred = part.to(wide) - mean
        total += torch.einsum("tif,tjf->ij", centred, centred)
    return total


def covariance(products: Tensor) -> FloatArray:
    """Of `products`, over the mean of the streams' variances."""
    return over_their_mean(products.cpu().double().numpy())
