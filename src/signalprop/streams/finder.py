"""The parts of a model that one small forward pass shows: stacks, layers, branches, norms, multipliers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from signalprop.streams.containers import Container, called_again, containers, side_by_side
from signalprop.streams.parts import Branch, Layer, Multiplier, Place, Placement, Sort, Stack, within
from signalprop.streams.post_norms import post_norms
from signalprop.streams.spine import Factor, Origins, Part, Step, read_as, steps
from signalprop.streams.tape import Call, Node, Tape, summands

_SMALLEST = 0.02  # share of the largest stack's parameters from which on a stack is worth a word


class Finder:
    """Reads a tape: which containers are stacks, and what their layers do."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        self.model, self.tape = model, tape
        self.calls = sorted(tape.calls, key=lambda call: call.start)
        self.parameters = {p.data_ptr(): (name, p) for name, p in model.named_parameters() if not p.is_meta}
        self.sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
        self._seen: dict[int, list[tuple[Call, Literal["input", "output"], Node]]] = {}
        for call in self.calls:
            if call.path:
                for side, node in (("input", call.first_read), ("output", call.first_given)):
                    if node is not None:
                        self._seen.setdefault(id(node.numbers), []).append((call, side, node))  # type: ignore[arg-type]

    def stacks(self) -> list[Stack]:
        """Those that were found, the largest first; if there is none, lists side by side and blocks in a loop."""
        others = [*side_by_side(self.model), *called_again(self.model, self.tape.counts)]
        return self._among(containers(self.model)) or self._among(sorted(others, key=lambda one: -one.parameters))

    def _among(self, candidates: Sequence[Container]) -> list[Stack]:
        found: list[Stack] = []
        taken: list[str] = []
        largest = 0
        for one in candidates:
            if one.parameters < _SMALLEST * largest:
                break
            paths = [path for path, _ in one.members]
            inside = any(within(path, other) or within(other, path) for path in paths for other in taken)
            if inside or (stack := self._stack(one)) is None:
                continue
            found.append(stack)
            taken += paths
            largest = max(largest, one.parameters)
        return found

    def not_run(self, found: Sequence[Stack]) -> list[str]:
        """Lists of modules as large as a stack of which the pass ran none: what was given does not reach them."""
        largest = max((stack.parameters for stack in found), default=0)
        ran = {id(call.module) for call in self.calls}
        inner = [layer.path for stack in found for layer in stack.layers]
        out: list[str] = []
        for one in containers(self.model):
            if one.path.endswith("*") or not isinstance(self.model.get_submodule(one.path), nn.ModuleList):
                continue
            silent = not any(id(part) in ran for _, member in one.members for part in member.modules())
            outside = not any(within(one.path, path) for path in [*inner, *out])
            if silent and outside and len(one.members) > 1 and one.parameters >= _SMALLEST * largest:
                out.append(one.path)
        return out

    def _stack(self, one: Container) -> Stack | None:
        """The container as a stack; None where most of its members do not carry a stream."""
        runs = sorted(
            ((call, path) for path, module in one.members for call in self.calls if call.module is module),
            key=lambda run: run[0].start,
        )
        if not runs or one.layers:
            return self._loose(one)
        layers, width, last = [], 0, None
        pairs = _carry_two([call for call, _ in runs])
        for call, path in runs:
            layer, entry, node = self._layer(call, path, mixes=not pairs)
            if last is not None and entry is not None and last[1].time <= entry.time:
                layer = replace(layer, linked=Origins(last[1]).of(entry)[0] == -1)
            layers.append(layer)
            if node is not None:
                last, width = (call, node), node.shape[-1] if node.shape else 0
        unknown = (layer.why or any(b.output is None for b in layer.branches) for layer in layers)
        if pairs and any(unknown):  # something is added in a layer that no module in it gives
            return self._loose(one, runs=False)
        understood = [layer for layer in layers if layer.branches]
        if 2 * len(understood) <= len(layers) or last is None:
            return None
        layers = [replace(layer, reads=reads) for layer, reads in zip(layers, self._reads(layers), strict=True)]
        known, final = post_norms(layers, self._final_norm(*last))
        by_function = None if final or known[-1].branches[-1:] == () else self._final_reader(*last)
        return Stack(one.path, known, width, one.parameters, final, by_function)

    def _reads(self, layers: Sequence[Layer]) -> Iterator[tuple[int, ...]]:
        """For every layer, the streams whose sum it reads, numbered as in `Layer.reads`."""
        sources: dict[int, int] = {}
        for number, layer in enumerate(layers):
            points = (layer.branches[0].stream_in, layer.branches[-1].stream_out) if layer.branches else (None, None)
            enters, leaves = map(self._node, points)
            yield tuple(sorted(sources[id(node)] for node in summands(enters, sources) if id(node) in sources))
            if number == 0 and enters is not None:
                sources[id(enters.numbers)] = 0
            if leaves is not None:
                sources[id(leaves.numbers)] = number + 1

    def _node(self, place: Place | None) -> Node | None:
        """The tensor that a hook sees."""
        if place is None:
            return None
        call = next((c for c in self.calls if (c.path, c.index) == (place.path, place.call)), None)
        return None if call is None else call.first_read if place.side == "input" else call.first_given

    def _layer(self, call: Call, path: str, *, mixes: bool) -> tuple[Layer, Node | None, Node | None]:
        """A layer that is a module, from one run of it; and the stream before and after it.

        Args:
            mixes: whether it may begin with a sum with a stream of an earlier place (modded-nanogpt's x0).
        """
        outputs = [call.first_given, *call.gave] if call.first_given is not None else list(call.gave)
        entries = [call.first_read, *call.read] if call.first_read is not None else list(call.read)
        inside = [c for c in self.calls if call.start < c.start and c.end < call.end]
        given = _given(inside)
        for entry in entries:
            for end in outputs:
                if entry.shape != end.shape or end.numbers is entry.numbers:
                    continue
                found = steps(end, entry, given)
                run = [] if found is None else found[0]
                while mixes and len(run) > 1 and _mixes(run[0], call):
                    run = run[1:]
                if any(step.parts for step in run):
                    norm = None if run[0].parts else self._norm_between(run[0], inside)
                    return Layer(path, self._branches(run, inside, call), entry_norm=norm), entry, end
        if not entries or not outputs:
            return Layer(path, (), "it reads or gives no tensor that comes from the model's input"), None, None
        if all(end.numbers is entries[0].numbers for end in outputs[:1]):
            return Layer(path, (), "it returns its input"), None, None
        return Layer(path, (), "no chain of additions leads from its input to its output"), None, None

    def _loose(self, one: Container, *, runs: bool = True) -> Stack | None:
        """A stack whose layers are not modules that run: their parts are called one by one.

        Args:
            runs: whether a layer may be a part itself.
        """
        layered = one.layers or tuple((path,) for path, _ in one.members)
        prefixes = [path for path, _ in one.members]
        inside = [c for c in self.calls if any(within(c.path, prefix) for prefix in prefixes)]
        inside = [c for c in inside if runs or c.path not in prefixes]
        if not inside or (one.path.endswith("*") and not one.layers):
            return None
        given = _given(inside)
        for call in sorted(inside, key=lambda c: -c.end):
            end = None if call.first_given is None else _added(call.first_given)
            found = None if end is None else steps(end, None, given)
            if end is not None and found is not None and any(step.parts for step in found[0]):
                break
        else:
            return None
        all_branches = self._branches(found[0], inside, None)
        layers = []
        for parts in layered:
            inside_part = tuple(
                b for b in all_branches if b.modules and any(within(b.modules[0], part) for part in parts)
            )
            if inside_part:
                layers.append(Layer(parts[0], inside_part, parts=parts if len(parts) > 1 else ()))
            elif any(within(c.path, part) for c in inside for part in parts):
                return None  # the stream passes by this one: its parts may be stacks themselves
        if 2 * len(layers) <= len(layered):
            return None
        last = max(inside, key=lambda c: c.end)
        final = self._final_norm(last, end)
        by_function = None if final else self._final_reader(last, end)
        return Stack(one.path, tuple(layers), end.shape[-1], one.parameters, final, by_function, called=False)

    def _branches(self, found: Sequence[Step], inside: list[Call], layer: Call | None) -> tuple[Branch, ...]:
        out: list[Branch] = []
        for i, step in enumerate(found):
            if not step.parts:
                continue
            later = found[i + 1] if i + 1 < len(found) and not found[i + 1].parts else None
            after = step.after if later is None else later.after
            norm_of_sum = None if later is None else self._norm_between(later, inside)
            for k, part in enumerate(sorted(step.parts, key=lambda part: part.node.time)):
                branch = self._branch(step, part, inside, layer)
                placed: dict[str, Any] = {"stream_out": self._see(after, layer), "parallel": k > 0}
                if later is not None:
                    placed |= {"placement": "post", "norm": norm_of_sum}
                out.append(replace(branch, **placed))
        return tuple(out)

    def _branch(self, step: Step, part: Part, inside: list[Call], layer: Call | None) -> Branch:
        summed_at = part.node.time
        calls = part.calls
        readers = [c for c in inside if _numbers(c.first_read) is step.before and c.start < summed_at]
        norms = [c for c in readers if self._is_norm(c)]
        main = max(calls, key=lambda c: (self.sizes.get(c.path, 0), c.end)) if calls else None
        norm = next(
            (c for c in norms if main is not None and self._feeds(c, main, inside)), norms[0] if norms else None
        )
        post = next((c for c in calls if self._is_norm(c) and _numbers(c.first_read) is not step.before), None)
        caveat = ""
        if part.gated:
            caveat = "the model multiplies it by a tensor that it computes"
        elif part.again:
            caveat = "it is the stream of an earlier place"
        elif not calls:
            caveat = "no module gives it"
        elif part.normed:
            caveat = "a norm that is not a module precedes the addition"
        elif part.moved or step.moved:
            caveat = "its entries are put in another order before the addition"
        reads = norm or next(iter(sorted(readers, key=lambda c: -c.start)), None)
        bare = any(
            next(c.module.children(), None) is None and _numbers(c.first_given) is not step.before for c in readers
        )
        normed = None if norm is not None or bare else self._reads_normed(step.before, inside, summed_at)
        reads = normed or reads
        placement: Placement = "none"
        if norm is not None or normed is not None:
            placement = "pre" if post is None else "sandwich"
        elif post is not None:
            placement = "res-post"
        output = None
        if calls:
            last = calls[-1]
            output = Place(last.path, "output", last.index, self.tape.counts[id(last.module)])
        return Branch(
            sort=self._sort(main, step, summed_at),
            modules=tuple(dict.fromkeys(c.path for c in calls)),
            module="" if main is None else main.path,
            output=output,
            stream_in=self._see(step.before, layer),
            stream_out=None,
            total=self._see(step.after, layer),
            skip=self._multiplier(step.skip),
            multiplier=self._multiplier(part.factors),
            placement=placement,
            norm=None if norm is None else norm.path,
            post_norm=None if post is None else post.path,
            reads=None if reads is None else reads.path,
            normed=normed is not None,
            caveat=caveat,
        )

    def _sort(self, main: Call | None, step: Step, summed_at: int) -> Sort:
        if main is None:
            return "branch"
        begins = main.start
        if next(main.module.children(), None) is None:  # the last map alone: look at all since the stream was read
            earlier = (p.node.time for p in step.parts if p.node.time < min(main.start, summed_at))
            begins = max([step.before.time, *earlier])
        if any(begins <= time <= main.end for time in self.tape.mixed):
            return "attention"
        mixes = any(begins <= time <= main.end for time in self.tape.shifted)
        return "branch" if mixes else "feed_forward"

    def _is_norm(self, call: Call) -> bool:
        """Whether a run gives what it reads, normed: through norms, centring and scales alone."""
        return _normed(call.first_read, call.first_given)

    def _reads_normed(self, stream: Node, calls: Sequence[Call], before: float = math.inf) -> Call | None:
        """The first run that reads the stream through a norm that is a function."""
        later = (c for c in calls if stream.time < c.start < before)
        return next((c for c in later if _normed(stream, c.first_read)), None)

    def _norm_between(self, step: Step, inside: list[Call]) -> str | None:
        found = (
            c.path for c in inside if _numbers(c.first_read) is step.before and _numbers(c.first_given) is step.after
        )
        return next(found, None)

    def _feeds(self, norm: Call, main: Call, inside: list[Call]) -> bool:
        given = _numbers(norm.first_given)
        if within(norm.path, main.path):
            return True
        return any(
            any(_numbers(node) is given for node in c.read)
            for c in inside
            if within(c.path, main.path) and c.start >= main.start
        )

    def _final_norm(self, last: Call, end: Node) -> str | None:
        after = [c for c in self.calls if c.start > last.start and _numbers(c.first_read) is end.numbers]
        after += [c for c in self.calls if c.start > last.start and end.numbers in summands(c.first_read)]
        return next((c.path for c in after if not within(c.path, last.path) and self._is_norm(c)), None)

    def _final_reader(self, last: Call, end: Node) -> str | None:
        """The path of what reads the stream's end through a norm that is a function."""
        after = [c for c in self.calls if c.start > last.start and not within(c.path, last.path)]
        found = self._reads_normed(end.numbers, after)
        return None if found is None else found.path

    def _see(self, node: Node, layer: Call | None) -> Place | None:
        """Where hooks see a tensor: in the layer if they can, the very tensor rather than a view of it."""

        def rank(item: tuple[Call, str, Node]) -> tuple[bool, bool, bool, int]:
            call, side, read = item
            outside = layer is not None and not (layer.start <= call.start and call.end <= layer.end)
            return read is not node, outside, side == "output", call.start

        found = sorted(self._seen.get(id(node.numbers), []), key=rank)
        if not found:
            return None
        call, side, _ = found[0]
        return Place(call.path, side, call.index, self.tape.counts[id(call.module)])

    def _multiplier(self, factors: Sequence[Factor]) -> Multiplier:
        """The product of factors."""
        number, vectors = 1.0, []
        for factor in factors:
            if isinstance(factor, Tensor) and factor.is_meta:
                return Multiplier(None, vector=factor.numel() > 1)
            if isinstance(factor, Tensor) and factor.numel() > 1:
                vectors.append(factor)
            else:
                number *= float(factor)
        scalars = [f for f in factors if isinstance(f, Tensor) and f.numel() == 1]
        if not vectors:
            name = self._parameter(scalars[0]) if len(scalars) == 1 and float(scalars[0]) == number else ""
            return Multiplier(number, name)
        total = vectors[0].double() * number
        for more in vectors[1:]:
            total = total * more.double()
        name = self._parameter(vectors[0]) if len(vectors) == 1 and number == 1 else ""
        return Multiplier(float(total.square().mean().sqrt()), name, True, total)

    def _parameter(self, tensor: Tensor) -> str:
        name, p = self.parameters.get(tensor.data_ptr(), ("", None))
        return name if p is not None and p.numel() == tensor.numel() else ""


