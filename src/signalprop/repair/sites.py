"""Two numerical checks of where the signal runs, by one tiny forward pass each and without any table of families.

`confirm` takes a mapping at its word: noise is put in the place of every carrier's output, and the stream has to take
it up as the mapping says. `locate` takes nothing for granted: it looks for tensors that are the sum of an earlier one
and of one or two module outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached, AttachedRow
from signalprop.attachment.live_model import placed, unwrapped
from signalprop.attachment.mapping import describe, number
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import Layout
from signalprop.repair.found_sums import Sum, Value, explained, has_children, values_of
from signalprop.repair.record import record_of
from signalprop.repair.tape import ROUNDINGS, Tape, arguments_for, like, on_meta, rms, same

# --- confirm ---------------------------------------------------------------------------------------------


def confirm(attached: Attached, arguments: Dictionary[str, Any] | None = None) -> bool:
    """Whether the mapping says what the model does; raises where it does not.

    The output of every carrier is replaced by noise of the stream's size, and then for every sublayer: the branch is
    that noise; the stream behind it is skip * stream_in + multiplier * branch, to the rounding of the dtype (in a
    parallel layer the sum of both branches, in post-norm what the norm reads); the norm reads the stream; the maps that
    begin the branch read the norm's output, or the stream where there is no norm before them.

    Args:
        attached: a model before a scheme is applied. It runs in evaluation mode, without gradients; its mode is
            restored.
        arguments: keyword arguments of its forward; default: a few random tokens through `mapping.arguments`.

    Returns:
        True; False where nothing was checked because parameters are on the meta device.

    Raises:
        InputError: the first sublayer that does not fit, a carrier that is missing or serves two sublayers, a model
            that does not run, or weights that are NaN or infinite.
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


def _confirmed(attached: Attached, arguments: Dictionary[str, Any] | None) -> bool:
    if record_of(attached.model) is not None:
        raise InputError("this model carries a scheme already; confirm looks at models before apply")
    sites, rows = attached.plan, attached.layout
    carriers = carriers_of(attached)
    if on_meta(attached.model):
        return False
    readers = [[m for m in row.readers if isinstance(m, nn.Module)] for row in attached.rows]
    norms = [row.norm for row in attached.rows]
    first = {int(stack): int(np.flatnonzero(rows.stack == stack)[0]) for stack in set(rows.stack.tolist())}
    generator = torch.Generator().manual_seed(0)

    def noise(i: int, like: Tensor) -> Tensor:
        entry = sites.sites[sites.stream_in[first[int(rows.stack[i])]]]
        seen = (tape.inputs if entry.side == "input" else tape.outputs).get(id(entry.module), [])
        size = (rms(seen[entry.call]) if len(seen) > entry.call else 0.0) or 1.0
        return (size * torch.randn(like.shape, generator=generator)).to(like.device, like.dtype)

    tape = Tape({id(module): (lambda like, i=i: noise(i, like)) for i, module in enumerate(carriers)})
    watched = [*(site.module for site in sites.sites), *carriers, *(norm for norm in norms if norm is not None)]
    tape.watch([*watched, *(module for each in readers for module in each)])
    tape.run(attached.outer, arguments_for(attached, arguments))

    def at(index: int) -> Tensor:
        site = sites.sites[index]
        seen = (tape.inputs if site.side == "input" else tape.outputs).get(id(site.module), [])
        if len(seen) <= site.call:
            raise tape.failure(f"{_where(rows, sites, index)} was not reached")
        return seen[site.call]

    for i, row in enumerate(attached.rows):
        where, item = row.label, row.item
        calls = len(tape.outputs.get(id(carriers[i]), []))
        if calls != 1:
            raise tape.failure(f"{where}: its carrier ran {calls} times in a forward pass; expected once")
        stream, branch = at(sites.stream_in[i]), at(sites.branch[i])
        given = tape.outputs[id(carriers[i])][0]
        on_branch = row.placement == "res-post"  # there the norm's own factor belongs to the branch
        if not same(branch, given) and not (on_branch and same(branch, given * item.norm_scale)):
            raise InputError(
                f"{where}: the branch is not what its carrier gives out; the mapping's `carrier` has to be the last "
                "map of the branch (behind it only dropout), `branch` the module behind it"
            )
        _check_reading(tape, row, readers[i], stream)
        norm = norms[i]
        if row.placement == "post":
            assert norm is not None
            total, free = _only(tape.inputs, norm, f"{where}: its norm", tape), True
        elif sites.stream_out[i] >= 0:
            total, free = at(sites.stream_out[i]) * item.units[2], False
        else:
            continue  # the attention row of a parallel layer: the sum is tested at the next row
        terms = [(number(item.skip) * item.units[0], stream), (item.multiplier, branch * item.units[1])]
        if rows.parallel[i]:
            before = attached.rows[i - 1].item
            terms[0] = (number(before.skip) * before.units[0], stream)
            terms.append((before.multiplier, at(sites.branch[i - 1]) * before.units[1]))
        _check_sum(total, terms, where, free=free)
    return True


