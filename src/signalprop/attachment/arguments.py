"""From a Batch to the keyword arguments of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch, patches_of
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, IntArray
from signalprop.network.moments import FloatArray
from signalprop.streams.wrappers import without_adapters

TOKENS = "signalprop.tokens"  # a name that ids may have, whatever the model calls them
HELD = ("tokens", "targets", "keep", "segments", "decoder_tokens", "patches", "frames")  # what a Batch may hold


@dataclass(frozen=True)
class BatchArguments:
    """Makes the keyword arguments of a model's forward from a `signalprop.data.Batch`.

    Attributes:
        inputs: what a Batch holds (of HELD) -> the model's argument for it.
        architecture: of the model, whose words and images these are. dtype: of patches and frames.
        features_first: frames are (batch, features, frames). padding_id: what the model reads as padding. start: what
            a decoder begins with. others: arguments that are the same for every batch. tokens_first: ids are
            (tokens, batch).
    """

    inputs: Dictionary[str, str]
    architecture: Architecture
    dtype: torch.dtype = torch.float32
    features_first: bool = False
    padding_id: int | None = None
    start: int | None = None
    others: Dictionary[str, Any] = field(default_factory=dict)
    tokens_first: bool = False

    def __call__(self, batch: Batch) -> dict[str, Any]:
        batch = self.readable(batch)
        out: dict[str, Any] = dict(self.others)
        for name, argument in self.inputs.items():
            value = getattr(batch, name)
            if name == "patches":
                assert batch.patches is not None
                out[argument] = images(batch.patches, self.architecture).to(self.dtype)
            elif name == "frames":
                frames = torch.as_tensor(np.asarray(batch.frames), dtype=self.dtype)
                out[argument] = frames.transpose(1, 2).contiguous() if self.features_first else frames
            elif value is not None:
                ids = torch.as_tensor(np.ascontiguousarray(value, dtype=np.int64))
                ids = ids.clamp(min=0) if name == "targets" else ids  # which number its loss ignores, nobody says
                out[argument] = ids.T.contiguous() if self.tokens_first and ids.ndim == 2 else ids
        return out

    def numbers_in(self, given: Dictionary[str, Any]) -> FloatArray | None:
        """The patches or frames of a Batch, from the images or frames that the model is called with."""
        a = self.architecture
        values = given.get(a.input)
        if not isinstance(values, Tensor) or values.ndim != {"patches": 4, "frames": 3}[a.input]:
            return None
        numbers: FloatArray = values.detach().cpu().double().numpy()
        if a.input == "frames":
            return numbers.swapaxes(1, 2) if self.features_first else numbers
        side = math.isqrt(a.patch_dim // values.shape[1])
        square = values.shape[2] == values.shape[3] and side * side * values.shape[1] == a.patch_dim
        return patches_of(numbers, side) if square else None

    def readable(self, batch: Batch) -> Batch:
        """The batch with the model's padding id renamed, where it stands for a word, to the highest id not in it.

        The row of the padding id is zero (and RoBERTa gives it no position), so where a numbering of words uses that id
        for a word, the model would read a hole. The word is renamed among the targets, too.
        """
        if self.padding_id is None or batch.tokens is None:
            return batch
        places = {"tokens": True if batch.keep is None else batch.keep}
        if batch.decoder_tokens is not None:
            places["decoder_tokens"] = _after_start(batch.decoder_tokens, self.start)
        wrong = {name: (getattr(batch, name) == self.padding_id) & where for name, where in places.items()}
        if not any(found.any() for found in wrong.values()):
            return batch
        if batch.targets.ndim > 1:  # words, not classes
            wrong["targets"] = batch.targets == self.padding_id
        met = np.concatenate([getattr(batch, name).ravel() for name in wrong])
        unused = np.setdiff1d(np.arange(self.architecture.vocab_size), met)
        if not unused.size:
            return batch
        renamed = {name: np.where(found, unused[-1], getattr(batch, name)) for name, found in wrong.items()}
        return replace(batch, **renamed)


def batch_in(mapping: Mapping, arguments: Dictionary[str, Any], source: str = "inputs") -> Batch | None:
    """What a model is called with, as a Batch; None if it is not the tokens, images or frames that the mapping names.

    Targets are the labels among the arguments, else the tokens: of a causal model the next ones. Labels are at their
    token, so a causal model's are moved to the one before it, as transformers' losses do; those of an
    encoder-decoder stand where its decoder predicts them. Classes without labels are 0.
    """
    a, made = mapping.architecture, mapping.arguments
    inputs = made.inputs if isinstance(made, BatchArguments) else {"tokens": "input_ids"}
    given = {name: arguments.get(argument) for name, argument in inputs.items()}
    held: dict[str, Any] = {"source": source}
    if a.input == "tokens":
        given["tokens"] = arguments.get(TOKENS, given.get("tokens"))
    elif isinstance(made, BatchArguments) and (numbers := made.numbers_in(given)) is not None:
        held |= {a.input: numbers, "tokens": None}
    else:
        return None
    stacks = [
        *(["tokens"] if a.input == "tokens" else []),
        *(["decoder_tokens"] if a.kind == "encoder-decoder" else []),
    ]
    read: list[Any] = [given.get(name) for name in stacks]
    if not all(isinstance(one, Tensor) and one.ndim == 2 and not one.is_floating_point() for one in read):
        return None
    read += [arguments.get(mapping.padding), arguments.get("labels")]
    if mapping.reads_tokens_first:
        read = [x.T if isinstance(x, Tensor) and x.ndim == 2 else x for x in read]
    *ids, mask, labels = read
    keep = None
    if a.input == "tokens" and isinstance(mask, Tensor) and mask.shape == ids[0].shape:
        keep = held["keep"] = (mask != 0).cpu().numpy()
    words = [one.cpu().numpy().astype(np.int64) for one in ids]
    held |= dict(zip(stacks, words, strict=True))
    if a.head == "classes" or not words:
        has_classes = isinstance(labels, Tensor) and labels.ndim == 1
        n = len(held[a.input])
        return Batch(targets=labels.cpu().numpy() if has_classes else np.zeros(n, int), **held)
    labelled = isinstance(labels, Tensor) and labels.shape == ids[-1].shape
    targets = labels.cpu().numpy() if isinstance(labels, Tensor) and labelled else words[-1]
    targets = np.where((targets >= 0) & (True if keep is None or len(ids) > 1 else keep), targets, -1)
    if a.causal or (a.kind == "encoder-decoder" and not labelled):
        targets = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], 1)
    return Batch(targets=targets, **held)


def statistics_in(mapping: Mapping, inputs: Any, arguments: Dictionary[str, Any] | None) -> InputStatistics | None:
    """Statistics of what a model is given, as far as they are known: of inputs= and arguments computed from them."""
    if isinstance(inputs, InputStatistics):
        return inputs
    batch = inputs if isinstance(inputs, Batch) else None if arguments is None else batch_in(mapping, arguments)
    return None if batch is None else batch.statistics(mapping.architecture)


def read_by(arguments: Any, batch: Any) -> Any:
    """The batch as a model with these arguments reads it (`BatchArguments.readable`); of other kinds, as it is."""
    return arguments.readable(batch) if isinstance(arguments, BatchArguments) and isinstance(batch, Batch) else batch


def batch_arguments(
    model: nn.Module,
    architecture: Architecture,
    inputs: Dictionary[str, str],
    token: Any = None,
    *,
    features_first: bool = False,
) -> BatchArguments:
    """Those of a live model.

    Args:
        inputs: what a Batch holds (of HELD) -> the model's argument for it. token: the module of its token table.
    """
    config: Any = getattr(model, "config", None)
    return BatchArguments(
        inputs,
        architecture,
        dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32),
        features_first=features_first,
        padding_id=_padding_id(config, token),
        start=getattr(config, "decoder_start_token_id", None),
    )


def _padding_id(config: Any, token: Any) -> int | None:
    """The id that the model reads as padding: of its table, else of its configuration, where it means nothing else."""
    own = getattr(without_adapters(token), "padding_idx", None)
    if own is not None:
        return int(own)
    named = getattr(config, "pad_token_id", None)
    others = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "sep", "decoder_start")]
    used = {i for found in others for i in (found if isinstance(found, list) else [found])}
    return named if isinstance(named, int) and named >= 0 and named not in used else None


def _after_start(ids: IntArray, start: int | None) -> NDArray[np.bool_]:
    """Where words stand in what a decoder reads: not at a first position that holds its start token."""
    words = np.ones(ids.shape, np.bool_)
    words[:, 0] = start is None or not (ids[:, 0] == start).all()
    return words


def images(patches: Any, a: Architecture) -> Tensor:
    """Patches (batch, n, channels * side * side) as images (batch, channels, height, width) of a square grid."""
    n, width = patches.shape[1], patches.shape[2]
    grid = round(n**0.5)
    channels = 3 if width % 3 == 0 and round((width // 3) ** 0.5) ** 2 * 3 == width else 1
    side = round((width // channels) ** 0.5)
    if grid * grid != n or channels * side * side != width or n + a.n_class_tokens != a.seq_len:
        raise InputError(f"{n} patches of {width} numbers are not a square image for a model of {a.seq_len} tokens")
    blocks = torch.as_tensor(patches).reshape(-1, grid, grid, channels, side, side)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, grid * side, grid * side)
