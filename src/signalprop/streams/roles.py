"""What the weights of a found model are: every branch replayed from its maps, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from signalprop.hooks import whole
from signalprop.streams.arguments import text_config
from signalprop.streams.convolutions import gated_convolution
from signalprop.streams.experts import experts
from signalprop.streams.feed_forwards import bends, feed_forward
from signalprop.streams.multi_head import multi_head_attention
from signalprop.streams.parts import Branch, Layer, Place, Stack
from signalprop.streams.proof import Norm, gain_and_bias, norm_of, tensors_of_pass
from signalprop.streams.replay import Hints, Map, Replayed, Rotation, attention, rows_of, same
from signalprop.streams.wrappers import adapters_in, with_adapters_merged

LIMIT = 64 * torch.finfo(torch.float32).eps  # of a branch computed in float32, over its largest entry
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")


@dataclass(frozen=True)
class Proof:
    """Of every branch, in the order of the stream, its roles or the one line why they are not known.

    Attributes:
        tensors: what the pass showed of maps, norms, tables and the stream. output: the model's. decoder: the tensors
            where modules run for encoder and decoder, one after the other, of their last run.
    """

    branches: tuple[Replayed | str, ...]
    tensors: Dictionary[Place, Tensor]
    output: Tensor | None
    decoder: Dictionary[Place, Tensor]


def is_map(module: nn.Module) -> bool:
    """Whether a module is a linear map, stored as (outputs, inputs) or, as transformers' Conv1D, transposed."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def prove_roles(
    model: nn.Module, arguments: Dictionary[str, Any], stacks: list[Stack], norms: tuple[Norm, ...]
) -> Proof:
    """Replay every branch of the stacks; one forward pass, of encoder and decoder two.

    Args:
        model: in evaluation mode, float32. stacks: of two the second reads what the first gives. norms: that were
            proved.
    """
    modules = dict(model.named_modules())
    inner = {f"{path}.{name}" for path in adapters_in(model) for name, _ in modules[path].named_modules() if name}
    maps = [path for path, module in modules.items() if is_map(module) and path not in inner]
    small = [
        path for path, m in modules.items()
        if isinstance(m, nn.Embedding) or (path and not any(True for _ in m.children()) and not is_map(m))
    ]  # fmt: skip
    sides: tuple[Literal["input", "output"], ...] = ("input", "output")
    wanted = {Place(path, side) for path in [*maps, *small] for side in sides}
    for branch in (branch for stack in stacks for branch in stack.branches):
        wanted |= {place for place in (branch.stream_in, branch.stream_out, branch.output) if place is not None}
        wanted |= {Place(path, "output") for path in (branch.norm, branch.post_norm) if path is not None}
        wanted |= {Place(branch.reads, "input")} if branch.normed and branch.reads is not None else set()
    wanted |= {Place(stack.final_reads, "input") for stack in stacks if stack.final_reads is not None}
    tensors, output = _first_sequence(*tensors_of_pass(model, arguments, wanted), stacks[0])
    decoder = tensors
    if len(stacks) > 1:
        first = _first_sequence(*tensors_of_pass(model, arguments, wanted, last=True), stacks[1])[0]
        decoder = {one: first[one] if one.calls == 1 else held for one, held in tensors.items()}
    proved = {norm.path for norm in norms if norm.kind != "unknown"}
    replay = _Replay(model, tensors, maps, proved)
    found: list[Replayed | str] = []
    memory = None
    for stack in stacks:
        found += [replay.branch(layer, branch, memory) for layer in stack.layers for branch in layer.branches]
        memory = replay.end(stack)
    return Proof(tuple(found), tensors, output, decoder)


def _first_sequence(
    tensors: dict[Place, Tensor], output: Tensor | None, stack: Stack
) -> tuple[dict[Place, Tensor], Tensor | None]:
    """The tensors of the first sequence alone, of a stream that holds several (a dictionary's, a series' channels)."""
    start = stack.branches[0].stream_in
    stream = tensors.get(start) if start is not None else None
    n, length = stream.shape[:2] if stream is not None and stream.ndim == 3 and not stack.tokens_first else (1, 1)
    if n == 1:
        return tensors, output

    def one(x: Tensor) -> Tensor:
        if x.ndim == 2 and len(x) == n * length:
            return x[:length]
        return x[:1] if x.ndim > 1 and len(x) == n else x

    return {place: one(x) for place, x in tensors.items()}, None if output is None else one(output)


