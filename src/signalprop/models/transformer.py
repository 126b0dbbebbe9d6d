"""The reference transformer that a Parametrization describes, as a PyTorch module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.limits import check_fits
from signalprop.files.validation import typed
from signalprop.models.connections import LayerInputs, entered, left
from signalprop.models.ends import Embeddings, Head, RelativeBias, answering
from signalprop.models.residual import Sublayer, make_norm
from signalprop.models.shaping import Positions, TorchShape
from signalprop.models.sublayers import make_sublayer, torch_shapes
from signalprop.models.surroundings import Surroundings, rotation_table
from signalprop.network.architecture import ADDED, Architecture
from signalprop.network.layout import STACKS
from signalprop.network.parametrization import ROLES, Parametrization
from signalprop.network.residual import through
from signalprop.results.cost import count_parameters

if TYPE_CHECKING:
    from signalprop.attachment.mapping import Mapping


@dataclass
class Output:
    """What the model gives back.

    Attributes:
        logits: (batch, tokens, vocabulary); (batch, classes) with a class head; None without a head.
        loss: mean cross-entropy over the positions whose target is not -1; None without targets or a head.
        hidden: the stream after the last layer and the final norm, (batch, tokens, features).
    """

    logits: Tensor | None
    loss: Tensor | None
    hidden: Tensor


def rows_of(parametrization: Parametrization, stack: str) -> list[int]:
    """Indices of a stack's sublayers in the table."""
    return np.flatnonzero(parametrization.stack == STACKS.index(stack)).tolist()


def stack_names(architecture: Architecture) -> tuple[str, ...]:
    """The stacks of an architecture, in the order of the signal."""
    return STACKS if architecture.kind == "encoder-decoder" else (architecture.kind,)


def make_final_norm(parametrization: Parametrization, dtype: torch.dtype) -> nn.Module | None:
    """The norm after the last layer of a stack, or None."""
    a = parametrization.architecture
    h = parametrization.head
    return make_norm(a, h.final_norm_gain, dtype, h.final_norm_slope) if a.has_final_norm else None


def surroundings(
    architecture: Architecture,
    stream: Tensor,
    stack: str,
    *,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    memory: Tensor | None = None,
    memory_keep: Tensor | None = None,
    shaped: bool = False,
) -> Surroundings:
    """What the sublayers of a stack see besides their stream.

    Args:
        stream: the stream that enters the stack; its shape, type and device are read.
        keep: True at real tokens, (batch, tokens). A padding token sees itself: no row of scores may be empty.
        bias: added to the scores, (1, heads, tokens, tokens).
        memory, memory_keep: output of the encoder, and its real tokens.
        shaped: some attention of the stack is shaped, and asks where tokens stand.
    """
    causal = stack == "decoder"
    n = stream.shape[1]
    mask: Tensor | None = None
    if keep is not None or bias is not None:
        mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=stream.device)
        mask = mask.tril() if causal else mask
        if keep is not None:
            mask = mask & keep[:, None, None, :] | torch.eye(n, dtype=torch.bool, device=stream.device)
        if bias is not None:
            mask = bias.masked_fill(~mask, float("-inf"))
    rotation = None
    if architecture.positions == "rotary":
        rotation = rotation_table(architecture, n, device=stream.device, dtype=stream.dtype)
    return Surroundings(
        causal=causal,
        mask=mask,
        rotation=rotation,
        memory=memory,
        memory_mask=None if memory_keep is None else memory_keep[:, None, None, :],
        positions=Positions.of(keep) if shaped and keep is not None else None,
    )


