"""The streams of a model: its stacks and norms; and their picture in text, one drawing for all equal layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from signalprop.files.validation import typed
from signalprop.network.shown import wrapped
from signalprop.streams.parts import Branch, Layer, Multiplier, Stack
from signalprop.streams.proof import Norm

SCHEMA = "signalprop/anatomy/1"


@typed
@dataclass(frozen=True)
class Streams:
    """The streams of a model, as its additions show them.

    Attributes:
        model: the name of its class. stacks: the largest first. norms: what those of stream and branches compute.
        inputs: names of the arguments of the passes. invented: signalprop chose them.
        numbers: whether the passes had numbers; without (on the meta device) a random model of the same configuration
            may prove sums and norms.
        not_run: lists of layers that the passes did not run, as those for images where text alone was given.
    """

    model: str
    stacks: tuple[Stack, ...]
    norms: tuple[Norm, ...]
    inputs: tuple[str, ...]
    invented: bool
    numbers: bool
    not_run: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether every layer of every stack was understood and every sum proved."""
        return all(not s.why and all(b.proved for b in s.branches) for s in self.stacks)

    @property
    def error(self) -> float | None:
        """The largest error among the sums that were checked."""
        errors = [b.error for s in self.stacks for b in s.branches if b.error is not None]
        return max(errors) if errors else None

    def __str__(self) -> str:
        lines = [self.model]
        for stack in self.stacks:
            lines += ["", *_stack(self, stack)]
        return wrapped("\n".join([*lines, "", *_proofs(self)]))

    def rows(self) -> list[dict[str, Any]]:
        """One for each branch."""
        return [
            {"stack": stack.path, "layer": layer, "sort": branch.sort, "module": branch.module, "norm": branch.norm,
             "placement": branch.placement, "proved": branch.proved, "error": branch.error}
            for stack in self.stacks for layer, held in enumerate(stack.layers) for branch in held.branches
        ]  # fmt: skip

    def norm(self, path: str | None) -> Norm | None:
        """What is known of the norm of that path."""
        return next((one for one in self.norms if one.path == path), None)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: plain(v) for k, v in value.items() if k != "tensor"}
            return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

        out: dict[str, Any] = plain(asdict(self))
        return {"schema": SCHEMA, "proved": self.proved, "error": self.error, **out}


def _stack(found: Streams, stack: Stack) -> Iterator[str]:
    n = len(stack.layers)
    size = f"width {stack.width}, {stack.parameters:,} parameters"
    more = ", causal" * bool(stack.causal) + f", reads what {stack.memory} gives" * bool(stack.memory)
    yield f"{stack.path or 'the model itself'}: {n} layer{'s' * (n > 1)}, {size}{more}"
    if stack.why:
        yield f"  not understood: {stack.why}"
    start = 0
    drawn: dict[tuple[str, ...], int] = {}
    drawings = [tuple(_layer(found, layer)) for layer in stack.layers]
    while start < n:
        end = start
        while end + 1 < n and drawings[end + 1] == drawings[start]:
            end += 1
        name = f"layer {start}" if start == end else f"layers {start}-{end}"
        first = drawn.setdefault(drawings[start], start)
        if first < start:
            yield f"  {name} as layer {first}"
        else:
            yield f"  {name}"
            yield from (f"  {line}" for line in drawings[start])
        start = end + 1
    if stack.final_norm is not None:
        yield f"  then {stack.final_norm}{_norm(found, stack.final_norm)}"


def _layer(found: Streams, layer: Layer) -> Iterator[str]:
    """A layer, in names relative to it."""
    if layer.why:
        yield f"  not understood: {layer.why}"
    if layer.entry_norm is not None:
        yield f"  {_own(layer, layer.entry_norm)}{_norm(found, layer.entry_norm)}, on the stream"
    branches = list(layer.branches)
    while branches:
        group = [branches.pop(0)]
        while branches and branches[0].parallel:
            group.append(branches.pop(0))
        yield "  |"
        for branch in group:
            yield f"  +-- {_chain(found, layer, branch)}"
        first = group[0]
        skip = f"{_factor(layer, first.skip)} * stream + " if first.skip.value != 1 else "stream + "
        terms = " + ".join(
            (f"{_factor(layer, b.multiplier)} * " if b.multiplier.value != 1 else "") + _word(b) for b in group
        )
        yield f"  {skip}{terms}{_proof(group)}"
        if first.placement == "post" and first.norm is not None:
            yield f"  {_own(layer, first.norm)}{_norm(found, first.norm)}, on the stream"


def _chain(found: Streams, layer: Layer, branch: Branch) -> str:
    parts = []
    if branch.placement in ("pre", "sandwich") and branch.norm is not None:
        parts.append(_own(layer, branch.norm) + _norm(found, branch.norm))
    name = next((m for m in branch.modules if m == branch.module), "")
    if branch.post_norm == name and branch.post_norm is not None:
        parts.append(_word(branch))
    else:
        parts.append(f"{_own(layer, name)} ({_word(branch)})".strip())
    if branch.post_norm is not None:
        parts.append(_own(layer, branch.post_norm) + _norm(found, branch.post_norm))
    return " -> ".join(parts)


def _word(branch: Branch) -> str:
    return branch.sort.replace("_", "-")


def _own(layer: Layer, path: str) -> str:
    """A path within the layer; where the layer consists of several modules, with a star for its number."""
    for part in layer.parts:
        if path == part or path.startswith(f"{part}."):
            return f"{part.rpartition('.')[0]}.*{path.removeprefix(part)}"
    return path.removeprefix(f"{layer.path}.")


def _norm(found: Streams, path: str) -> str:
    norm = found.norm(path)
    if norm is None:
        return ""
    if norm.kind == "unknown":
        return " (a norm, not proved)"
    gain = {None: "", 0.0: "", 1.0: ", gain 1 + weight"}[norm.offset]
    return f" ({norm.kind}{gain})"


def _factor(layer: Layer, factor: Multiplier) -> str:
    if factor.parameter:
        return _own(layer, factor.parameter)
    if factor.value is None:
        return "a factor"
    return f"{'a vector of rms ' if factor.vector else ''}{factor.value:.4g}"


def _proof(group: list[Branch]) -> str:
    if all(branch.proved for branch in group):
        return "   [proved]"
    why = next((b.caveat for b in group if b.caveat), "")
    errors = [b.error for b in group if b.error is not None]
    if not why and not errors:
        return ""
    return f"   [not proved: {why or f'off by {max(errors):.1e}'}]"


def _proofs(found: Streams) -> Iterator[str]:
    yield from (f"not run             {path} (the input does not reach it)" for path in found.not_run)
    branches = [b for s in found.stacks for b in s.branches]
    proved = [b.error for b in branches if b.proved and b.error is not None]
    if not found.numbers and not proved:
        yield "proved              nothing: structure only (parameters on the meta device hold no numbers)"
        return
    largest = f", largest error {max(proved):.1e} of the stream, in float64" if proved else ""
    yield f"proved              {len(proved)} of {len(branches)} sums{largest}"
    norms = [norm for norm in found.norms if norm.kind != "unknown"]
    yield f"norms proved        {len(norms)} of {len(found.norms)}"
    if not found.numbers:
        yield "  in a random model of the same configuration, of two layers where all are alike"
    invented = "random: " if found.invented else ""
    yield f"input               {invented}{', '.join(found.inputs)}"
