"""Token kernels through sublayers without a closed form: their PyTorch module is run on a draw.

Given the kernel K of what a sublayer reads, a random map of it gives Gaussian numbers of kernel fan_in sigma^2 K over
tokens, exactly, at any width. So what the maps that read the stream give is drawn in their place, with that kernel over
features exactly where there are enough of them; the module runs on it, its other weights drawn by the table, up to what
its output map reads, H, and the output's kernel is sigma^2 H H^T. Back, a gradient at H is drawn with the kernel that
the output map sends there, goes through the module by autograd, and arrives at the stream as the sum of sigma^2 dZ dZ^T
over the maps Z that read it (their weights count as independent of it). Of a kind whose maps are not called one by one
(experts) the stream itself is drawn, and the branch taken as it is.

A sublayer has one draw in a network, and a prediction is the mean over networks: draws that are averaged inside a layer
miss what a network's chance does to the layers after it (24 % of a fresh Gemma 4's gradient).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.kernels.stack import BranchKernel
from signalprop.models.transformer import surroundings
from signalprop.models.weights import draw, tensor_seed
from signalprop.network.kinds import Role, kind_of
from signalprop.network.layout import STACKS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization

_ENOUGH = 2  # features per token from which a draw has its kernel exactly


class Given(nn.Module):
    """In the place of a map that reads the stream: what is drawn of its output, (1, tokens, features)."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, stream: Tensor) -> Tensor:
        """(1, tokens, features) of as many tokens as `stream`, (1, tokens, ...), has."""
        return self.values[:, : stream.shape[1]]


class Draw(NamedTuple):
    """One draw of a sublayer at the kernel that it reads.

    Attributes:
        given: what stands for the stream, (1, tokens, features) each, and the variance on which a gradient there comes
            back to the stream. inner: the module's output, (1, tokens, features).
        out, bias, back: from inner to the branch: variance of a map over all that it reads, and of its bias; and over
            all that it gives, on which a gradient comes back.
    """

    kernel: FloatArray
    given: list[tuple[Tensor, float]]
    inner: Tensor
    out: float
    bias: float
    back: float


class DrawnSublayers(BranchKernel):
    """The sublayers of one stack that are drawn, whatever their kind. Draws of a network are the same both ways."""

    def __init__(self, p: Parametrization, stack: int) -> None:
        self.p, self.stack = p, STACKS[stack]
        self.last: dict[tuple[int, int], Draw] = {}  # by network and sublayer

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        drawn = self._draw(i, kernel, grad=self.caches)
        if self.caches:
            self.last[self.network, i] = drawn
        return self._finite(i, _gram(drawn.inner, drawn.out) + drawn.bias)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        drawn = self.last.pop((self.network, i), None)
        if drawn is None or not np.array_equal(drawn.kernel, kernel):
            drawn = self._draw(i, kernel, grad=True)
        arrived = self._gaussian(_root(gradient), drawn.inner.shape[-1], i, "gradient")
        sent = torch.autograd.grad(drawn.inner, [x for x, _ in drawn.given], arrived, allow_unused=True)
        found = [_gram(x, back) for x, (_, back) in zip(sent, drawn.given, strict=True) if x is not None]
        return self._finite(i, np.asarray(drawn.back * np.sum([np.zeros_like(kernel), *found], 0)))

    def _finite(self, i: int, kernel: FloatArray) -> FloatArray:
        if not np.isfinite(kernel).all():
            words = kind_of(self.p, i).words
            raise InputError(f"sublayer {i} ({words}) overflows single precision, in which it is drawn; scale it down")
        return kernel

    def _draw(self, i: int, kernel: FloatArray, *, grad: bool) -> Draw:
        kind, p, a = kind_of(self.p, i), self.p, self.p.architecture
        roles = [role for role in kind.roles if role.exists(a)]
        writers = [role for role in roles if role.writes]
        whole = len(writers) > 1 or kind.has_copies  # maps that are not called one by one: the stream itself is drawn
        few = a if whole or kind.narrower is None else a.replace(**kind.narrower(a))
        variance = {role.name: float(p.weights[role.name][i]) ** 2 for role in roles}
        biased = {role.name: bool(role.biased(a) or p.biases[role.name][i] > 0) for role in roles}
        module: nn.Module = kind.part("module").make(replace(p, architecture=few), i, biased, torch.float32, None)
        module.requires_grad_(False)
        root, given = _root(kernel), list[tuple[Tensor, float]]()
        for role in roles:
            linear = getattr(module, role.name)
            if role.writes and not whole:
                setattr(module, role.name, nn.Identity())
            elif role.reads and not whole:
                inputs, outputs = role.fan(a)
                values = self._gaussian(root, role.fan(few)[1], i, role.name) * (inputs * variance[role.name]) ** 0.5
                values = (values + self._bias(role, i, values.shape[-1:])).requires_grad_(grad)
                given.append((values, outputs * variance[role.name]))
                setattr(module, role.name, Given(values))
            else:
                std, distribution = float(p.weights[role.name][i]), p.distribution[role.name]
                draw(linear.weight, std, distribution, self.network, str(i), role.name)
                if linear.bias is not None:
                    linear.bias.copy_(self._bias(role, i, linear.bias.shape))
        stream = root.new_empty(1, len(kernel), 1)
        out, bias, back = 1.0, 0.0, 1.0
        if whole:
            stream = self._gaussian(root, a.d_model, i, "stream").requires_grad_(grad)
            given.append((stream, 1.0))
        else:
            inputs, outputs = writers[0].fan(a)
            out, back = inputs * variance[writers[0].name], outputs * variance[writers[0].name]
            bias = float(p.biases[writers[0].name][i]) ** 2
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad):  # dropout, the same both ways
            torch.manual_seed(tensor_seed(self.network, str(i), "dropout"))
            inner = module(stream, surroundings(few, stream, self.stack))
        return Draw(kernel, given, inner, out, bias, back)

    def _gaussian(self, root: Tensor, features: int, i: int, what: str) -> Tensor:
        """Numbers with a kernel over tokens whose root is given, (1, tokens, features)."""
        x = torch.empty(len(root), features)
        draw(x, 1.0, "normal", self.network, str(i), what)
        if features >= _ENOUGH * len(root):
            x = torch.linalg.solve_triangular(torch.linalg.cholesky(x @ x.mT / features), x, upper=False)
        return (root @ x)[None]

    def _bias(self, role: Role, i: int, shape: torch.Size) -> Tensor:
        """That of a role, which all tokens share."""
        bias = torch.empty(shape)
        draw(bias, float(self.p.biases[role.name][i]), "normal", self.network, str(i), f"{role.name} bias")
        return bias


def _root(kernel: FloatArray) -> Tensor:
    """R with R R^T = kernel, (tokens, tokens), where it has no negative direction."""
    try:
        found = np.linalg.cholesky(kernel + np.diag(1e-9 * np.diagonal(kernel)))
    except np.linalg.LinAlgError:
        size, axes = np.linalg.eigh(kernel)
        found = axes * np.sqrt(np.maximum(size, 0.0))
    return torch.from_numpy(found).float()


def _gram(x: Tensor, variance: float) -> FloatArray:
    """The kernel of a Gaussian map of x, (1, tokens, features), whose weights have this variance over all features."""
    flat = x.detach()[0]
    return np.asarray((flat @ flat.mT).double().numpy() * (variance / flat.shape[-1]))
