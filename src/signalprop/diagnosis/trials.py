"""Whether a trained model's weights were stored for another model: cheap changes, each tried, with the loss of each.

A checkpoint that was converted by another convention loads without a word and predicts nothing. What such conventions
are is known: gains stored around 0 or 1, queries and keys in either order of rotary pairs, query heads grouped either
way, a head that is the table, layers in the order of their names, matrices the other way round, another base of the
rotation, another factor on scores or embeddings. Every trial makes one such change, asks for the loss of a short text,
and takes the change back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached, AttachedRow, Held
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import Progress
from signalprop.diagnosis.removal import lists_of
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.diagnosis.temporary_changes import (
    Copies,
    changed,
    other_attributes,
    other_values,
    output_times,
    part_of,
)
from signalprop.diagnosis.whole_model_values import Tried
from signalprop.errors import InputError
from signalprop.streams.proof import gain_and_bias

BASES = (1e4, 5e4, 1e5, 5e5, 1e6, 1e7)  # of rotary positions, in released configurations
PROMISING = 0.04  # nats per token
_SQUARE = ("query", "key", "value", "output")


class Trial(NamedTuple):
    """One change.

    Attributes:
        name: a short word for its kind. fault: what is wrong where it repairs the model, in words. repair: what to do.
        change: a context in which the model is changed.
    """

    name: str
    fault: str
    repair: str
    change: Callable[[], Any]


def try_all(
    attached: Attached, short: Batch, text: Sequence[Batch], progress: Progress | None = None
) -> tuple[Tried, ...]:
    """The loss under every change that fits the model, the lowest first.

    Every change is tried on one short sequence. The best three that lower its loss by more than `PROMISING` are tried
    on more text, for the standard error of the difference.

    Args:
        attached: a model; it is left as it was.
        short: one sequence. text: the sequences of the second look; two at least, for an error.
        progress: called with (trials done, all).
    """

    def of(batches: Sequence[Batch]) -> LossResult:
        return loss(attached.model, batches, mapping=attached.mapping)

    every, whole = list(trials(attached)), of([short]).mean
    found: list[tuple[float, Trial]] = []
    for done, trial in enumerate(every):
        with trial.change():
            found.append((of([short]).mean, trial))
        if progress is not None:
            progress(done + 1, len(every))
    found = sorted((one for one in found if math.isfinite(one[0])), key=lambda one: one[0])
    closer = [trial for value, trial in found[:3] if whole - value > PROMISING]
    before = of(text) if closer else None
    out = []
    for value, trial in found:
        words: dict[str, Any] = {"name": trial.name, "fault": trial.fault, "repair": trial.repair}
        if before is None or not any(trial is one for one in closer):
            out.append(Tried(**words, loss=value, before=whole))
            continue
        with trial.change():
            after = of(text)
        error = after.above(before).standard_error
        out.append(Tried(**words, loss=after.mean, before=before.mean, standard_error=error))
    return tuple(sorted(out, key=lambda one: one.loss - one.before))


def trials(attached: Attached) -> Iterator[Trial]:
    """All that fit a model."""
    yield from _gains(attached)
    yield from _rotary_pairs(attached)
    yield from _grouping(attached)
    yield from _rotary_bases(attached.model)
    yield from _scores(attached)
    yield from _ends(attached)
    yield from _order(attached)
    yield from _matrices(attached)


def _plain(held: Held | None) -> bool:
    """Whether a weight is one matrix in memory."""
    return (
        held is not None
        and not held.problem
        and not held.copies
        and isinstance(held.weight, Tensor)
        and (held.weight.ndim == 2 and held.weight.is_floating_point() and not held.weight.is_meta)
    )


def _with(attached: Attached, *roles: str) -> list[AttachedRow]:
    """Self-attention rows that have all of these weights as plain matrices."""
    return [
        row for row in attached.rows
        if row.kind.attends_itself and all(_plain(row.weights.get(role)) for role in roles)
    ]  # fmt: skip


# --- the trials ------------------------------------------------------------------------------------------------------


def _gains(attached: Attached) -> Iterator[Trial]:
    norms = {id(m): m for row in attached.rows for m in (row.norm, row.post_norm, row.query_norm, row.key_norm) if m}
    norms |= {id(m): m for m in attached.ends.final_norms}
    gains = [w for m in norms.values() if isinstance(w := gain_and_bias(m)[0], Tensor) and not w.is_meta]
    if not gains:
        return
    for shift, word in ((-1.0, "above"), (1.0, "below")):
        yield Trial(
            "gains", f"norm gains are 1 {word} what this model reads", f"gains {'-' if shift < 0 else '+'} 1",
            lambda shift=shift: other_values([(w, w.data + shift) for w in gains]),  # type: ignore[misc]
        )  # fmt: skip


def _rotary_pairs(attached: Attached) -> Iterator[Trial]:
    """Rotary pairs are (i, i + d/2) in transformers, (2i, 2i + 1) in Meta's and GPT-J's code."""
    a = attached.mapping.architecture
    rows = _with(attached, "query", "key")
    turned = int(a.d_head * a.rotary_fraction)
    if a.positions != "rotary" or turned < 4 or not rows:
        return

    def reordered(copies: Copies, *, to_halves: bool) -> None:
        for row in rows:
            for role in ("query", "key"):
                held = row.weights[role]

                def pairs(x: Tensor) -> Tensor:
                    heads = x.reshape(-1, a.d_head, *x.shape[1:])
                    shape = (turned // 2, 2) if to_halves else (2, turned // 2)
                    first = heads[:, :turned]
                    heads[:, :turned] = first.reshape(-1, *shape, *x.shape[1:]).transpose(1, 2).reshape(first.shape)
                    return heads.reshape(x.shape)

                copies.weights(held, pairs)

    for to_halves, stored in ((True, "interleaved pairs"), (False, "two halves")):
        yield Trial(
            "rotary pairs",
            f"queries and keys are stored for rotary positions by {stored}, which this model does not read",
            f"query and key rows reordered to {'two halves' if to_halves else 'interleaved pairs'}",
            changed(lambda copies, to_halves=to_halves: reordered(copies, to_halves=to_halves)),  # type: ignore[misc]
        )


def _grouping(attached: Attached) -> Iterator[Trial]:
    """Query head h reads key head h // group in transformers; others number them the other way round."""
    a = attached.mapping.architecture
    kv = a.n_kv_heads
    rows = _with(attached, "query", "output")
    if kv in (1, a.n_heads) or a.n_heads % kv or not rows:
        return
    order = torch.arange(a.n_heads).view(kv, a.n_heads // kv).t().reshape(-1)
    every = {"h % key heads": order, "h // group": order.argsort()}
    if torch.equal(order, order.argsort()):
        del every["h // group"]
    for word, chosen in every.items():

        def regrouped(copies: Copies, chosen: Tensor = chosen) -> None:
            for row in rows:

                def heads(x: Tensor) -> Tensor:
                    return x.reshape(a.n_heads, -1, *x.shape[1:])[chosen.to(x.device)].reshape(x.shape)

                copies.weights(row.weights["query"], heads)
                copies.inputs(row.weights["output"], heads)

        yield Trial(
            "grouping", "query heads are stored in another order than the key heads that they read",
            f"query heads (and the output map's inputs) reordered, as if head h read key head {word}",
            changed(regrouped),
        )  # fmt: skip


def _rotary_bases(model: nn.Module) -> Iterator[Trial]:
    """Frequencies of the usual kind: a geometric sequence that begins with 1."""
    held = [(n, b) for n, b in model.named_buffers() if n.rpartition(".")[2] == "inv_freq" and b.numel() > 1]
    if not held or any(b.is_meta or b.ndim != 1 for _, b in held):
        return
    own = _base(held[0][1])
    for base in BASES:
        if own is not None and abs(math.log(base / own)) < 0.05:
            continue
        said = "is not finite or not a base" if own is None else f"is {own:.6g}"
        yield Trial(
            "rotary base", f"the rotary base {said}; these weights were trained with about {base:g}",
            f"rope_theta = {base:g}",
            lambda base=base: other_values([(b, _frequencies(b, base)) for _, b in held]),  # type: ignore[misc]
        )  # fmt: skip


def _base(frequencies: Tensor) -> float | None:
    """The base of rotary frequencies base^(-2i/d); None where they are not such a sequence."""
    f = frequencies.double()
    if not bool(torch.isfinite(f).all()) or bool((f <= 0).any()):
        return None
    base = float(f[1]) ** -len(f)
    wanted = _frequencies(f, base)
    return base if base > 1 and torch.allclose(f, wanted, rtol=1e-3) else None


def _frequencies(like: Tensor, base: float) -> Tensor:
    n = like.numel()
    return (base ** -(torch.arange(n, dtype=torch.float64, device=like.device) / n)).to(like.dtype)


def _scores(attached: Attached) -> Iterator[Trial]:
    a = attached.mapping.architecture
    places = [row.scaling for row in attached.rows if row.scaling is not None and row.kind.attends_itself]
    numbers = [(owner, name, getattr(owner, name)) for owner, name in places]
    if not numbers or not all(isinstance(value, (int, float)) and value > 0 for *_, value in numbers):
        return
    own, usual = float(numbers[0][2]), a.d_head**-0.5
    for factor in dict.fromkeys((usual, 1.0, 1 / a.d_head, a.d_model**-0.5)):
        if abs(math.log(factor / own)) > 0.01:
            yield Trial(
                "score scale", f"scores are multiplied by {own:.4g}; these weights were trained with {factor:.4g}",
                f"a factor of {factor:.4g} on scores",
                lambda factor=factor: other_attributes([(o, n, factor) for o, n, _ in numbers]),  # type: ignore[misc]
            )  # fmt: skip


def _ends(attached: Attached) -> Iterator[Trial]:
    ends, d = attached.ends, attached.mapping.architecture.d_model
    token, head = ends.token, ends.head
    if token is None or token.problem:
        return
    if isinstance(token.holder, nn.Module):
        for factor, word in ((math.sqrt(d), "times"), (1 / math.sqrt(d), "over")):
            yield Trial(
                "embedding scale", f"embeddings are to be read {word} sqrt(d_model)",
                f"embeddings {word} {math.sqrt(d):.4g}",
                lambda factor=factor: output_times(token.holder, factor),  # type: ignore[misc]
            )  # fmt: skip
    own_head = _plain(head) and _plain(token) and head is not None and head.weight is not token.weight
    if own_head and head is not None and head.weight.shape == token.weight.shape:
        yield Trial(
            "head", "the head is not the token table, as it is in the model that was trained",
            "the head tied to the token table (tie_word_embeddings)",
            lambda: other_values([(head.weight, token.weight.data)]),
        )  # fmt: skip


def _order(attached: Attached) -> Iterator[Trial]:
    """Layers numbered in the order of their names as text (0, 1, 10, 11, ..., 2), or from the top down."""
    model, mapping = attached.model, attached.mapping
    try:
        stacks = [(owner, name, getattr(owner, name)) for owner, name, _ in lists_of(model, mapping)]
    except InputError:
        return

    def ordered(order: Callable[[int], list[int]]) -> Callable[[], Any]:
        """Layer i goes where it came from: to place order[i]."""
        changes = []
        for owner, name, held in stacks:
            at = order(len(held))
            changes.append((owner, name, nn.ModuleList(held[at.index(i)] for i in range(len(held)))))
        return lambda: other_attributes(changes)

    longest = max(len(held) for *_, held in stacks)
    if longest > 10:
        yield Trial(
            "layer order", "layers are stored in the order of their names as text (0, 1, 10, 11, ..., 2)",
            "layers reordered by number", ordered(lambda n: sorted(range(n), key=str)),
        )  # fmt: skip
    if longest > 1:
        yield Trial(
            "layer order", "layers are stored from the last to the first", "layers in the opposite order",
            ordered(lambda n: list(range(n))[::-1]),
        )  # fmt: skip


def _matrices(attached: Attached) -> Iterator[Trial]:
    """Square maps fit either way round; gate and up projections of one shape can change places."""
    rows = attached.rows

    def square(row: AttachedRow, role: str) -> bool:
        held = row.weights.get(role)
        if held is None or not _plain(held):
            return False
        outputs = (
            len(range(held.weight.shape[int(held.transposed)])[held.rows])
            if isinstance(held.rows, slice)
            else (held.weight.shape[int(held.transposed)] if held.rows is None else len(held.rows))
        )
        return bool(outputs == held.weight.shape[1 - int(held.transposed)])

    found = {role: [row.weights[role] for row in rows if square(row, role)] for role in _SQUARE}
    groups = [tuple(role for role in _SQUARE if found[role])]
    groups += [(role,) for role in groups[0]] if len(groups[0]) > 1 else []
    for roles in groups:
        if not roles:
            continue

        def turned(copies: Copies, roles: tuple[str, ...] = roles) -> None:
            for held in (held for role in roles for held in found[role]):
                copies.change(held.weight, held.rows, int(held.transposed), lambda x: x.t())

        yield Trial(
            "transposed", f"square {', '.join(roles)} maps are stored the other way round",
            f"{', '.join(roles)} transposed", changed(turned),
        )  # fmt: skip
    gated = [row for row in rows if _plain(row.weights.get("gate")) and _plain(row.weights.get("up"))]
    if gated:

        def swapped(copies: Copies) -> None:
            for row in gated:
                gate, up = row.weights["gate"], row.weights["up"]
                for held, other in ((gate, part_of(up).clone()), (up, part_of(gate).clone())):
                    copies.change(held.weight, held.rows, int(held.transposed), lambda _, other=other: other)  # type: ignore[misc]

        yield Trial(
            "gate and up", "gate and up projections have changed places", "gate and up projections swapped",
            changed(swapped),
        )  # fmt: skip
