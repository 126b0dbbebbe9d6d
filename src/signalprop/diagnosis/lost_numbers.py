"""What a loader or a converter left out: gains of some norms, biases, scales of whole numbers, a head."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.diagnosis.sentences import fault
from signalprop.diagnosis.temporary_changes import part_of_bias
from signalprop.results.findings import Finding
from signalprop.streams.proof import gain_and_bias

_READ = "tested: the numbers were read"
_MANY = 4  # matrices, at the least, whose largest entries are compared
_MOST = 0.8  # of them
_FLOATS = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2"))


def lost_numbers(attached: Anatomy) -> Iterator[Finding]:
    """All that fit a model."""
    groups = _norms(attached)
    trained = {name for name, held in groups.items() if not all(_constant(g) for g, _ in held)}
    if trained:
        final = {_anywhere(attached.path_of(norm, "norm")) for norm in attached.ends.final_norms}
        yield from _gains(groups, trained | final)  # a separate finding reports those
        yield from _biases(attached, groups, trained)
    yield from _scales(attached)


def _norms(attached: Anatomy) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
    """(gains, biases) of all norms, by their path with * for numbers."""
    out: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
    for path, module in attached.model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        gain, bias = gain_and_bias(module)
        if isinstance(gain, Tensor) and gain.ndim == 1 and gain.numel() > 1 and not gain.is_meta:
            held = bias.detach() if isinstance(bias, Tensor) and not bias.is_meta else None
            out.setdefault(_anywhere(path), []).append((gain.detach(), held))
    return out


def _anywhere(path: str) -> str:
    """A path with * for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _constant(gain: Tensor) -> bool:
    return bool((gain == gain[0]).all())


def _gains(groups: dict[str, list[tuple[Tensor, Tensor | None]]], trained: set[str]) -> Iterator[Finding]:
    """Norms of one kind whose gains are one number in every layer, though others were trained."""
    left = {
        name: float(held[0][0][0]) for name, held in groups.items()
        if name not in trained and len({float(g[0]) for g, _ in held}) == 1
        and all(b is None or not bool(b.any()) for _, b in held)
    }  # fmt: skip
    ones = {name: value for name, value in left.items() if value}  # a separate finding reports zeros
    if ones:
        yield fault(
            name="norm gains not loaded",
            text=f"the gains of {', '.join(ones)} are all {next(iter(ones.values())):g}, while those of "
            f"{', '.join(sorted(trained)[:3])} were trained",
            remedy="look for these norms' names among the checkpoint's unexpected and missing keys",
            cause="possible, not tested: the loader found no weights for them",
        )


def _biases(
    attached: Anatomy, groups: dict[str, list[tuple[Tensor, Tensor | None]]], trained: set[str]
) -> Iterator[Finding]:
    """Biases that are all 0 in a model whose gains were trained. Those of keys change nothing, and stay there."""
    held = [part_of_bias(row.weights.get(role)) for row in attached.rows for role in ("query", "value")]
    lost = ["queries and values"] if any(b is not None for b in held) and not any(_any(b) for b in held) else []
    if attached.mapping.architecture.input != "tokens":
        lost = []  # speech and image models are released without
    lost += [
        name for name in sorted(trained)
        if any(b is not None for _, b in groups[name]) and not any(_any(b) for _, b in groups[name])
    ]  # fmt: skip
    if lost:
        yield fault(
            name="biases of zeros", severity="warning",
            text=f"the biases of {', '.join(lost)} are 0 in every layer, while other parameters were trained",
            remedy="look for biases among the checkpoint's unexpected or missing keys; a model without them says so in "
            "its configuration",
            cause="possible, not tested: a converter that carried weights alone",
        )  # fmt: skip


def _any(bias: Tensor | None) -> bool:
    return bias is not None and bool(bias.any())


def _scales(attached: Anatomy) -> Iterator[Finding]:
    """Matrices of layers that hold a quantised format's numbers themselves: its scales were not applied."""
    maps = [
        p.detach() for layer in attached.layers if isinstance(layer, nn.Module) for p in layer.parameters()
        if p.ndim > 1 and p.is_floating_point() and p.dtype not in _FLOATS and not p.is_meta
    ]  # fmt: skip
    if len(maps) < _MANY:
        return
    largest = [float(p.abs().max()) for p in maps]
    usual = max(set(largest), key=largest.count)
    whole = [x >= 2 and bool((p == p.round()).all()) for p, x in zip(maps, largest, strict=True)]
    if sum(whole) >= _MOST * len(maps):
        what = f"whole numbers up to {max(largest):g}"
    elif usual >= 2 and largest.count(usual) >= _MOST * len(maps):
        what = f"numbers whose largest is {usual:g} in {largest.count(usual)} of {len(maps)}"
    else:
        return
    yield fault(
        name="scales lost",
        text=f"matrices of the layers hold {what}, as quantised formats store them: their scales were not applied",
        remedy="look for scales (weight_scale, weight_scale_inv, SCB) among the checkpoint's unexpected keys, and "
        "multiply them in",
        cause=_READ,
    )  # fmt: skip
