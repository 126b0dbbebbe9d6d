"""The signal of every layer of a trained model, streamed over real data: forward, backward, and inside attention.

One pass without gradients over all batches, reduced as it goes; one with gradients over the first few sequences, one at
a time. Nothing of the size (tokens x features) is stored beyond the layer that is running.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import number as multiplier_of
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.data.batches import Batch
from signalprop.diagnosis.heads import HeadSums, Watch
from signalprop.diagnosis.layers import Progress, first_sequences, groups, run
from signalprop.diagnosis.loss_scale import GradientExponents
from signalprop.diagnosis.result import LayerSignal, Number, number
from signalprop.measurement.losses import lent_gradients, loss_of
from signalprop.measurement.measuring import arguments_of
from signalprop.measurement.result import factor_of, site_of, tables
from signalprop.network.moments import FloatArray
from signalprop.streams.live_model import weights_here
from signalprop.streams.proof import gain_and_bias
from signalprop.watching.first_positions import Positions, Streams, check_length
from signalprop.watching.recording import Recorder
from signalprop.watching.reduction import Padding, collect, moments

# Tokens whose kernel's eigenvalues are taken: the work grows with their cube.
_RANK_TOKENS = 512


@dataclass
class Point:
    """Sums over the tokens of one stream; over those that are left out, `first_...`."""

    tokens: float = 0.0
    variance: float = 0.0  # sum over tokens of the variance over features
    squares: float = 0.0  # sum over tokens of the mean square over features
    largest: float = 0.0
    first_tokens: float = 0.0
    first_variance: float = 0.0
    first_largest: float = 0.0
    correlation: float = 0.0  # weighted by tokens
    finite: bool = True

    def see(self, x: Tensor, keep: Tensor, first: Tensor) -> None:
        """One batch of it, (batch, tokens, features)."""
        wide = x.detach().float()
        variance, squares, largest = wide.var(-1, correction=0), wide.square().mean(-1), wide.abs().amax(-1)
        real = keep | first
        if not bool(torch.isfinite(largest[real]).all()):
            self.finite = False
            return
        if bool(keep.any()):
            n = float(keep.sum())
            self.tokens += n
            self.variance += float(variance[keep].sum(dtype=torch.float64))
            self.squares += float(squares[keep].sum(dtype=torch.float64))
            self.largest = max(self.largest, float(largest[keep].max()))
            self.correlation += n * float(collect([moments(x.detach(), Padding.of(keep))])[0, 2])
        if bool(first.any()):
            self.first_tokens += float(first.sum())
            self.first_variance += float(variance[first].sum(dtype=torch.float64))
            self.first_largest = max(self.first_largest, float(largest[first].max()))

    def mean(self) -> Number:
        """The variance over features of a token, mean over tokens."""
        return number(self.variance / self.tokens) if self.tokens and self.finite else None


class _Observer(Streams):
    """Hooks on every stream, branch, norm and attention of a model."""

    def __init__(self, attached: Anatomy, skip_first: int) -> None:
        super().__init__(attached, skip_first, self._look)
        self.attached, self.mapping, self.places = attached, attached.mapping, attached.plan
        self.points: defaultdict[int, Point] = defaultdict(Point)
        self.sums: defaultdict[int, Point] = defaultdict(Point)  # of post-norm rows: stream and branch together
        self.watch = Watch(attached, self)
        self.factors: defaultdict[int, list[float]] = defaultdict(list)
        self.cosines: dict[int, tuple[float, int]] = {}  # sum over tokens, tokens
        self.ranks: dict[int, float] = {}
        self.layers = groups(attached.layout)
        self._norm_inputs: dict[int, Tensor] = {}
        self._entering: dict[int, Tensor] = {}
        places = self.places
        self._post = {places.branch[i]: i for i, row in enumerate(attached.rows) if row.placement == "post"}
        self._enter = {places.stream_in[i] for i in self._post.values()}
        self._stream: Tensor | None = None  # what entered the post-norm row that is running
        self._ends = {places.stream_out[layer[-1]]: k for k, layer in enumerate(self.layers)}
        self._starts = {places.stream_in[layer[0]]: k for k, layer in enumerate(self.layers)}
        self.inside: defaultdict[int, float] = defaultdict(float)  # largest |entry| that a branch's last map reads
        for i, row in enumerate(attached.rows):
            self._on_norm(i, row)
            last = row.weights.get("down") or row.weights.get("output")
            if last is not None and not last.problem and isinstance(last.found, nn.Module):
                self.hooks.reads(last.found, partial(self._reads, i))

    def _reads(self, row: int, x: Tensor | None) -> None:
        if x is not None and x.numel():
            self.inside[row] = max(self.inside[row], float(x.detach().abs().amax()))

    def _look(self, index: int, x: Tensor, keep: Tensor, first: Tensor) -> None:
        self.points[index].see(x, keep, first)
        row = self._post.get(index)
        if row is not None and self._stream is not None:
            item = self.attached.rows[row]
            made = multiplier_of(item.skip) * item.units[0] * self._stream.float()
            made += multiplier_of(item.multiplier) * item.units[1] * x
            self.sums[row].see(made, keep, first)
        if index in self._enter:
            self._stream = x
        if index in self._ends:
            self._layer_ends(self._ends[index], x, keep)
        if index in self._starts:
            self._entering[self._starts[index]] = x

    def _layer_ends(self, k: int, x: Tensor, keep: Tensor) -> None:
        before = self._entering.pop(k, None)
        if before is None or not self.points[self.places.stream_out[self.layers[k][-1]]].finite or not bool(keep.any()):
            return
        items = self.attached.rows
        entered = items[self.layers[k][0]].units[0] * before[keep].float()
        added = items[self.layers[k][-1]].units[2] * x[keep].float() - entered
        cosine = F.cosine_similarity(added, entered, -1)
        total, tokens = self.cosines.get(k, (0.0, 0))
        self.cosines[k] = (total + float(cosine.sum(dtype=torch.float64)), tokens + len(cosine))
        if k not in self.ranks:
            self.ranks[k] = effective_rank(x[0][keep[0]][:_RANK_TOKENS])

    def _on_norm(self, index: int, row: AttachedRow) -> None:
        """What a branch reads against what its norm should give."""
        norm, reader = row.norm, next(iter(row.readers), None)
        if norm is None or not isinstance(reader, nn.Module) or row.placement not in ("pre", "sandwich"):
            return

        def enters(x: Tensor | None) -> None:
            if x is not None:
                self._norm_inputs[index] = x.detach()

        def read(y: Tensor | None) -> None:
            x = self._norm_inputs.pop(index, None)
            if x is not None and y is not None and y.numel() == x.numel():
                with weights_here(norm):
                    expected = self._normed(norm, x).flatten()
                size = float(expected.square().sum())
                if math.isfinite(size) and size > 0:
                    factor = float(y.detach().float().flatten() @ expected) / size
                    self.factors[index].append(factor)

        self.hooks.reads(norm, enters)
        self.hooks.reads(reader, read)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The output of a norm of the architecture's kind with the weights of the module."""
        a = self.mapping.architecture
        wide, n = x.float(), x.shape[-1]
        weight, bias = gain_and_bias(norm)
        gain = torch.ones(n, device=x.device) if weight is None else weight.detach().float() + self.mapping.gain_offset
        eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) or a.norm_eps)
        if a.norm == "rmsnorm":
            return F.rms_norm(wide, (n,), gain, eps)
        return F.layer_norm(wide, (n,), gain, None if bias is None else bias.detach().float(), eps)


