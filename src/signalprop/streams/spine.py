"""The residual stream through one stretch of a pass: from its end back to its start, one addition at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from signalprop.streams.tape import Call, Node, multiple

Factor = float | Tensor
_FAR = math.inf


@dataclass
class Part:
    """What is added to the stream: factor * node.

    Attributes:
        calls: the module calls whose first output it is, innermost first; empty where no module gives it.
        gated: it is multiplied by a tensor that the model computes. moved: its entries are put in another order.
        normed: a norm that is not a module stands between the modules and the addition.
        again: it is the stream itself, as it was before or earlier.
    """

    node: Node
    factors: list[Factor]
    calls: list[Call]
    gated: bool = False
    moved: bool = False
    normed: bool = False
    again: bool = False


@dataclass
class Step:
    """One change of the stream: parts are added to it (several at once: in parallel), or it is normed.

    Attributes:
        before, after: the stream. skip: the factors on the stream before. parts: empty of a norm.
        moved: the stream's entries are put in another order, or only a part of them goes on.
    """

    before: Node
    after: Node
    skip: list[Factor]
    parts: list[Part] = field(default_factory=list)
    moved: bool = False


class Origins:
    """For every tensor the earliest one that it comes from through sums, scales, views and norms alone.

    Args:
        entry: where to stop; what reaches it comes before all others. None: as far back as it goes.
    """

    def __init__(self, entry: Node | None) -> None:
        self._entry = None if entry is None else entry.numbers
        self._known: dict[int, tuple[float, int]] = {}

    def of(self, node: Node) -> tuple[float, int]:
        """(time of the earliest origin, how many norms and products lie between)."""
        stack = [node]
        while stack:
            top = stack[-1]
            if id(top) in self._known:
                stack.pop()
                continue
            if self._entry is not None and top is self._entry:
                self._known[id(top)] = (-1.0, 0)
                continue
            if self._entry is not None and top.time < self._entry.time:
                self._known[id(top)] = (float(top.time), 0) if top.time else (_FAR, 0)
                continue
            inner = _through(top)
            missing = [one for one in inner if id(one) not in self._known]
            if missing:
                stack += missing
                continue
            if not inner:
                self._known[id(top)] = (float(top.time), 0)
                continue
            time, norms = min(self._known[id(one)] for one in inner)
            self._known[id(top)] = (time, norms + (top.operation in ("norm", "product")))
        return self._known[id(node)]

    def nearest(self, nodes: Sequence[Node]) -> Node:
        """The one that comes from furthest back; of several the one with fewest norms between, then the latest."""
        return min(nodes, key=lambda node: (*self.of(node), -multiple(node)[0].time))

    def is_stream(self, node: Node, end: Node) -> bool:
        """Whether a tensor comes from where the end does, without a norm between."""
        return self.of(node) == (self.of(end)[0], 0)


def _through(node: Node) -> tuple[Node, ...]:
    """The inputs that the stream can have come through."""
    if node.operation in ("add", "scale", "product", "same", "norm"):
        return node.inputs
    if node.operation == "moved":
        return tuple(one for one in node.inputs if math.prod(one.shape) == math.prod(node.shape))
    return ()


def steps(end: Node, entry: Node | None, given: dict[int, list[Call]]) -> tuple[list[Step], Node] | None:
    """The steps of the stream from its entry (None: from its start) to its end, in order, and where they begin.

    Args:
        given: module calls by the id of the tensor (as numbers) that they give; by its complement those that hand on
            what no module made (an nn.Identity).

    Returns:
        None where the end does not come from the entry.
    """
    origins = Origins(entry)
    if entry is not None and origins.of(end)[0] != -1:
        return None
    stop = None if entry is None else entry.numbers
    found: list[Step] = []
    node = after = end.numbers
    skip: list[Factor] = []
    moved = False
    while node is not stop and (inner := _through(node)):
        stream = origins.nearest(inner)
        if node.operation in ("scale", "moved", "same") or (node.operation == "add" and len(inner) == 1):
            skip += node.factors if node.operation == "scale" else ()
            moved |= node.operation == "moved"
            node = stream.numbers
            continue
        step = Step(stream.numbers, after, skip, moved=moved)
        if node.operation == "add":
            at = node.inputs.index(stream)
            for k, other in enumerate(node.inputs):
                if k != at:
                    step.parts += parts_of(
                        other, [*skip, node.factors[k]], given, lambda one: origins.is_stream(one, end)
                    )
            step.skip = [*skip, node.factors[at]]
            _collect(step)
            # the stream before its multiplier, where only the sum reads what the multiplier gives
            while step.before is not stop and step.before.operation == "scale" and len(read_as(step.before)) == 1:
                step.skip += step.before.factors
                step.before = step.before.inputs[0].numbers
        node = after = step.before
        skip, moved = [], False
        later = found[-1] if found else None
        if later is not None and step.parts and later.parts and later.before is step.after and _unread(step, later):
            later.parts = [*(_times(part, later.skip) for part in step.parts), *later.parts]
            later.before, later.skip, later.moved = step.before, [*step.skip, *later.skip], step.moved or later.moved
            _collect(later)
        else:
            found.append(step)
    if skip or moved:
        found.append(Step(node, after, skip, moved=moved))
    return found[::-1], node


def _collect(step: Step) -> None:
    """The stream before is one term, however often it was added: x + (x + f) is 2 * x + f."""
    for part in [part for part in step.parts if part.again and part.node is step.before]:
        step.skip = [math.prod(step.skip) + math.prod(part.factors)]
        step.parts = [other for other in step.parts if other is not part]


def read_as(node: Node) -> list[Node]:
    """The tensors that follow from one, through views and copies of it."""
    found: list[Node] = []
    for reader in node.readers:
        found += read_as(reader) if reader.operation == "same" else [reader]
    return found


def _unread(step: Step, later: Step) -> bool:
    """Whether nothing but the next sum reads what a step makes: the two are added at once."""
    node = step.after
    while node is not later.after:
        readers = [one for one in read_as(node) if one.operation != "other" or one.readers]
        if len(readers) != 1 or readers[0].operation not in ("scale", "add", "moved"):
            return False
        node = readers[0]
    return True


def _only_scales(node: Node, calls: Sequence[Call]) -> bool:
    """Whether a module gives a tensor that only multiplies by a parameter, all it has: LayerScale."""
    if node.operation != "scale" or not isinstance(node.factors[0], Tensor):
        return False
    weights = [p for call in calls for p in call.module.parameters(recurse=False)]
    return [p.data_ptr() for p in weights] == [node.factors[0].data_ptr()] and not node.factors[0].is_meta


def _times(part: Part, factors: Sequence[Factor]) -> Part:
    part.factors = [*part.factors, *factors]
    return part


def parts_of(
    node: Node, factors: list[Factor], given: dict[int, list[Call]], stream: Callable[[Node], bool]
) -> list[Part]:
    """What is added, down to the outputs of modules, and to the `stream` itself."""
    part = Part(node, list(factors), [])
    handed_on: Part | None = None  # for want of a module that gives it
    while True:
        here = part.node.numbers
        part.node = here
        changed = part.moved or part.gated or part.normed or (here.operation == "scale" and stream(here.inputs[0]))
        if not changed and stream(here):
            part.again = True
            return [part]
        calls = given.get(id(here), [])
        if calls and _only_scales(here, calls) and given.get(id(here.inputs[0].numbers)):
            part.factors.append(here.factors[0])
            part.node = here.inputs[0]
            continue
        if calls:
            part.calls = calls
            return [part]
        if handed_on is None and ~id(here) in given:
            handed_on = replace(part, factors=list(part.factors), calls=given[~id(here)])
        if here.operation == "add" and len(here.inputs) > 1:
            pairs = zip(here.inputs, here.factors, strict=True)
            terms = [inner for one, factor in pairs for inner in parts_of(one, [*part.factors, factor], given, stream)]
            return terms if handed_on is None or any(one.calls or one.again for one in terms) else [handed_on]
        if here.operation == "scale" or (here.operation == "add" and here.inputs):  # with a bias: proved where it is 0
            part.factors.append(here.factors[0])
            part.node = here.inputs[0]
        elif here.operation == "moved" and here.inputs:
            part.moved = True
            part.node = next(
                (one for one in here.inputs if math.prod(one.shape) == math.prod(here.shape)), here.inputs[0]
            )
        elif here.operation == "product":
            part.gated = True
            by_modules = [one for one in here.inputs if given.get(id(one.numbers)) and one.shape == here.shape]
            big = [one for one in here.inputs if one.shape == here.shape]
            part.node = (by_modules or big or list(here.inputs))[0]
        elif here.operation == "norm":
            part.normed = True
            part.node = here.inputs[0]
        else:
            return [handed_on or part]