def _carry_two(runs: Sequence[Call]) -> bool:
    """Whether layers hand on two tensors of the stream's shape: what the last branch gave, and what it is added to."""
    for before, after in pairwise(runs):
        read = {id(node.numbers) for node in after.read}
        given = {id(n.numbers) for n in before.gave if before.first_given and n.shape == before.first_given.shape}
        if len(given & read) < 2:
            return False
    return len(runs) > 1


def _mixes(step: Step, layer: Call) -> bool:
    """Whether what is added was there before the layer began."""
    return bool(step.parts) and all(part.again or part.node.time < layer.start for part in step.parts)


def _given(calls: Sequence[Call]) -> dict[int, list[Call]]:
    """Runs by the tensor (as numbers) that they give, innermost first."""
    out: dict[int, list[Call]] = {}
    for call in sorted(calls, key=lambda c: c.end):
        if call.first_given is not None and _numbers(call.first_given) is not _numbers(call.first_read):
            out.setdefault(id(call.first_given.numbers), []).append(call)
    # what only passes its input on (dropout) comes after those that made it
    for call in sorted(calls, key=lambda c: c.end):
        if call.first_given is not None and _numbers(call.first_given) is _numbers(call.first_read):
            givers = out.get(id(call.first_given.numbers))
            if givers is None:
                out.setdefault(~id(call.first_given.numbers), []).append(call)  # what no module gave
            elif call.start > givers[0].end:
                givers.append(call)
                givers.sort(key=lambda c: c.end)
    return out


def _added(node: Node) -> Node | None:
    """The sum that a tensor goes into, through views and scales."""
    for reader in read_as(node.numbers):
        if reader.operation == "add" and len(reader.inputs) > 1:
            return reader
        if reader.operation in ("scale", "moved") and (found := _added(reader)) is not None:
            return found
    return None


def _normed(read: Node | None, given: Node | None) -> bool:
    """Whether one tensor is the other, normed: through norms, centring and scales alone."""
    if read is None or given is None or read.shape != given.shape or read.numbers is given.numbers:
        return False
    time, norms = Origins(read).of(given)
    if time != -1 or norms == 0:
        return False
    found = steps(given, read, {})
    return found is not None and not any(step.parts for step in found[0])


def _numbers(node: Node | None) -> Node | None:
    return None if node is None else node.numbers