def observe(
    attached: Anatomy,
    batches: Sequence[Batch | dict[str, Any]],
    *,
    skip_first: int = 4,
    gradient_sequences: int = 4,
    exponents: GradientExponents | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[LayerSignal, ...], tuple[int, int]]:
    """The signal at every layer, mean over all batches; how many sequences, and tokens of one, the last stack read.

    Args:
        attached: a model, in evaluation mode as usual; it is left in the mode it is in.
        skip_first: positions of every sequence that averages leave out.
        gradient_sequences: how many of the first sequences are also run backward, one at a time (0, or a model without
            a loss: none). exponents: which count the gradients of these passes, parameters' too.
        progress: called with (batches and sequences run backward, all of them).
    """
    model, mapping = attached.model, attached.mapping
    held = first_sequences(batches, max(gradient_sequences, 1))
    if not gradient_sequences or mapping.architecture.head == "none":
        held = []

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, len(batches) + len(held))

    seen = _Observer(attached, skip_first)
    with seen, torch.no_grad():
        for k, batch in enumerate(batches):
            arguments = arguments_of(attached, batch)
            seen.begin(arguments)
            run(model, arguments)
            shapes = dict(seen.shape)
            if not k:
                check_length(min((n for _, n in shapes.values()), default=0), skip_first)
            tell(k + 1)
    gradients = None
    if held and all(point.finite for point in seen.points.values()):
        lengths = {stack: n for stack, (_, n) in shapes.items()}
        gradients = _gradients(attached, held, skip_first, lengths, exponents, lambda k: tell(len(batches) + k))
    return tuple(_layer(seen, k, gradients) for k in range(len(seen.layers))), next(reversed(shapes.values()))


