"""The mapping: which modules of a PyTorch model are the sublayers, the norms, the weights, and where the stream runs.

`signalprop.attachment.families` makes one for every supported Hugging Face family. For a model of your own, write
one by hand (docs/measuring.md has a complete example), or give the model a method `signalprop_mapping()` that
returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.hooks import whole
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_of
from signalprop.network.layout import Layout, layout
from signalprop.network.parametrization import Shaping
from signalprop.streams.parts import Place
from signalprop.streams.streams import Streams

Module = str | nn.Module
Weight = str | nn.Module | Tensor | tuple[str | nn.Module | Tensor, slice | Sequence[int]]
Number = float | nn.Parameter
_UNSHAPED = Shaping()


@dataclass(frozen=True)
class SublayerMap:
    """One residual branch. Modules are named by their path in the model (`h.0.attn`) or given themselves.

    Attributes:
        branch: its output (the first tensor of a tuple) is what the sublayer adds, before its multiplier:
            after the output dropout, and after the second norm of a sandwich. So name the dropout where there
            is one.
        norm: the norm that the placement names: on the stream that enters the branch (`pre`, `sandwich`), or
            on the sum (`post`).
        post_norm: the second norm of a sandwich, on the branch output.
        reads: a module whose first argument is the stream that enters the sublayer. Default: `norm`, where
            the placement is `pre` or `sandwich`; the norm before it, where that is `post`. Otherwise it has
            to be named.
        writes: a module whose output is the stream after the addition. Only the last sublayer of a stack
            needs it, and only without a final norm and without `post`; elsewhere the next sublayer's `reads`
            says where the stream is.
        weights: the weight of each role (query, key, value, output; gate, up, down): a module with `weight`
            (and `bias`), a parameter, or (either, rows), with the rows of the output features that it takes
            of a fused map.
        skip, multiplier: lambda and beta, stream_out = skip * stream_in + multiplier * branch; a trainable
            one as the parameter itself, of one element or one per channel.
        score_scale: factor on the scalar product of query and key (default: the architecture's).
        query_norm, key_norm: the norms of QK-norm.
        call: which call of `branch`, where one module is called several times in a forward pass (0: the
            first).
        calls: how many times `branch` is called in a forward pass.
        carrier: the module whose output, times a number, is the branch times that number: where a multiplier goes.
            Default: the post_norm of a sandwich, the norm of a res-post, else the module of the output or down weight.
        dropout: what drops out the branch between its carrier and the addition: a path of an nn.Dropout or of a float
            attribute. Default: `branch`, where that is an nn.Dropout.
        scaling: path of the float attribute that multiplies query and key's product, where the model has one.
        activation: the module that is a feed-forward's activation.
        norm_scale: fixed factor on the output of `norm`.
        value_skip, attention_gain: the heads output value_skip * V + attention_gain * A V; a trainable one as the
            parameter itself.
        shape: the columns shape_in, shape_out and shape_gain of an attention that `Mapping.shaping` shapes.
        stream_out: a module whose output is the stream after the sublayer, where nothing above shows it (a norm that
            was moved after the addition).
        units: what the tensors seen at stream_in, branch and stream_out have to be multiplied with to be those of the
            Parametrization (a model whose skip multipliers were gauged away carries a rescaled stream).
        normed: a norm reads the stream before the branch that is a function, without weights: no module.
        enters, leaves: where the stream before and after the sublayer is seen, instead of what the fields above
            say of it.
    """

    branch: Module
    norm: Module | None = None
    post_norm: Module | None = None
    reads: Module | None = None
    writes: Module | None = None
    weights: Dictionary[str, Weight] = field(default_factory=dict)
    skip: Number = 1.0
    multiplier: Number = 1.0
    score_scale: float | None = None
    query_norm: Module | None = None
    key_norm: Module | None = None
    call: int = 0
    calls: int = 1
    carrier: Module | None = None
    dropout: str | None = None
    scaling: str | None = None
    activation: Module | None = None
    norm_scale: float = 1.0
    stream_out: Module | None = None
    units: tuple[float, float, float] = (1.0, 1.0, 1.0)
    value_skip: Number = 0.0
    attention_gain: Number = 1.0
    shape: tuple[float, float, float] = (0.0, 0.0, 0.0)
    normed: bool = False
    enters: Place | None = None
    leaves: Place | None = None


@dataclass(frozen=True)
class EmbeddingMap:
    """The model's input, for reading its parameters: the tables (or the patch map, as `token`), the norm on their sum.

    `position`, `segment`: tables that are added. `normed`: the norm is a function, without weights.
    `scale`: the factor on the sum before the norm.
    A table that the model computes (sinusoidal positions) is given by its root mean square. `decoder_position` and
    `decoder_norm`: those of the decoder of an encoder-decoder, where they are others. `class_tokens`: the vectors that
    stand before patches (class, distillation). `convolutions`: the maps that read frames, in order.
    """

    token: Module | Tensor | None = None
    position: Module | Tensor | float | None = None
    segment: Module | Tensor | None = None
    norm: Module | None = None
    scale: float = 1.0
    decoder_position: Module | Tensor | float | None = None
    decoder_norm: Module | None = None
    class_tokens: Sequence[str | Tensor] = ()
    convolutions: Sequence[Module] = ()
    normed: bool = False


@dataclass(frozen=True)
class HeadMap:
    """The model's output.

    Attributes:
        weight: the map to logits. scale: the factor on its input.
        transform: the dense layer before it, with its activation.
    """

    weight: Module | Tensor | None = None
    scale: float = 1.0
    transform: Module | Tensor | None = None
    activation: Module | None = None


@dataclass(frozen=True)
class Mapping:
    """Where the signal of a model runs.

    Attributes:
        architecture: what the model is; its layout says what each sublayer is (kind, placement, parallel).
        sublayers: one entry per sublayer in the order of the stream (attention,
            cross-attention, feed-forward, layer by layer; encoder first).
        final_norm: the norm after the last layer (of the decoder, in an encoder-decoder).
        encoder_final_norm: the norm after the encoder of an encoder-decoder.
        embedding, head: the two ends; only `read_parametrization` needs them.
        shaping: how attentions are shaped; their numbers are with the sublayers.
        gain_offset: added to every norm's weight to get its gain (1 in Gemma). gains_differ: of some it is another.
        arguments: makes the keyword arguments of the model from a `signalprop.data.Batch`. Without it
            `measure` needs a dictionary of arguments.
        padding, decoder_padding: names of the forward arguments that hold 1 or True at real tokens, shape
            (batch, tokens). padding_stride: columns of the first one per token of the stream (a mask over frames).
        layers: the module of every layer (encoder first), for what takes layers as a whole, such as removing one.
            Of a layer that is not one module: its modules, in the order in which they run. Empty: not known.
        notes: what readers of a result should know of the mapping. found: where it was found in the model's numbers.
        tokens_first: the stream is (tokens, batch, features); reads_tokens_first: the ids, too, that the model is
            called with. stream_only: it knows the stream and the branches, not what their weights are. rewired: the
            first place where the stream that enters a layer is another than the last one's, in words.
    """

    architecture: Architecture
    sublayers: Sequence[SublayerMap]
    final_norm: Module | None = None
    encoder_final_norm: Module | None = None
    embedding: EmbeddingMap = EmbeddingMap()
    head: HeadMap = HeadMap()
    shaping: Shaping = _UNSHAPED
    gain_offset: float = 0.0
    gains_differ: bool = False
    arguments: Callable[[Any], Dictionary[str, Any]] | None = None
    padding: str = "attention_mask"
    padding_stride: int = 1
    decoder_padding: str = "decoder_attention_mask"
    layers: Sequence[Module | tuple[Module, ...]] = ()
    notes: tuple[str, ...] = ()
    found: Streams | None = None
    tokens_first: bool = False
    reads_tokens_first: bool = False
    stream_only: bool = False
    rewired: str = ""


def find(model: nn.Module, reference: Module, what: str = "module") -> nn.Module:
    """The module of that path in the model (modules pass through)."""
    found = find_any(model, reference, what)
    if not isinstance(found, nn.Module):
        raise InputError(
            f"{what}: {reference!r} is not a module of {type(model).__name__} but a {type(found).__name__}"
        )
    return found


def find_any(model: nn.Module, reference: Module | Tensor, what: str) -> Any:
    """The module or tensor of that path in the model (modules and tensors pass through)."""
    if not isinstance(reference, str):
        return reference
    place: Any = model
    steps = reference.split(".") if reference else []
    for i, step in enumerate(steps):
        if not hasattr(place, step):
            known = [name for name, _ in place.named_children()] if isinstance(place, nn.Module) else []
            raise InputError(
                f"{what}: {type(model).__name__} has no {reference!r}; {'.'.join(steps[:i]) or 'the model'} has "
                f"no {step!r} (it has: {', '.join(known[:12]) or 'no modules'})"
            )
        place = getattr(place, step)
    return place


def split(reference: Weight | None) -> tuple[Any, Any]:
    """(the module or parameter that a weight's reference names, its rows there or None)."""
    return reference if isinstance(reference, tuple) else (reference, None)


def masks_of(arguments: Dictionary[str, Any], mapping: Mapping) -> tuple[dict[int, Tensor | None], bool]:
    """(padding mask of every stack, (batch, tokens), None if there is none; whether one has another shape)."""
    stack = layout(mapping.architecture).stack
    given = {int(stack.min()): arguments.get(mapping.padding)}
    if stack.min() != 1:
        given[1] = arguments.get(mapping.decoder_padding)
    odd = any(value is not None and not (isinstance(value, Tensor) and value.ndim == 2) for value in given.values())
    found = {k: value if isinstance(value, Tensor) and value.ndim == 2 else None for k, value in given.items()}
    first = found[int(stack.min())]
    if first is not None:
        found[int(stack.min())] = first[:, :: mapping.padding_stride]
    return found, odd


def describe(rows: Layout, index: int) -> str:
    """`layer 3 attention`, with the stack where there are two."""
    stack = f"{('encoder', 'decoder')[rows.stack[index]]} " if rows.stack.min() != rows.stack.max() else ""
    kind = kind_of(rows, index).words
    return f"{stack}layer {rows.layer[index]} {kind}"


def number(value: Number) -> float:
    """A multiplier as a float: the value, or the root mean square of a trainable vector."""
    if isinstance(value, Tensor):
        flat = whole(value).detach().double().flatten()
        return float(flat[0]) if flat.numel() == 1 else float((flat * flat).mean().sqrt())
    return float(value)
