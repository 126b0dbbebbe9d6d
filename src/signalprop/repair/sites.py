"""A numerical check of where the signal runs, by one tiny forward pass and without any table of families.

`confirm` takes a mapping at its word: noise is put in the place of every carrier's output, and the stream has to take
it up as the mapping says. What takes nothing for granted is `signalprop.anatomy`, which needs five times as long (of
GPT-2 small 1.1 s of CPU, of this .2 s) and does not understand every model that was mapped by hand.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import number
from signalprop.attachment.rows import AttachedRow
from signalprop.errors import InputError
from signalprop.repair.tiny_pass import ROUNDINGS, TinyPass, arguments_for, like, on_meta, rms, same


def confirm(attached: Anatomy, arguments: Dictionary[str, Any] | None = None) -> bool:
    """Whether the mapping says what the model does; raises where it does not.

    The output of every carrier is replaced by noise of the stream's size, and then for every sublayer: the branch is
    that noise; the stream after it is skip * stream_in + multiplier * branch, to the rounding of the dtype (in a
    parallel layer the sum of both branches, in post-norm what the norm reads); the norm reads the stream; the maps that
    begin the branch read the norm's output, or the stream without a norm before them.

    Args:
        attached: a model before a scheme is applied. It runs in evaluation mode, without gradients; its mode is
            restored.
        arguments: keyword arguments of its forward; default: a few random tokens through `mapping.arguments`.

    Returns:
        True; False where nothing was checked because parameters are on the meta device.
    """
    try:
        return _confirmed(attached, arguments)
    except InputError:
        refuse_not_finite(attached.model)
        raise


def refuse_not_finite(model: nn.Module) -> None:
    """Raise InputError where a parameter is NaN or infinite: what was computed with it says nothing of the mapping."""
    for name, tensor in model.named_parameters():
        if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{name} holds NaN or infinite numbers; load weights that are finite, or draw new ones"
            ) from None


def _confirmed(attached: Anatomy, arguments: Dictionary[str, Any] | None) -> bool:
    sites, rows = attached.plan, attached.layout
    carriers = carriers_of(attached)
    if on_meta(attached.model):
        return False
    readers = [[m for m in row.readers if isinstance(m, nn.Module)] for row in attached.rows]
    norms = [row.norm for row in attached.rows]
    first = {int(stack): int(np.flatnonzero(rows.stack == stack)[0]) for stack in set(rows.stack.tolist())}
    generator = torch.Generator().manual_seed(0)

    def noise(i: int, like: Tensor) -> Tensor:
        entry = tiny_pass.seen(sites.sites[sites.stream_in[first[int(rows.stack[i])]]])
        size = (0.0 if entry is None else rms(entry)) or 1.0
        return (size * torch.randn(like.shape, generator=generator)).to(like.device, like.dtype)

    tiny_pass = TinyPass({id(module): (lambda like, i=i: noise(i, like)) for i, module in enumerate(carriers)})
    watched = [*((site.module, site.side) for site in sites.sites), *((module, "output") for module in carriers)]
    watched += [(norm, side) for norm in norms if norm is not None for side in ("input", "output")]
    watched += [(module, "input") for each in readers for module in each]
    tiny_pass.run(attached.outer, arguments_for(attached, arguments), watched)

    def at(index: int) -> Tensor:
        seen = tiny_pass.seen(sites.sites[index])
        if seen is None:
            raise tiny_pass.failure(f"{sites.where(index)} was not reached")
        return seen

    read_before: Tensor | None = None
    for i, row in enumerate(attached.rows):
        where = row.label
        calls = len(tiny_pass.outputs.get(id(carriers[i]), []))
        if calls != 1:
            raise tiny_pass.failure(f"{where}: its carrier ran {calls} times in a forward pass; expected once")
        stream, branch = at(sites.stream_in[i]), at(sites.branch[i])
        given = tiny_pass.outputs[id(carriers[i])][0]
        on_branch = row.placement == "res-post"  # there the factor of the norm belongs to the branch
        if not same(branch, given) and not (on_branch and same(branch, given * row.norm_scale)):
            raise InputError(
                f"{where}: the branch is not what its carrier outputs; the mapping's `carrier` has to be the last "
                "map of the branch (after it only dropout), `branch` the module after it"
            )
        read = stream
        if i and read_before is not None and sites.stream_in[i] == sites.stream_in[i - 1] and not rows.parallel[i]:
            item_before = attached.rows[i - 1]  # no module sees the stream between the two
            read = number(item_before.skip) * read_before + _wide(item_before.multiplier) * at(sites.branch[i - 1])
        _check_reading(tiny_pass, row, readers[i], read)
        read_before = read
        norm = norms[i]
        if row.placement == "post":
            if norm is None:
                raise InputError(f"{where}: its layer is post-norm, but no norm of this sum is known")
            total, free = _only(tiny_pass.inputs, norm, f"{where}: its norm", tiny_pass), True
        elif sites.stream_out[i] >= 0:
            total, free = at(sites.stream_out[i]), False
        else:
            continue  # the attention row of a parallel layer: the sum is tested at the next row
        ends = (sites.stream_in[i], sites.stream_out[i])
        together = [i - 1, i] if rows.parallel[i] else [i]
        if not rows.parallel[i] and row.placement != "post":  # no module sees the stream between them (Falcon-H1)
            together = [j for j in range(len(carriers)) if ends == (sites.stream_in[j], sites.stream_out[j])]
        terms: list[tuple[Any, Tensor]] = [(number(attached.rows[together[0]].skip), stream)]
        terms += [(attached.rows[j].multiplier, at(sites.branch[j])) for j in together]
        _check_sum(total, terms, where, free=free)
    return True


def carriers_of(attached: Anatomy) -> list[nn.Module]:
    """The carrier of every sublayer: the module that a multiplier goes on."""
    first: dict[int, AttachedRow] = {}
    carriers: list[nn.Module] = []
    for row in attached.rows:
        found = row.ending
        if not isinstance(found, nn.Module):
            why = "the mapping names no carrier; give `carrier`, the last module of the branch"
            raise InputError(f"{row.label}: {why}")
        twin = first.setdefault(id(found), row)
        if twin is not row:
            raise InputError(f"{row.label}: its carrier is also that of {twin.label}; expected one module each")
        carriers.append(found)
    return carriers


def _check_reading(tiny_pass: TinyPass, row: AttachedRow, readers: Sequence[nn.Module], stream: Tensor) -> None:
    """The norm reads the stream, and the maps read the norm's output."""
    where, norm = row.label, row.norm
    source, name = [stream], "the stream that enters it"
    if row.placement in ("pre", "sandwich") and norm is not None:
        if not same(_only(tiny_pass.inputs, norm, f"{where}: its norm", tiny_pass), stream):
            raise InputError(f"{where}: its norm does not read {name}; fix `norm` or `reads` of the mapping")
        normed = _only(tiny_pass.outputs, norm, f"{where}: its norm", tiny_pass)
        source, name = [normed, normed * row.norm_scale], "its norm's output"
    if row.normed:  # by a function, which leaves nothing but a factor on every token of a stream without its mean
        source, name = [_direction(stream), _direction(stream - stream.mean(-1, keepdim=True))], "its norm's output"
    for reader in readers:
        seen = _only(tiny_pass.inputs, reader, f"{where}: a map of the mapping's `weights`", tiny_pass)
        seen = _direction(seen) if row.normed else seen
        if not any(same(seen, each) for each in source):
            raise InputError(
                f"{where}: a map that begins the branch does not read {name}; fix `weights`, `norm` or the placement"
            )