def _layer(seen: _Observer, k: int, gradients: FloatArray | None) -> LayerSignal:
    rows, held, places = seen.layers[k], seen.attached.rows, seen.places
    kinds = [row.kind for row in held]
    enter, leave = seen.points[places.stream_in[rows[0]]], seen.points[places.stream_out[rows[-1]]]
    unit_in, unit_out = held[rows[0]].units[0] ** 2, held[rows[-1]].units[2] ** 2
    tokens, first = leave.tokens, leave.first_tokens
    attention = next((i for i in rows if kinds[i].attends_itself), -1)
    heads = seen.watch.seen.get(attention, HeadSums())
    scale = math.sqrt(leave.squares / tokens) if tokens else 0.0
    added, n = seen.cosines.get(k, (0.0, 0.0))
    return LayerSignal(
        layer=k,
        stack=seen.attached.rows[rows[0]].stack,
        finite=leave.finite,
        variance_in=_times(enter.mean(), unit_in),
        variance=_times(leave.mean(), unit_out),
        first_variance=number(unit_out * leave.first_variance / first) if first and leave.finite else None,
        token_correlation=number(leave.correlation / tokens) if tokens and leave.finite else None,
        effective_rank=seen.ranks.get(k),
        attention_share=_share(seen, [i for i in rows if kinds[i].attends]),
        feed_forward_share=_share(seen, [i for i in rows if not kinds[i].attends]),
        alignment=number(added / n) if n else None,
        gradient=None if gradients is None else number(float(gradients[rows[-1]])),
        largest=_largest(seen, rows),
        outlier=number(leave.largest / scale) if scale else None,
        first_outlier=number(leave.first_largest / scale) if scale and first else None,
        **heads.told(),
        head_share=heads.shares(seen.attached.rows[attention]) if attention >= 0 else (),
        norm_factor=tuple(number(float(np.mean(seen.factors[i]))) if i in seen.factors else None for i in rows),
    )


def _largest(seen: _Observer, rows: Sequence[int]) -> Number:
    """The largest |entry| of the streams, of what branches output, and of what their last maps read."""
    places = seen.places
    at = {at for i in rows for at in (places.stream_in[i], places.branch[i], places.stream_out[i]) if at in seen.points}
    points = [seen.points[i] for i in at]
    if not all(point.finite for point in points):
        return None
    return number(max(*(x for p in points for x in (p.largest, p.first_largest)), *(seen.inside[i] for i in rows)))