class _Replay:
    """Replays branches; shapes that were proved are tried first in the next layer."""

    def __init__(self, model: nn.Module, tensors: Dictionary[Place, Tensor], maps: list[str], norms: set[str]) -> None:
        self.model, self.tensors, self.maps, self.norms = model, tensors, maps, norms
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.vectors = [path for path, module in self.modules.items() if _has_vector(module)]
        self.rotations = tuple(self._rotations(text_config(model)))
        self.like: dict[tuple[str, bool], Replayed] = {}
        self.linear: dict[str, float] = {}
        self.tokens = 0

    def at(self, path: str, side: Any) -> Tensor | None:
        """What a module reads or outputs, (tokens, features), float64."""
        found = self.tensors.get(Place(path, side))
        return None if found is None or not found.is_floating_point() else rows_of(found)

    def tensor_at(self, place: Place | None) -> Tensor | None:
        """A tensor of the stream, (tokens, features), float64."""
        return rows_of(self.tensors[place]) if place is not None and place in self.tensors else None

    def end(self, stack: Stack) -> Tensor | None:
        """The stream after a stack, and after its final norm."""
        if stack.final_norm is not None:
            return self.at(stack.final_norm, "output")
        if stack.final_reads is not None:
            return self.at(stack.final_reads, "input")
        return self.tensor_at(stack.branches[-1].stream_out)

    def branch(self, layer: Layer, branch: Branch, memory: Tensor | None) -> Replayed | str:
        """The roles of one branch, or the one line why they are not known."""
        entry = self._entry(branch)
        given = self._given(branch)
        if entry is None or given is None:
            return f"what {branch.module} reads or outputs was not seen"
        self.tokens = len(entry)
        inside = [path for path in self.maps if path != layer.path and layer.holds(path)]
        pairs = [(path, self.at(path, "input"), self.at(path, "output")) for path in inside]
        ran = [Map(path, x, y) for path, x, y in pairs if x is not None and y is not None]
        refused, homes = None, self._homes(layer, branch)
        for home in homes:
            if stored := self._stored(home, entry.shape[-1]):
                one = self._experts(layer, home, entry, given, ran, stored)
            elif (taps := self._taps(home)) and (len(homes) == 1 or self._ends(home, ran, given) is not None):
                one = self._convolution(home, entry, given, ran, taps)
            else:
                continue
            if isinstance(one, Replayed):
                return one
            refused = one
        if refused is not None:
            return refused
        if branch.sort == "branch":
            return f"{branch.module or layer.path} mixes tokens, and not by an attention"
        module = self.model.get_submodule(branch.module) if branch.sort == "attention" else None
        if isinstance(module, nn.MultiheadAttention):
            return self._multi_head(branch, module, entry, memory, given)
        last = next((m for m in ran if same(m.gave, given)), None)
        if last is None:
            return f"{branch.module} does not end in a linear map"
        maps = [m for m in ran if same(m.read, entry)]
        others = [] if memory is None else [m for m in ran if same(m.read, memory)]
        # a map that reads the stream makes the queries of keys of the memory, or all three (of a fused one)
        memories = [others, []] if others and branch.sort == "attention" and len(maps) == 1 else [[]]
        if branch.sort == "attention":
            hints = self._hints(layer, branch)
            for keys in memories:
                like = self.like.get(("attention", bool(keys)))
                found = attention(maps, keys, last, hints, LIMIT, like)
                if isinstance(found, Replayed):
                    break
        else:
            like = self.like.get(("feed-forward", False))
            found = feed_forward(maps, last, LIMIT, bends(self._numbers(layer)), like)
        if not isinstance(found, Replayed):
            names = ", ".join(m.path.rpartition(".")[2] for m in [*maps, *memories[0]])
            if not names:
                return f"no linear map reads what enters the branch of {last.path}"
            miss = f" (the nearest replay is off by {found:.1g})" if found < 10 else ""
            alone = "one token attends to itself" if self.tokens == 1 else "its scores are so small"
            miss = f" ({alone}, so that any queries and keys would do)" if found <= LIMIT else miss
            return f"the roles of {names} in {last.path} are not proved{miss}"
        checked = self._checked(found)
        if isinstance(checked, Replayed):
            self.like["attention" if branch.sort == "attention" else "feed-forward", found.across] = found
        return checked

    def _homes(self, layer: Layer, branch: Branch) -> list[str]:
        """Modules that may hold a branch's weights: its own; where a norm gives what is added, the layer's children."""
        if branch.module and branch.module != branch.post_norm:
            return [branch.module]
        children = self.model.get_submodule(layer.path).named_children() if branch.sort != "attention" else ()
        return [f"{layer.path}.{name}" for name, _ in children]

    def _stored(self, home: str, width: int) -> dict[str, Tensor]:
        """Parameters and buffers of a module that holds experts in tensors of three axes; else nothing."""
        inside = self.model.get_submodule(home)
        held = {f"{home}.{name}": whole(t) for name, t in (*inside.named_parameters(), *inside.named_buffers())}
        shapes = {tuple(t.shape) for t in held.values()}
        stacks = (t for t in held.values() if t.ndim == 3 and width in t.shape[1:])
        return held if any((len(t), width) in shapes for t in stacks) else {}

    def _experts(
        self, layer: Layer, home: str, entry: Tensor, given: Tensor, ran: list[Map], stored: dict[str, Tensor]
    ) -> Replayed | str:
        """The roles of a branch with experts."""
        maps = [m for m in ran if m.path.startswith(f"{home}.")]
        found = experts(entry, given, stored, maps, self._numbers(layer), LIMIT, self.like.get(("experts", False)))
        if isinstance(found, Replayed):
            self.like["experts", False] = found
            return self._checked(found)
        name = next(path for path, t in stored.items() if t.ndim == 3)
        miss = f" (the nearest replay is off by {found:.1g})" if found < 10 else ""
        return f"{name} holds experts, whose role in {home} is not proved{miss}"

    def _multi_head(
        self, branch: Branch, module: nn.MultiheadAttention, entry: Tensor, memory: Tensor | None, given: Tensor
    ) -> Replayed | str:
        """The roles of PyTorch's attention; of a decoder's, whichever of the two streams its keys read."""
        streams = (None,) if memory is None else (None, memory)
        found = (multi_head_attention(branch.module, module, entry, keys, given, LIMIT) for keys in streams)
        proved = next((one for one in found if one is not None), None)
        return proved or f"the roles of in_proj_weight and out_proj in {branch.module} are not proved"

    def _checked(self, found: Replayed) -> Replayed | str:
        """The same, where every map is the linear map of its weight."""
        modules = self.modules
        # in one order in all processes that a model is sharded over, which gather each weight together
        for path in dict.fromkeys(path for path, _ in found.weights.values()):
            if path not in modules or Place(path, "output") not in self.tensors:
                continue
            if is_map(modules[path]) and self._linear(path) > LIMIT:
                return f"{path} is not the linear map of its weight (off by {self._linear(path):.1g})"
        return found

    def _taps(self, home: str) -> list[tuple[str, Tensor, Tensor | None]]:
        """Convolutions over tokens in a module, one filter per channel: path, weight and bias, in float64."""
        inside = self.model.get_submodule(home)
        found = [(name, m) for name, m in inside.named_modules() if isinstance(m, nn.Conv1d) and m.weight.shape[1] == 1]
        wide = [(name, whole(m.weight).detach().double().cpu(), whole(m.bias)) for name, m in found]
        return [(f"{home}.{n}", w, None if b is None else b.detach().double().cpu()) for n, w, b in wide]

    def _ends(self, home: str, ran: list[Map], given: Tensor) -> Map | None:
        """The linear map in a module that gives what a branch does, if there is one."""
        return next((m for m in ran if m.path.startswith(f"{home}.") and same(m.gave, given)), None)

    def _convolution(self, home: str, entry: Tensor, given: Tensor, ran: list[Map], taps: list[Any]) -> Replayed | str:
        """The roles of a branch with a convolution over tokens."""
        last = self._ends(home, ran, given)
        if last is None:
            return f"{home} does not end in a linear map"
        maps = [m for m in ran if m.path.startswith(f"{home}.") and same(m.read, entry)]
        found = gated_convolution(maps, taps, last, LIMIT)
        if isinstance(found, Replayed):
            return self._checked(found)
        miss = f" (the nearest replay is off by {found:.1g})" if found < 10 else ""
        names = ", ".join(m.path.rpartition(".")[2] for m in maps)
        return f"the roles of {names} and of the convolution {taps[0][0]} in {last.path} are not proved{miss}"

    def _entry(self, branch: Branch) -> Tensor | None:
        """What the branch's first maps read."""
        if branch.placement in ("pre", "sandwich") and branch.norm is not None:
            return self.at(branch.norm, "output")
        if branch.normed and branch.reads is not None:
            return self.at(branch.reads, "input")
        return self.tensor_at(branch.stream_in)

    def _given(self, branch: Branch) -> Tensor | None:
        """What the branch's last map outputs."""
        if branch.placement in ("sandwich", "res-post") and branch.post_norm is not None:
            return self.at(branch.post_norm, "input")
        return self.tensor_at(branch.output)

    def _linear(self, path: str) -> float:
        """Largest difference of a map's output from weight * input + bias, in their type, over its largest entry."""
        if path not in self.linear:
            module: Any = self.model.get_submodule(path)
            x, y = self.at(path, "input"), self.at(path, "output")
            assert x is not None and y is not None
            module = with_adapters_merged(module)
            weight, bias = whole(module.weight).detach().cpu(), whole(getattr(module, "bias", None))
            fits = weight.shape == (y.shape[-1], x.shape[-1]) and type(module).__name__ != "Conv1D"
            mapped = (x.to(weight.dtype) @ (weight.mT if fits else weight)).double()
            mapped = mapped + bias.detach().double().cpu() if isinstance(bias, Tensor) else mapped
            self.linear[path] = float((mapped - y).abs().max()) / (float(y.abs().max()) or 1.0)
        return self.linear[path]

    def _hints(self, layer: Layer, branch: Branch) -> Hints:
        numbers = self._numbers(layer)
        heads = [numbers[n] for n in HEADS if n in numbers]
        heads += [v for n, v in numbers.items() if "head" in n and isinstance(v, int) and v < 1024]
        scales = [float(v) for n, v in numbers.items() if ("scal" in n or "mult" in n) and 1e-6 < abs(v) < 1e6]
        scales += [float(v) ** -0.5 for n, v in numbers.items() if "scalar" in n and v > 0]
        sizes = {v for n, v in numbers.items() if ("window" in n or "local_attention" in n) and isinstance(v, int)}
        windows = sorted({w for v in sizes for w in (v, v // 2 + 1) if 0 < w < self.tokens})
        norms = {}
        for path in self.norm_paths(layer, branch):
            x, y = self.at(path, "input"), self.at(path, "output")
            if x is not None and y is not None and norm_of(self.model, path, self.tensors).kind != "unknown":
                sides = [self.tensors[Place(path, side)].double().cpu() for side in ("input", "output")]
                norms[path] = (sides[0], sides[1])
        tables = {
            place.path: found.reshape(found.shape[-3:]).permute(2, 0, 1).double().cpu()
            for place, found in self.tensors.items()
            if place.side == "output" and found.ndim in (3, 4) and found.shape[-3] == found.shape[-2]
            and isinstance(self.model.get_submodule(place.path), nn.Embedding)
        }  # fmt: skip
        counts = tuple(dict.fromkeys((*heads, *_COUNTS)))
        return Hints(counts, tuple(scales), tuple(windows), self.rotations, norms, tables)

    def _numbers(self, layer: Layer) -> dict[str, Any]:
        """What the configuration and a layer's modules hold, by name; the configuration's first."""
        near = [m for path, m in self.modules.items() if layer.holds(path)]
        return {name: value for place in [*near, text_config(self.model)] for name, value in _numbers(place)}

    def norm_paths(self, layer: Layer, branch: Branch) -> Iterator[str]:
        """Modules with one vector as weight in a layer, that do not read the stream: norms of queries and keys."""
        of_branches = {b.norm for b in layer.branches} | {b.post_norm for b in layer.branches}
        return (p for p in self.vectors if p != layer.path and layer.holds(p) and p not in of_branches)

    def _rotations(self, text: Any) -> Iterator[Rotation]:
        """Of buffers that hold frequencies, and of a configuration's base."""
        found: dict[tuple[float, ...], float] = {}
        for module in self.model.modules():
            gain = getattr(module, "attention_scaling", 1.0)
            for name, buffer in module.named_buffers(recurse=False):
                if ("freq" in name or name == "theta") and buffer.ndim == 1 and buffer.is_floating_point():
                    found.setdefault(tuple(buffer.double().tolist()), float(gain))
        bases = dict.fromkeys([v for n, v in _numbers(text) if n in ("rope_theta", "rotary_emb_base")] + [10_000.0])
        sizes = [v for n, v in _numbers(text) if n in ("rotary_dim", "head_dim", "rope_n_elem") and isinstance(v, int)]
        sizes += [64, 32, 16, 8] if not found else []
        for base in bases:
            for size in sizes:
                found.setdefault(tuple(base ** (-2 * i / size) for i in range(size // 2)), 1.0)
        for frequencies, gain in found.items():
            for halves in (True, False):
                yield Rotation(frequencies, halves, gain)


def _has_vector(module: nn.Module) -> bool:
    """Whether a module's weight is one vector, as that of norms."""
    gain, _ = gain_and_bias(module)
    return isinstance(gain, Tensor) and gain.ndim == 1 and not isinstance(module, nn.Embedding)


_COUNTS = range(1, 129)  # of which those are tried that divide the width


def _numbers(place: Any) -> Iterator[tuple[str, Any]]:
    try:
        items = list(vars(place).items())
    except TypeError:
        return
    for name, value in items:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value
