"""A network one sublayer at a time: drawn when the signal reaches it, forgotten, drawn again for the gradient.

Only the stream is stored between sublayers. Results equal those of `build` with the same seed,
given the same dropout masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.models.connections import entered, left
from signalprop.models.ends import Embeddings, Head, answering
from signalprop.models.residual import Sublayer
from signalprop.models.shaping import TorchShape
from signalprop.models.sublayers import make_sublayer
from signalprop.models.surroundings import Surroundings
from signalprop.models.transformer import make_final_norm
from signalprop.models.weights import tensor_seed
from signalprop.network.kinds import kind_of
from signalprop.network.layer_inputs import INPUT
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import back_through, through

# Bytes of stream inputs that are kept for the backward pass; deeper stacks keep one per sqrt(n_layers) layers.
STREAM_MEMORY = 2**30
# Logits that are held at once while the loss is differentiated.
LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Scaled:
    """The tensor times 2^exponent: a gradient can leave the range of float32 on its way down, and is linear."""

    tensor: Tensor
    exponent: int = 0

    def normalised(self) -> Scaled:
        """The same gradient, with its largest number near 1 if it was far from it; exact."""
        largest = float(self.tensor.abs().max())
        if largest == 0 or not math.isfinite(largest) or 2**-20 < largest < 2**20:
            return self
        shift = math.frexp(largest)[1]
        return Scaled(_shifted(self.tensor, -shift), self.exponent + shift)

    def plus(self, other: Scaled | None) -> Scaled:
        """The sum of two gradients."""
        if other is None:
            return self
        top = max(self.exponent, other.exponent)
        parts = [_shifted(g.tensor, g.exponent - top) for g in (self, other)]
        return Scaled(parts[0] + parts[1], top)


def _shifted(tensor: Tensor, shift: int) -> Tensor:
    """tensor * 2^shift, in steps that float32 can hold."""
    while shift:
        step = max(-100, min(100, shift))
        tensor = tensor * 2.0**step
        shift -= step
    return tensor


# Sees (sublayer, tensors by probe point, exponent of all of them).
See = Callable[[int, Mapping[str, Tensor], int], None]


@dataclass(frozen=True)
class Network:
    """The network of one parametrization and seed; its weights exist only while they are used.

    Attributes:
        shapes: how each sublayer's attention is shaped, of `torch_shapes`; the same in all networks of a table.
        device: where it runs; weights are drawn on the CPU, so they are the same everywhere.
    """

    parametrization: Parametrization
    seed: int
    train: bool
    dtype: torch.dtype
    shapes: Sequence[TorchShape | None]
    device: torch.device

    def sublayer(self, index: int) -> Sublayer:
        """A sublayer with frozen weights: only the gradient of the stream is wanted."""
        sublayer = make_sublayer(self.parametrization, index, self.seed, self.dtype, self.shapes[index])
        return sublayer.to(self.device).requires_grad_(False).train(self.train)

    def seed_dropout(self, place: str) -> None:
        """Seed PyTorch's global generator, so that a place has the same masks whenever the signal passes it."""
        generator = torch if self.device.type != "cpu" else torch.default_generator
        generator.manual_seed(tensor_seed(self.seed, place, "dropout"))

    def final_norm(self) -> nn.Module | None:
        """The norm after the last layer, if there is one."""
        norm = make_final_norm(self.parametrization, self.dtype)
        return None if norm is None else norm.to(self.device)

    def embed(self, stack: str, inputs: Tensor, segments: Tensor | None) -> Tensor:
        """The stream that enters a stack."""
        embeddings = Embeddings(self.parametrization, stack, self.seed, self.dtype)
        embeddings.to(self.device).requires_grad_(False).train(self.train)
        self.seed_dropout(f"{stack} embedding")
        return entered(self.parametrization.architecture, embeddings(inputs, segments))

    def loss_gradient(self, stream: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """d(mean cross-entropy)/d(stream after the last layer).

        Final norm and head act on each position by itself, so positions are taken in slices, and those without loss not
        at all.
        """
        p = self.parametrization
        norm, head = self.final_norm(), Head(p, self.seed, self.dtype).to(self.device).requires_grad_(False)
        expected = stream.shape[:1] if p.architecture.head == "classes" else stream.shape[:2]
        if targets.shape != expected:
            raise InputError(f"targets have shape {tuple(targets.shape)}; expected {tuple(expected)}")
        if p.architecture.head == "classes":
            read_at = torch.arange(stream.shape[1], device=stream.device).expand(stream.shape[:2])[..., None]
            first = p.architecture.kind == "encoder"
            places, aims = read_at[..., 0] == answering(read_at, first=first, keep=keep), targets.flatten()
        else:
            places, aims = targets >= 0, targets[targets >= 0]
        if aims.numel() == 0:
            raise InputError("no position carries loss: every target is -1; expected at least one id")
        if int(aims.max()) >= head.weight.shape[0]:
            raise InputError(f"targets hold id {int(aims.max())}; the head has {head.weight.shape[0]} outputs")
        slices = []
        size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        for x, y in zip(torch.split(stream[places], size), torch.split(aims, size), strict=True):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                read = left(p.architecture, leaf)
                hidden = read if norm is None else norm(read)
                loss = F.cross_entropy(head(hidden), y, reduction="sum") / aims.numel()
            slices.append(torch.autograd.grad(loss, leaf)[0])
        gradient = torch.zeros_like(stream)
        gradient[places] = torch.cat(slices)
        return gradient


@dataclass
class Passage:
    """One stack on the signal's way through it.

    Attributes:
        rows: its sublayers. around: what they see besides the stream.
        runs: the rows cut into stretches of whole layers; the backward pass holds the stream inputs of one at a time.
        reads: what sublayers read, where it is kept: all rows, or the first of every run.
        stored: streams that later layers read again, by their number; sent_back: what those have sent back.
    """

    network: Network
    rows: list[int]
    around: Surroundings
    runs: list[list[int]]
    reads: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, Tensor] = field(default_factory=dict)
    sent_back: dict[int, Scaled] = field(default_factory=dict)

    @staticmethod
    def of(network: Network, rows: list[int], around: Surroundings, stream: Tensor) -> Passage:
        """A passage whose runs keep the stored streams within STREAM_MEMORY bytes where one run would pass it."""
        layer = network.parametrization.layer
        starts = [k for k, i in enumerate(rows) if k == 0 or layer[i] != layer[rows[k - 1]]]
        runs = [rows]
        if len(rows) * stream.numel() * stream.element_size() > STREAM_MEMORY:
            size = math.isqrt(len(starts) - 1) + 1
            cuts = [*starts[::size], len(rows)]
            runs = [rows[a:b] for a, b in pairwise(cuts)]
        return Passage(network, rows, around, runs)

    def forward(self, stream: Tensor, see: See, *, keep: bool) -> Tensor:
        """Send the stream through the stack; `keep` what the backward pass needs."""
        self.stored[INPUT] = stream
        if (inputs := self.network.parametrization.architecture.layer_inputs) is not None:
            stream = next(iter(inputs[0].values())) * stream
        self.stored[0] = stream
        stored = set(self.rows) if len(self.runs) == 1 else {run[0] for run in self.runs}
        return self._through(self.rows, stream, see, stored if keep else set())

    def backward(self, gradient: Scaled, see: See) -> tuple[Scaled, Scaled | None]:
        """Send the gradient down; give (gradient of the stack's input, total gradient of the memory)."""
        memory: Scaled | None = None

        def one(i: int, gradient: Scaled) -> tuple[Scaled, Scaled]:
            nonlocal memory
            sublayer = self.network.sublayer(i)
            share, at_branch, *across = self._pull(sublayer, i, gradient)
            if across:
                memory = Scaled(across[0], gradient.exponent).normalised().plus(memory)
            return Scaled(at_branch, gradient.exponent), Scaled(share, gradient.exponent)

        def seen(point: str, i: int, gradient: Scaled) -> None:
            see(i, {point: gradient.tensor}, gradient.exponent)

        parallel = self.network.parametrization.parallel.tolist()
        for run in reversed(self.runs):
            if len(self.runs) > 1:
                self._through(run, self.reads[run[0]], lambda *_: None, set(run))
            gradient = back_through(
                run, parallel, one, Scaled.plus, Scaled.normalised, gradient, seen, self._entering_back
            )
        return gradient, memory

    def _layer_input(self, row: int) -> tuple[int, Mapping[int, float]] | None:
        """The layer that begins with a row, and what enters it by sources; None where that is what left the last."""
        p = self.network.parametrization
        inputs, layer = p.architecture.layer_inputs, int(p.layer[row])
        begins = row == self.rows[0] or p.layer[row - 1] != layer
        return (layer, inputs[layer]) if begins and inputs is not None else None

    def _entering(self, row: int, stream: Tensor) -> Tensor:
        found = self._layer_input(row)
        if found is None:
            return stream
        layer, sources = found
        self.stored[layer] = stream
        return torch.stack([factor * self.stored[source] for source, factor in sources.items()]).sum(0)

    def _entering_back(self, row: int, gradient: Scaled) -> tuple[Scaled, Scaled]:
        found = self._layer_input(row)
        if found is None:
            return gradient, gradient
        layer, sources = found
        for source, factor in sources.items():
            part = Scaled(factor * gradient.tensor, gradient.exponent)
            self.sent_back[source] = part.plus(self.sent_back.get(source))
        before = self.sent_back.pop(
            layer or next(iter(sources)), Scaled(torch.zeros_like(gradient.tensor))
        ).normalised()
        return before if sources == {layer: 1.0} else gradient, before

    def _through(self, rows: Sequence[int], stream: Tensor, see: See, stored: set[int]) -> Tensor:
        def one(i: int, read: Tensor, onto: Tensor | None) -> tuple[Tensor, Tensor]:
            if i in stored:
                self.reads[i] = read
            sublayer = self.network.sublayer(i)
            self.network.seed_dropout(str(i))
            return sublayer.parts(read, self.around, onto)

        def seen(i: int, read: Tensor, branch: Tensor, out: Tensor) -> None:
            see(i, {"stream_in": read, "branch": branch, "stream_out": out}, 0)

        parallel = self.network.parametrization.parallel
        return through(rows, [bool(parallel[i]) for i in rows], one, stream, seen, self._entering)

    def _pull(self, sublayer: Sublayer, index: int, gradient: Scaled) -> tuple[Tensor, ...]:
        """Gradients of (stream_in, branch), and of the memory after a cross-attention."""
        around = self.around
        with torch.enable_grad():
            stream = self.reads.pop(index).detach().requires_grad_()
            leaves = [stream]
            if kind_of(self.network.parametrization, index).reads_memory and around.memory is not None:
                around = replace(around, memory=around.memory.detach().requires_grad_())
                leaves.append(around.memory)  # type: ignore[arg-type]
            self.network.seed_dropout(str(index))
            # what a parallel sublayer adds onto only passes the gradient on
            onto = torch.zeros_like(stream) if sublayer.parallel else None
            branch, out = sublayer.parts(stream, around, onto)
        leaves.insert(1, branch)
        return torch.autograd.grad(out, leaves, gradient.tensor)