def _direction(x: Tensor) -> Tensor:
    """Every token over its length."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def _check_sum(total: Tensor, terms: list[tuple[Any, Tensor]], where: str, *, free: bool) -> None:
    """total = sum of factor * tensor, to rounding; `free`: up to a factor, where a norm reads the total."""
    wide = [_wide(factor) * like(tensor, total).double() for factor, tensor in terms]
    if {term.shape for term in wide} != {total.shape}:
        shapes = ", ".join(str(tuple(term.shape)) for term in (*wide, total))
        raise InputError(f"{where}: stream, branch and their sum have different shapes ({shapes}); expected one")
    expected, actual = torch.stack(wide).sum(0), total.double()
    if free:
        expected = expected * (expected * actual).sum() / (expected * expected).sum().clamp_min(1e-300)
    dtypes = [tensor.dtype for tensor in (total, *(tensor for _, tensor in terms)) if tensor.is_floating_point()]
    rounding = ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)
    rounding *= rms(actual) + sum(rms(term) for term in wide)
    error = rms(actual - expected)
    if not error <= rounding:
        rest, branch = actual - wide[0], wide[1]
        factor = float((rest * branch).sum() / (branch * branch).sum().clamp_min(1e-300))
        hint = "a branch is missing or is added twice"
        if len(wide) == 2 and rms(rest - factor * branch) <= rounding:
            hint = f"the model multiplies the branch by {factor:.4g} times what the mapping says"
        raise InputError(
            f"{where}: the stream after it is not skip * stream_in + multiplier * branch (off by "
            f"{error / (rms(actual) or 1):.2g} of its size): {hint}; fix the mapping"
        )


def _only(seen: dict[int, list[Tensor]], module: nn.Module, what: str, tiny_pass: TinyPass) -> Tensor:
    """The tensor of a module that runs (at least) once."""
    tensors = seen.get(id(module), [])
    if not tensors:
        raise tiny_pass.failure(f"{what} ({type(module).__name__}) never ran")
    return tensors[0]


def _wide(factor: Any) -> Any:
    return factor.detach().double() if isinstance(factor, Tensor) else float(factor)
