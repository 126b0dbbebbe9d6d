"""Modulation of diffusion transformers, measured: what timesteps and classes do to norms and branches.

A block of Peebles and Xie 2023 (DiT, 2212.09748, section 3.2) is, in feature f of sample b at token t,

    x <- x + gate_bf branch((1 + scale_bf) norm(x)_btf + shift_bf).

gate, scale and shift do not depend on the token, so each is found by least squares over the tokens of a sample,
whatever the model calls it. Their mean squares enter the residual recursion: gate that of the branch's
multiplier, scale that of the norm's gain, shift that of the norm's bias, the same for all tokens of a sample
(`docs/theory/network.md#modulation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import anatomy
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.streams.parts import Branch, Place
from signalprop.streams.proof import tensors_of_pass

__all__ = ["Modulation", "modulation"]

_UNEXPLAINED = 1e-6  # share of the variance over tokens that a modulation may leave: what float32 rounds off
_TINY = 1e-30


@typed
@dataclass(frozen=True, eq=False)
class Modulation:
    """Mean squares over features, (sublayers, samples); of a sublayer without one, 1 (gate, scale) and 0 (shift).

    Attributes:
        names: of the branches, as `anatomy` has them.
        gate: of the factor on the branch. scale: of the factor on what its norm gives, 1 + scale in DiT's words, and in
            units of the norm's output, so that the norm's gains are in it. shift: of what is added to that.
    """

    names: tuple[str, ...]
    gate: FloatArray
    scale: FloatArray
    shift: FloatArray

    @property
    def shift_share(self) -> FloatArray:
        """Share of what every branch reads that is shift, the same for all tokens: (sublayers,).

        The norm gives a mean square of 1, but for its epsilon and gains.
        """
        shift, scale = self.shift.mean(1), self.scale.mean(1)
        return np.asarray(shift / np.maximum(shift + scale, _TINY))

    @typed
    def applied_to(self, parametrization: Parametrization) -> Parametrization:
        """The table with these multipliers on branches and norms, and shifts as norms' biases, averaged over samples.

        The stream's variance adds up over branches, so that its mean over timesteps needs the mean of gate^2 alone.
        A shift is what all tokens share, so that attention does not average it away; shifts of different sublayers are
        taken as independent of each other.

        Args:
            parametrization: of a network with as many sublayers.

        Raises:
            InputError: a table with another number of sublayers.
        """
        p = parametrization
        if p.n_sublayers != len(self.names):
            raise InputError(f"the modulation is of {len(self.names)} sublayers, the table has {p.n_sublayers}")
        gate, scale = np.sqrt(self.gate.mean(1)), np.sqrt(self.scale.mean(1))
        shift = (p.norm_bias * scale) ** 2 + self.shift.mean(1) / np.maximum(p.norm_scale, _TINY) ** 2
        return p.with_columns(branch=p.branch * gate, norm_gain=p.norm_gain * scale, norm_bias=np.sqrt(shift))


@typed
def modulation(model: nn.Module, arguments: Mapping[str, Any]) -> Modulation:
    """Measure the modulation of a model whose branches write to one residual stream, by one forward pass.

    Args:
        model: in the mode in which it is (dropout would be no modulation: call `eval()` first).
        arguments: of its forward; samples differ in their timesteps, drawn as training draws them.

    Raises:
        InputError: a branch whose factor is not one per sample and feature, or that no module shows; or fewer than 3
            tokens, which explain anything.
    """
    branches = [branch for stack in anatomy(model, arguments).stacks for branch in stack.branches]
    wanted = {place for branch in branches for place in _places(branch)}
    tensors, _ = tensors_of_pass(model, arguments, wanted)
    gates, scales, shifts = [], [], []
    for branch in branches:
        before, after, output, normed, read = (tensors[place] for place in _places(branch))
        gates.append(_gate(branch.module, output, after - before))
        scale, shift = _affine(branch.module, normed, read)
        scales.append(scale)
        shifts.append(shift)
    return Modulation(tuple(b.module for b in branches), np.array(gates), np.array(scales), np.array(shifts))


def _places(branch: Branch) -> tuple[Place, Place, Place, Place, Place]:
    """Where the stream before and after a branch, its output, its norm's output and what it reads are seen."""
    sums = (branch.stream_in, branch.total, branch.output)
    if branch.placement != "pre" or branch.norm is None or branch.parallel or None in sums:
        raise InputError(
            f"{branch.module or 'a branch'}: modulation is read of branches one after the other, each with a norm "
            f"before it; this one is {branch.placement}{' in parallel' * branch.parallel}"
        )
    before, after, output = (place for place in sums if place is not None)
    return before, after, output, Place(branch.norm, "output"), Place(branch.module, "input")


def _gate(name: str, output: Tensor, added: Tensor) -> FloatArray:
    """Mean square over features of the factors by which an output is added, (samples,)."""
    output, added = _by_sample(name, output), _by_sample(name, added)
    factor = (output * added).sum(1) / (output * output).sum(1).clamp_min(_TINY)
    _check(name, added - factor[:, None] * output, added, "the sum does not add its output times one factor")
    return np.asarray((factor**2).mean(1).numpy())


def _affine(name: str, normed: Tensor, read: Tensor) -> tuple[FloatArray, FloatArray]:
    """Mean squares over features of factor and shift from a norm's output to what a branch reads, (samples,) each."""
    normed, read = _by_sample(name, normed), _by_sample(name, read)
    n, u = (x - x.mean(1, keepdim=True) for x in (normed, read))
    factor = (n * u).sum(1) / (n * n).sum(1).clamp_min(_TINY)
    _check(name, u - factor[:, None] * n, u, "it does not read its norm's output times one factor and a shift")
    shift = (read - factor[:, None] * normed).mean(1)
    return np.asarray((factor**2).mean(1).numpy()), np.asarray((shift**2).mean(1).numpy())


def _by_sample(name: str, x: Tensor) -> Tensor:
    if x.ndim != 3 or x.shape[1] < 3:
        raise InputError(
            f"{name} sees a tensor of shape {tuple(x.shape)}; expected (samples, 3 tokens or more, features)"
        )
    return x.detach().to("cpu", torch.float64)


def _check(name: str, left: Tensor, whole: Tensor, what: str) -> None:
    share = float((left**2).sum() / (whole**2).sum().clamp_min(_TINY))
    if share > _UNEXPLAINED:
        raise InputError(
            f"{name}: {what} per sample and feature ({share:.1e} of it is left); modulation is not read of it"
        )
