"""The parts of a model: stacks, layers, branches, norms, multipliers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Placement = Literal["pre", "post", "sandwich", "res-post", "none"]
Sort = Literal["attention", "feed_forward", "branch"]


def within(path: str, other: str) -> bool:
    """Whether a module is the other one, or inside it."""
    return path == other or path.startswith(f"{other}.")


@dataclass(frozen=True)
class Place:
    """A tensor as a hook sees it: what enters or leaves a module, at its `call`-th of `calls` calls in a pass."""

    path: str
    side: Literal["input", "output"]
    call: int = 0
    calls: int = 1


@dataclass(frozen=True)
class Multiplier:
    """A fixed factor.

    Attributes:
        value: of a vector its root mean square; None where it holds no number (the meta device).
        parameter: the path of the parameter that it is, where it is one. vector: it has more than one entry.
        tensor: the factor itself.
    """

    value: float | None
    parameter: str = ""
    vector: bool = False
    tensor: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Branch:
    """Something that is added to the stream: total = skip * stream_in + multiplier * output.

    Attributes:
        sort: `attention` where the pass saw scores; `feed_forward` where it saw none and the module maps tokens one by
            one; `branch` where that is not known.
        modules: paths of the modules that give what is added, innermost first; empty where none does.
        module: the largest of them, which is named in print.
        output: what is added, before its multiplier. stream_in, stream_out: the stream before and after (after the
            norm on the sum, if there is one). total: the sum. None: no module sees it.
        norm: that reads the stream before the branch (`pre`, `sandwich`) or stands on the sum (`post`). post_norm: on
            the branch. reads: the first module that reads the stream; of a branch that is `normed`, what a
            norm gives that is a function and not a module (F.rms_norm in the forward).
        parallel: it is added in one sum with the branch before it.
        caveat: why `total` cannot be proved, where that is known beforehand.
        error: largest difference of the two sides of the equation over the largest entry of the sum, in float64;
            None where it was not looked at.
    """

    sort: Sort
    modules: tuple[str, ...]
    module: str
    output: Place | None
    stream_in: Place | None
    stream_out: Place | None
    total: Place | None
    skip: Multiplier
    multiplier: Multiplier
    placement: Placement
    norm: str | None = None
    post_norm: str | None = None
    reads: str | None = None
    normed: bool = False
    parallel: bool = False
    caveat: str = ""
    error: float | None = None
    rounding: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether the equation holds to the rounding of the tensors' type."""
        return self.error is not None and not self.caveat and self.error <= self.rounding


@dataclass(frozen=True)
class Layer:
    """A member of a stack: its path, its branches; `why` it was not understood, where it was not.

    Attributes:
        entry_norm: path of a norm on the stream that it begins with, where that is not on the sum before.
        between: what the model does to the stream before it, in words; '' where what left the last layer enters it.
        scale: the factor on the stream, where that is all. sources: where it is a sum, factors by streams: 0 what
            entered the first layer, k what left layer k - 1. reads: those of them whose very tensors it comes from,
            through sums and factors. linked: what enters comes from what left the last layer
            through sums and factors; equal numbers alone are no stream (two that are still the same). parts: paths of
            its modules, if it is not one.
    """

    path: str
    branches: tuple[Branch, ...]
    why: str = ""
    entry_norm: str | None = None
    between: str = ""
    scale: float = 1.0
    sources: dict[int, float] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    linked: bool = True
    parts: tuple[str, ...] = ()

    def holds(self, path: str) -> bool:
        """Whether a module is in the layer."""
        return any(within(path, part) for part in self.parts or (self.path,))

    @property
    def rewired(self) -> bool:
        """Whether more than the last layer's stream, or something else than a multiple of it, enters."""
        return bool(self.between) and self.scale == 1.0


@dataclass(frozen=True)
class Stack:
    """Layers that one stream runs through.

    Attributes:
        path: of the list that holds the layers. width: features of the stream. parameters: of all layers.
        final_norm: path of the norm that reads the stream after the last layer; after: what that reads, in words, where
            it is a sum of several streams; final_reads: of the module that reads
            what a norm gives there that is a function. memory: path of another stack whose stream its
            branches read, and which enters it in no other way. causal: no token changes what branches add to earlier
            ones; None: not known. tokens_first: the stream is (tokens, batch, features), as in torch's layers;
            reads_tokens_first: what the model is called with, too.
    """

    path: str
    layers: tuple[Layer, ...]
    width: int
    parameters: int
    final_norm: str | None = None
    final_reads: str | None = None
    called: bool = True
    memory: str = ""
    causal: bool | None = None
    tokens_first: bool = False
    reads_tokens_first: bool = False
    after: str = ""

    @property
    def branches(self) -> list[Branch]:
        """Of all layers, in the order of the stream."""
        return [branch for layer in self.layers for branch in layer.branches]

    @property
    def why(self) -> str:
        """The first thing that was not understood; '' where all was."""
        return next((f"{layer.path}: {layer.why}" for layer in self.layers if layer.why), "")
