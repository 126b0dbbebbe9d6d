"""Random weights: every tensor has a separate seed, so one layer can be drawn without the layers before it."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from signalprop.network.embedding_and_head import Distribution
from signalprop.network.parametrization import Parametrization, fan

# Standard deviation of a standard normal that is cut off at +-2: sqrt(1 - 4 pdf(2) / (2 cdf(2) - 1)).
_TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def tensor_seed(seed: int, place: str, role: str) -> int:
    """The 32-bit seed (all that PyTorch's CPU generator reads) of one tensor of one network."""
    digest = hashlib.blake2b(f"{seed}/{place}/{role}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def draw(tensor: Tensor, std: float, distribution: Distribution, seed: int, place: str, role: str) -> None:
    """Fill a tensor with independent numbers of mean 0 and standard deviation `std`, in place.

    Numbers are drawn in float32 whatever the tensor's type, so that a network has the same weights in every
    precision. `truncated_normal` is cut off at two standard deviations of the uncut normal and rescaled to `std`.
    `orthogonal` matrices (Saxe et al. 2014) have orthogonal rows or columns, whichever are fewer, and that mean square.
    `measured` weights have no known shape and are drawn normal.
    """
    with torch.no_grad():
        if std == 0:
            tensor.zero_()
            return
        generator = torch.Generator().manual_seed(tensor_seed(seed, place, role))
        plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        values = tensor if plain else torch.empty(tensor.shape, dtype=torch.float32)
        if distribution == "uniform":
            values.uniform_(-std * math.sqrt(3), std * math.sqrt(3), generator=generator)
        elif distribution == "truncated_normal":
            full = std / _TRUNCATED_STD
            nn.init.trunc_normal_(values, 0.0, full, -2 * full, 2 * full, generator=generator)
        elif distribution == "orthogonal" and tensor.ndim == 2:
            nn.init.orthogonal_(values, std * math.sqrt(max(tensor.shape)), generator=generator)
        else:
            values.normal_(0.0, std, generator=generator)
        if not plain:
            tensor.copy_(values)


class _Undrawn:
    """Memory that is not yet filled: PyTorch would draw weights only to see them overwritten."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Linear(_Undrawn, nn.Linear):
    """A linear map, not drawn yet."""


class Table(_Undrawn, nn.Embedding):
    """A look-up table, not drawn yet."""


class Convolution(_Undrawn, nn.Conv1d):
    """A convolution over time, not drawn yet."""


class WithMaps(nn.Module):
    """A module of a kind of sublayer, whose maps have their roles' names and are not drawn yet.

    Args:
        p, index: the table, and which of its sublayers. biases: whether the map of each role has one; only these are
            made. shape: the matrix that attention is shaped to.

    Attributes:
        filter: the role, if there is one, that is taps of every feature over tokens.
    """

    filter = ""

    def __init__(
        self, p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any = None
    ) -> None:
        super().__init__()
        a = p.architecture
        for role, bias in biases.items():
            if role != self.filter:
                setattr(self, role, Linear(*fan(a, role), bias=bias, dtype=dtype))
        if self.filter:
            width, n = fan(a, self.filter)
            taps = Convolution(n, n, width, groups=n, padding=width - 1, bias=biases[self.filter], dtype=dtype)
            setattr(self, self.filter, taps)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