def _times(value: Number, factor: float) -> Number:
    return None if value is None else number(value * factor)


def _share(seen: _Observer, rows: Sequence[int]) -> Number:
    """Variance that branches add over that of the streams they make, before a norm there; summed over the branches."""
    total = 0.0
    for i in rows:
        item, places = seen.attached.rows[i], seen.places
        parallel = places.stream_out[i] < 0
        if i in seen.sums:
            made = seen.sums[i].mean()
        else:
            leave = seen.points[places.stream_out[i + parallel]].mean()
            made = _times(leave, seen.attached.rows[i + parallel].units[2] ** 2)
        branch = seen.points[places.branch[i]].mean()
        if branch is None or not made:
            return None
        total += branch * (item.units[1] * multiplier_of(item.multiplier)) ** 2 / made
    return number(total)


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the eigenvalues of the normalised kernel of tokens (n, features); 1: all are equal."""
    unit = F.normalize(x.double(), dim=-1)
    values = torch.linalg.svdvals(unit) ** 2
    share = values / values.sum()
    share = share[share > 0]
    return float(torch.exp(-(share * share.log()).sum())) if len(share) else 0.0


def _gradients(
    attached: Anatomy,
    held: Sequence[Batch],
    skip_first: int,
    lengths: dict[int, int],
    exponents: GradientExponents | None,
    progress: Callable[[int], None],
) -> FloatArray | None:
    """Gradient variance at stream_out of every sublayer, relative to the last one's; None where that is 0 or NaN."""
    model, mapping, places = attached.model, attached.mapping, attached.plan
    if mapping.architecture.head == "classes":  # which reads the first position
        skip_first = 0
    found: list[list[float]] = []
    device = next(model.parameters()).device
    everything = exponents is not None  # or no gradient comes down to the model's input
    todo = list(held)
    while todo:
        batch = todo[0]
        arguments = arguments_of(attached, batch)
        positions = Positions(mapping, arguments, skip_first)
        counted: dict[int, Tensor | None] = {
            stack: positions.of(stack, (1, n), device)[0] for stack, n in lengths.items()
        }
        recorder = Recorder(attached, backward=True, padding=counted)
        try:
            recorder.attach()
            counting = nullcontext() if exponents is None else exponents.watching()
            with torch.inference_mode(False), torch.enable_grad(), _lent(attached, everything=everything), counting:
                loss = loss_of(model(**arguments), batch, None)
                if not loss.requires_grad and not everything:
                    everything = True
                    continue
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            recorder.detach()
        todo = todo[1:]
        _, gradient = tables(recorder)
        row = []
        for i in range(len(places.stream_out)):
            site = site_of(recorder, "stream_out", i, gradient=True)
            factor = factor_of(recorder, "stream_out", i, gradient=True)
            row.append(gradient[site][1] * factor * factor if site in gradient else 0.0 if everything else math.nan)
        found.append(row)
        progress(len(found))
    mean = np.mean(np.array(found), axis=0)
    last = mean[-1]
    return np.asarray(mean / last) if math.isfinite(last) and last > 0 else None


@contextmanager
def _lent(attached: Anatomy, *, everything: bool) -> Iterator[None]:
    """Gradients flow down to the model's input, and of all parameters only those there are given one.

    Args:
        everything: or all are.
    """
    model, e = attached.model, attached.ends
    ends = (e.token, e.position, e.decoder_position, *e.class_tokens, *e.convolutions)
    found = [end.holder for end in ends if isinstance(end, Held)]
    entry = {id(p) for end in found for p in (end.parameters() if isinstance(end, nn.Module) else [end])}
    with lent_gradients(model):
        for p in model.parameters() if entry else ():
            p.requires_grad_((everything or id(p) in entry) and p.is_floating_point())
        yield