class Stack(nn.Module):
    """Embeddings, sublayers and final norm of an encoder or a decoder."""

    def __init__(
        self,
        parametrization: Parametrization,
        name: str,
        seed: int,
        dtype: torch.dtype,
        token: nn.Embedding | None,
        shapes: Sequence[TorchShape | None],
    ) -> None:
        super().__init__()
        a = parametrization.architecture
        self.architecture = a
        self.name = name
        self.embedding = Embeddings(parametrization, name, seed, dtype, token)
        relative = a.positions == "relative"
        self.relative = RelativeBias(a.n_heads, name == "encoder", dtype) if relative else None
        rows = rows_of(parametrization, name)
        self.sublayers = nn.ModuleList(make_sublayer(parametrization, i, seed, dtype, shapes[i]) for i in rows)
        self.parallel = [bool(parametrization.parallel[i]) for i in rows]
        self.layer_inputs = None if a.layer_inputs is None else LayerInputs(parametrization, dtype)
        self.shaped = any(shapes[i] is not None for i in rows)
        if a.shared_norm:
            for before, sublayer in pairwise(self.sublayers):
                if sublayer.parallel:
                    sublayer.norm = before.norm
        self.final_norm = make_final_norm(parametrization, dtype)

    def forward(
        self,
        inputs: Tensor,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        memory: Tensor | None = None,
        memory_keep: Tensor | None = None,
    ) -> Tensor:
        """Ids, patches or frames -> the stream after the final norm, (batch, tokens, features)."""
        stream: Tensor = self.embedding(inputs, segments)
        around = surroundings(
            self.architecture,
            stream,
            self.name,
            keep=keep,
            bias=None if self.relative is None else self.relative(stream.shape[1]),
            memory=memory,
            memory_keep=memory_keep,
            shaped=self.shaped,
        )

        def one(row: int, read: Tensor, onto: Tensor | None) -> tuple[None, Tensor]:
            return None, self.sublayers[row](read, around, onto)

        start, enter = entered(self.architecture, stream), None
        if self.layer_inputs is not None:
            start, enter = self.layer_inputs.passage(start)
        last = through(range(len(self.parallel)), self.parallel, one, start, enter=enter)
        stream = left(self.architecture, last)
        return stream if self.final_norm is None else self.final_norm(stream)