def carriers_of(attached: Attached) -> list[nn.Module]:
    """The carrier of every sublayer: the module that a multiplier goes on.

    Raises:
        InputError: the mapping names none, or one for two sublayers.
    """
    first: dict[int, AttachedRow] = {}
    for row in attached.rows:
        found = row.carrier()
        if not isinstance(found, nn.Module):
            why = "the mapping names no carrier; give `carrier`, the last module of the branch"
            raise InputError(f"{row.label}: {why}")
        twin = first.setdefault(id(found), row)
        if twin is not row:
            raise InputError(f"{row.label}: its carrier is also that of {twin.label}; expected one module each")
    return [row.carrier() for row in attached.rows]


def _check_reading(tape: Tape, row: AttachedRow, readers: Sequence[nn.Module], stream: Tensor) -> None:
    """The norm reads the stream, and the maps read the norm's output."""
    where, norm = row.label, row.norm
    source, name = [stream], "the stream that enters it"
    if row.placement in ("pre", "sandwich") and norm is not None:
        if not same(_only(tape.inputs, norm, f"{where}: its norm", tape), stream):
            raise InputError(f"{where}: its norm does not read {name}; mend `norm` or `reads` of the mapping")
        normed = _only(tape.outputs, norm, f"{where}: its norm", tape)
        source, name = [normed, normed * row.item.norm_scale], "its norm's output"
    for reader in readers:
        seen = _only(tape.inputs, reader, f"{where}: a map of the mapping's `weights`", tape)
        if not any(same(seen, each) for each in source):
            raise InputError(
                f"{where}: a map that begins the branch does not read {name}; mend `weights`, `norm` or the placement"
            )


def _check_sum(total: Tensor, terms: list[tuple[Any, Tensor]], where: str, *, free: bool) -> None:
    """total = sum of factor * tensor, to rounding; `free`: up to a factor, where a norm reads the total."""
    wide = [_wide(factor) * like(tensor, total).double() for factor, tensor in terms]
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
            f"{where}: the stream behind it is not skip * stream_in + multiplier * branch (off by "
            f"{error / (rms(actual) or 1):.2g} of its size): {hint}; fix the mapping"
        )


def _only(seen: dict[int, list[Tensor]], module: nn.Module, what: str, tape: Tape) -> Tensor:
    """The tensor of a module that runs (at least) once."""
    tensors = seen.get(id(module), [])
    if not tensors:
        raise tape.failure(f"{what} ({type(module).__name__}) never ran")
    return tensors[0]


def _where(rows: Layout, sites: Any, index: int) -> str:
    for name in ("stream_in", "branch", "stream_out"):
        points = getattr(sites, name)
        if index in points:
            return f"{describe(rows, points.index(index))}: its {name}"
    return "a probe point"


def _wide(factor: Any) -> Any:
    return factor.detach().double() if isinstance(factor, Tensor) else float(factor)


# --- locate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Located:
    """A residual branch that was found by its numbers.

    Attributes:
        carrier: path of the module whose output is added: a linear map where there is one, else a norm, else a block.
        norm: path of the norm before the branch (pre, sandwich), on the branch (res-post) or on the sum (post).
        placement: pre, post, sandwich, res-post or none.
        parallel: added in one sum with the branch before it.
        multiplier: what the model multiplies the carrier's output with before it adds it.
        aliases: paths of all modules that gave out the same tensor.
    """

    carrier: str
    norm: str | None
    placement: str
    parallel: bool
    multiplier: float
    aliases: tuple[str, ...]