class Transformer(nn.Module):
    """The network of a Parametrization: encoder, decoder, or both. Build it with `build`.

    Attributes:
        parametrization, seed: what it was built from.
        encoder, decoder: the stacks; None where the architecture has none.
        head: from the stream to logits; None for head `none`.
    """

    @typed
    def __init__(self, parametrization: Parametrization, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        a = parametrization.architecture
        self.parametrization = parametrization
        self.seed = seed
        self.encoder: Stack | None = None
        self.decoder: Stack | None = None
        token: nn.Embedding | None = None
        shapes = torch_shapes(parametrization)
        for name in stack_names(a):
            stack = Stack(parametrization, name, seed, dtype, token, shapes)
            token = stack.embedding.token
            setattr(self, name, stack)
        self.head = None if a.head == "none" else Head(parametrization, seed, dtype, token)
        self._one_answer = a.head == "classes"  # not read from the table in `forward`: torch.compile 2.6 trips over it

    def sublayers(self) -> list[Sublayer]:
        """All sublayers in the order of the table: the encoder's, then the decoder's."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        return [sublayer for stack in stacks for sublayer in stack.sublayers]  # type: ignore[misc]

    def signalprop_mapping(self) -> Mapping:
        """Where the signal runs, for `sp.measure`."""
        from signalprop.attachment.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap

        paths = [
            f"{stack.name}.sublayers.{i}"
            for stack in (self.encoder, self.decoder)
            if stack is not None
            for i in range(len(stack.sublayers))
        ]
        p = self.parametrization
        sublayers = []
        for i, (path, sublayer) in enumerate(zip(paths, self.sublayers(), strict=True)):
            function = sublayer.branch.function
            roles = [role for role in ROLES if getattr(function, role, None) is not None]
            on_branch = sublayer.placement == "res-post"
            attends = hasattr(function, "score_scale")
            sublayers.append(
                SublayerMap(
                    branch=f"{path}.branch",
                    norm=sublayer.branch.norm if on_branch else sublayer.norm,
                    post_norm=None if on_branch else sublayer.branch.norm,
                    reads=path,
                    writes=path,
                    weights={role: f"{path}.branch.function.{role}" for role in roles},
                    skip=sublayer.skip,
                    multiplier=sublayer.multiplier,
                    score_scale=getattr(function, "score_scale", None),
                    dropout=f"{path}.branch.dropout",
                    scaling=f"{path}.branch.function.score_scale" if attends else None,
                    norm_scale=sublayer.norm_scale,
                    stream_out=path,  # the output of a post-norm lacks its scale
                    value_skip=getattr(function, "value_skip", 0.0),
                    attention_gain=getattr(function, "attention_gain", 1.0),
                    shape=(float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])),
                )
            )
        layers: dict[tuple[int, int], tuple[str, ...]] = {}
        table = self.parametrization
        for path, number, layer in zip(paths, table.stack.tolist(), table.layer.tolist(), strict=True):
            layers[number, layer] = (*layers.get((number, layer), ()), path)
        last, first = self.decoder or self.encoder, self.encoder or self.decoder
        assert first is not None and last is not None
        e, d, head = first.embedding, last.embedding, self.head
        tokens = (e.class_token, e.distillation_token)
        return Mapping(
            architecture=p.architecture,
            sublayers=sublayers,
            shaping=p.shaping,
            final_norm=last.final_norm,
            encoder_final_norm=first.final_norm if first is not last else None,
            embedding=EmbeddingMap(
                e.patch or e.token or d.token,
                e.position_rms if e.position is None else e.position,
                e.segment,
                e.norm,
                e.scale,
                decoder_position=None if d is e or d.positions not in ADDED else d.position or d.position_rms,
                decoder_norm=None if d is e else d.norm,
                class_tokens=[token for token in tokens if token is not None],
                convolutions=[] if e.front is None else list(e.front.convolutions),
            ),
            head=HeadMap() if head is None else HeadMap(head.weight, head.scale, head.transform),
            arguments=batch_tensors,
            padding="keep",
            layers=list(layers.values()),
        )

    def forward(
        self,
        inputs: Tensor,
        *,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        decoder_tokens: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Output:
        """Run the network.

        Args:
            inputs: token ids (batch, tokens), patches (batch, patches, patch_dim) or frames (batch, frames, frame_dim).
            segments: segment ids, (batch, tokens); default: all 0.
            keep: True at real tokens, False at padding, (batch, tokens); default: all real.
            decoder_tokens: ids that the decoder of an encoder-decoder reads.
            targets: ids (batch, tokens), -1 at positions without loss; class ids (batch,) with a class head.

        Raises:
            InputError: an encoder-decoder without decoder_tokens, or more tokens than positions.
        """
        if self.encoder is not None and self.decoder is not None:
            if decoder_tokens is None:
                raise InputError("an encoder-decoder needs decoder_tokens, the ids that its decoder reads")
            memory = self.encoder(inputs, segments, keep)
            hidden = self.decoder(decoder_tokens, memory=memory, memory_keep=keep)
        else:
            only = self.encoder or self.decoder
            assert only is not None
            hidden = only(inputs, segments, keep)
        if self.head is None:
            return Output(None, None, hidden)
        if self._one_answer:
            hidden = answering(hidden, first=self.decoder is None, keep=None if self.encoder else keep)
        logits = self.head(hidden)
        loss = None
        if targets is not None:
            wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            loss = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=-1)
        return Output(logits, loss, hidden)


def refuse_sweep(parametrization: Parametrization) -> None:
    """Raise InputError for a table that describes many networks."""
    if parametrization.skip.ndim != 1:
        shape = parametrization.skip.shape[:-1]
        raise InputError(f"this parametrization is a sweep of shape {shape}; give one of its members")


@typed
def build(
    parametrization: Parametrization, *, seed: int | None = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    """The PyTorch network that a parametrization describes, with freshly drawn weights, in training mode.

    The same seed gives the same weights in every precision, and the same as `sp.simulate` draws
    layer by layer. Without a seed one is taken from PyTorch's global generator. Memory: all weights, on the CPU, as
    `dtype`.

    Raises:
        InputError: the parametrization is a sweep, or a cross-attention has a value skip.
    """
    refuse_sweep(parametrization)
    n = count_parameters(parametrization)["total"]
    check_fits(n * dtype.itemsize, f"a network of {n:,} parameters", "take fewer layers or a smaller d_model")
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ()))
    return Transformer(parametrization, seed, dtype)


def batch_tensors(batch: Batch) -> dict[str, Tensor | None]:
    """A batch as the arguments of `Transformer.forward`."""

    def ids(values: Any) -> Tensor | None:
        return None if values is None else torch.as_tensor(np.ascontiguousarray(values))

    return {
        "inputs": ids(batch.inputs),
        "segments": ids(batch.segments),
        "keep": ids(batch.keep),
        "decoder_tokens": ids(batch.decoder_tokens),
        "targets": ids(batch.targets),
    }