@typed
def locate(model: nn.Module, arguments: Dictionary[str, Any]) -> list[Located]:
    """The residual branches of a model of any family, in the order in which the stream meets them.

    All modules are hooked in one forward pass (evaluation mode; every tensor is cloned: for small inputs). A tensor is
    taken for a stream where it equals an earlier tensor that some module read, plus one or two later module outputs
    (or a multiple of one), to the rounding of its dtype. So branches below the stream's rounding are not found, nor are
    those that give out zeros: use float32 and weights that are not zero. Of two norms that give out the same tensor
    (fresh ones that read one stream) either may be named.

    Args:
        arguments: keyword arguments of the model's forward.

    Raises:
        InputError: the model does not run, or its parameters are on the meta device.
    """
    found, tape = _located_in(model, arguments)
    if tape.error is not None:
        raise tape.failure("the model")
    return found


def _located_in(model: nn.Module, arguments: Dictionary[str, Any]) -> tuple[list[Located], Tape]:
    outer, model = model, unwrapped(model)
    if on_meta(model):
        raise InputError("the model's parameters are on the meta device and hold no numbers; load or initialise it")
    tape = Tape(keep_events=True)
    tape.watch([module for module in model.modules() if module is not model])
    tape.run(outer, placed(model, arguments))
    values = values_of(tape, {id(module): name for name, module in model.named_modules()})
    sums = explained(values)
    normed = {path: v for v in values for _, path, module in v.made if _is_norm(module)}
    bases = {id(found.base) for found in sums}
    return [_located(found, k, normed, bases) for found in sums for k in range(len(found.parts))], tape


def check_carriers(attached: Attached, arguments: Dictionary[str, Any] | None = None) -> None:
    """Compare the carriers of a mapping with those that `locate` finds; for models small enough to hook every module.

    Raises:
        InputError: one that the mapping misses, names twice, or that adds nothing to the stream.
    """
    carriers = carriers_of(attached)
    found, tape = _located_in(attached.model, arguments_for(attached, arguments))
    names = {id(module): name for name, module in attached.model.named_modules()}
    known = [names.get(id(module), type(module).__name__) for module in carriers]
    for i, name in enumerate(known):
        times = sum(name in each.aliases for each in found)
        if times != 1:
            raise tape.failure(
                f"{attached.rows[i].label}: its carrier {name} adds to the stream {times} times, by the numbers; "
                f"expected once (found: {summary(found)})"
            )
    extra = next((each for each in found if not set(known) & set(each.aliases)), None)
    if extra is not None:
        raise InputError(f"{extra.carrier} adds to the stream, and the mapping names it nowhere: a sublayer is missing")


def summary(located: Sequence[Located]) -> str:
    """What was found, in one line, layers written as `*`."""
    counts: dict[str, int] = {}
    for each in located:
        norm = "" if each.norm is None else f", norm {each.norm}"
        factor = "" if each.multiplier == 1 else f" times {each.multiplier:.4g}"
        text = f"{each.placement}{' parallel' if each.parallel else ''} (carrier {each.carrier}{factor}{norm})"
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", text)
        counts[key] = counts.get(key, 0) + 1
    return "; ".join(f"{n} x {key}" for key, n in counts.items()) or "no residual branch"


def _located(found: Sum, k: int, normed: dict[str, Value], bases: set[int]) -> Located:
    """One part of a sum in words. `normed`: outputs of all norms by path; `bases`: ids of the bases of all sums."""
    part = found.parts[k]
    _, carrier, _ = min(part.made, key=lambda event: _preference(event[2]))
    # of the norms that read the base before this part was made: the one whose output was read last
    before = [
        (max((time for time, _, _ in normed[path].read if time < part.time), default=-1), own, path)
        for own, path, _ in found.base.read
        if own < part.time and path in normed
    ]
    before = [entry for entry in before if entry[0] >= 0]
    behind = [path for _, path, _ in found.total.read if path in normed]
    from_norm = any(path in normed for _, path, _ in found.base.made)
    norm: str | None = None
    if before:
        placement, norm = ("sandwich" if carrier in normed else "pre"), max(before)[2]
    elif carrier in normed:
        placement, norm = "res-post", carrier
    elif behind and (id(normed[behind[0]]) in bases or (from_norm and id(found.total) not in bases)):
        placement, norm = "post", behind[0]
    else:
        placement = "none"
    aliases = tuple(path for _, path, _ in part.made)
    return Located(carrier, norm, placement, k > 0, found.factor, aliases)


def _preference(module: nn.Module) -> int:
    """Linear map, norm, another module with parameters of its own, block, and last what only passes its input on."""
    weight = getattr(module, "weight", None)
    if isinstance(module, (nn.Dropout, nn.Identity)):
        return 4
    if has_children(module):
        return 3
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return 0
    return 1 if _is_norm(module) else 2


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not has_children(module)
