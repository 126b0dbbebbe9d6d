"""The signal of every layer of a trained model, streamed over real data: forward, backward, and inside attention.

One pass without gradients over all batches, reduced as it goes; one with gradients over the first few. Nothing of the
size (tokens x features) is kept beyond the layer that is running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.data import Batch
from signalprop.diagnose.result import LayerSignal, Number, Numbers, number
from signalprop.errors import InputError
from signalprop.layout import KINDS, PLACEMENTS, STACKS
from signalprop.moments import FloatArray
from signalprop.probes.mapping import Mapping, Plan, find_any, plan, reading_maps, split
from signalprop.probes.mapping import number as multiplier_of
from signalprop.probes.measuring import arguments_of, lent_gradients, loss_of
from signalprop.probes.recording import Recorder, first_tensor, uncompiled
from signalprop.probes.reduction import Padding, collect, moments
from signalprop.probes.result import tables

Progress = Callable[[int, int], None]
# Tokens whose kernel's eigenvalues are taken: the work grows with their cube.
_RANK_TOKENS = 512
_ATTENTION, _FEED_FORWARD = KINDS.index("attention"), KINDS.index("feed_forward")


def positions(model_keep: Tensor | None, shape: tuple[int, int], skip_first: int, device: torch.device) -> Tensor:
    """Which positions count, (batch, tokens): real ones, without the first `skip_first` real ones of a sequence."""
    keep = torch.ones(shape, dtype=torch.bool, device=device) if model_keep is None else model_keep != 0
    return keep & (keep.cumsum(1) > skip_first)


@dataclass
class _Point:
    """Sums over the tokens of one stream; float64, on the host."""

    tokens: float = 0.0
    variance: float = 0.0  # sum over tokens of the variance over features
    largest: float = 0.0
    first_tokens: float = 0.0
    first_variance: float = 0.0
    first_largest: float = 0.0
    correlation: float = 0.0  # weighted by tokens
    finite: bool = True

    def see(self, x: Tensor, keep: Tensor) -> None:
        wide = x.detach().float()
        if not bool(torch.isfinite(wide).all()):
            self.finite = False
            return
        variance = wide.var(-1, correction=0).double()
        largest = wide.abs().amax(-1)
        n = float(keep.sum())
        if n:
            self.tokens += n
            self.variance += float(variance[keep].sum())
            self.largest = max(self.largest, float(largest[keep].max()))
            self.correlation += n * float(collect([moments(x.detach(), Padding.of(keep))])[0, 2])
        first = ~keep
        if bool(first.any()):
            self.first_tokens += float(first.sum())
            self.first_variance += float(variance[first].sum())
            self.first_largest = max(self.first_largest, float(largest[first].max()))

    def mean(self) -> Number:
        return self.variance / self.tokens if self.tokens and self.finite else None


@dataclass
class _Attention:
    """Sums over the rows of one attention, per head."""

    rows: float = 0.0
    score_variance: FloatArray = field(default_factory=lambda: np.zeros(0))
    entropy: FloatArray = field(default_factory=lambda: np.zeros(0))
    outputs: Tensor | None = None  # (heads, d_head, d_head): second moments of A V


class _Watch(TorchFunctionMode):
    """Sees every scaled_dot_product_attention: its scores and what its heads give out, of the row that is running."""

    def __init__(self, skip_first: int) -> None:
        super().__init__()
        self.row: int | None = None
        self.skip_first = skip_first
        self.seen: dict[int, _Attention] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self.row is not None:
            row, self.row = self.row, None  # what follows is no attention of the model
            self._see(row, out, *args, **kwargs)
            self.row = row
        return out

    def _see(
        self,
        row: int,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        batch, heads, n, d_head = query.shape
        sums = self.seen.setdefault(row, _Attention())
        if sums.rows == 0:
            sums.score_variance, sums.entropy = np.zeros(heads), np.zeros(heads)
            sums.outputs = torch.zeros(heads, out.shape[-1], out.shape[-1], dtype=torch.float64)
        for b in range(batch):  # one sequence at a time: heads x tokens x tokens is what memory has to hold
            q, k = query[b].float(), key[b].float()
            if k.shape[0] != heads:
                k = k.repeat_interleave(heads // k.shape[0], 0)
            scores = q @ k.transpose(1, 2) * (1 / math.sqrt(d_head) if scale is None else scale)
            seen = torch.ones(n, k.shape[1], dtype=torch.bool, device=q.device)
            if is_causal:
                seen = seen.tril()
            if attn_mask is not None:
                mask = attn_mask[b % attn_mask.shape[0]] if attn_mask.ndim == 4 else attn_mask
                if mask.dtype == torch.bool:
                    seen = seen & mask
                else:
                    scores = scores + mask
                    seen = seen & (mask > -1e4)
            seen = seen.expand_as(scores)
            counts = seen.sum(-1)  # (heads, rows)
            rows = counts > 1
            rows[:, : self.skip_first] = False
            if not bool(rows.any()):
                continue
            hidden = scores.masked_fill(~seen, 0.0)
            mean = hidden.sum(-1) / counts.clamp(min=1)
            spread = ((hidden - mean[..., None]) ** 2 * seen).sum(-1) / counts.clamp(min=1)
            log_weights = torch.log_softmax(scores.masked_fill(~seen, float("-inf")), -1)
            entropy = -(log_weights.exp() * log_weights.masked_fill(~seen, 0.0)).sum(-1)
            entropy = entropy / counts.clamp(min=2).log()
            sums.rows += float(rows[0].sum())
            sums.score_variance += (spread * rows).sum(-1).double().cpu().numpy()
            sums.entropy += (entropy * rows).sum(-1).double().cpu().numpy()
            given = out[b, :, self.skip_first :].double()
            assert sums.outputs is not None
            sums.outputs += (given.transpose(1, 2) @ given).cpu()


class _Observer:
    """Hooks on every stream, branch, norm and attention of a model."""

    def __init__(self, model: nn.Module, mapping: Mapping, places: Plan, skip_first: int) -> None:
        self.model, self.mapping, self.places = model, mapping, places
        self.skip_first = skip_first
        self.points: dict[int, _Point] = {}
        self.watch = _Watch(skip_first)
        self.factors: dict[int, list[float]] = {}
        self.alignment: dict[int, list[float]] = {}
        self.ranks: dict[int, float] = {}
        self.keep: dict[int, Tensor] = {}
        self.given: Tensor | None = None
        self._norm_inputs: dict[int, Tensor] = {}
        self._entering: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        rows = places.layout
        starts = np.flatnonzero(np.diff(rows.layer, prepend=-1) | np.diff(rows.stack, prepend=-1)).tolist()
        self.layers = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(rows.kind)], strict=True)]
        self._ends = {places.stream_out[layer[-1]]: k for k, layer in enumerate(self.layers)}
        self._starts = {places.stream_in[layer[0]]: k for k, layer in enumerate(self.layers)}

    def __enter__(self) -> _Observer:
        try:
            for index, site in enumerate(self.places.sites):
                if site.calls > 1:
                    raise InputError("diagnose cannot tell apart the calls of a module that runs several times a pass")
                if site.side == "input":
                    self._handles.append(
                        site.module.register_forward_pre_hook(self._entry(index), with_kwargs=True, prepend=True)
                    )
                else:
                    self._handles.append(site.module.register_forward_hook(self._exit(index)))
            for i, item in enumerate(self.mapping.sublayers):
                self._on_reader(i, item)
                if self.places.layout.kind[i] == _ATTENTION:
                    self._on_attention(i, item)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, given: Tensor | None) -> None:
        """A new batch, with its padding mask."""
        self.given = given
        self.keep.clear()

    def _entry(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._see(index, first_tensor(args) if args else first_tensor(kwargs.values()))

        return hook

    def _exit(self, index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._see(index, output if isinstance(output, Tensor) else first_tensor(output))

        return hook

    def _see(self, index: int, x: Tensor | None) -> None:
        if x is None or x.ndim != 3:
            return
        stack = self.places.sites[index].stack
        if stack not in self.keep:
            fits = self.given is not None and self.given.shape == x.shape[:2]
            self.keep[stack] = positions(
                self.given if fits else None, (x.shape[0], x.shape[1]), self.skip_first, x.device
            )
        keep = self.keep[stack]
        self.points.setdefault(index, _Point()).see(x, keep)
        if index in self._ends:
            self._layer_ends(self._ends[index], index, x.detach(), keep)
        if index in self._starts:
            self._entering[self._starts[index]] = x.detach()

    def _layer_ends(self, k: int, index: int, x: Tensor, keep: Tensor) -> None:
        before = self._entering.pop(k, None)
        if before is None or not self.points[index].finite:
            return
        unit_in, _, unit_out = self.mapping.sublayers[self.layers[k][0]].units[0], 1.0, 1.0
        unit_out = self.mapping.sublayers[self.layers[k][-1]].units[2]
        added = (unit_out * x - unit_in * before).float()
        cosine = F.cosine_similarity(added, before.float(), -1)[keep]
        self.alignment.setdefault(k, []).append(float(cosine.mean()) if cosine.numel() else math.nan)
        if k not in self.ranks:
            self.ranks[k] = effective_rank(x[0][keep[0]][:_RANK_TOKENS])

    def _on_reader(self, i: int, item: Any) -> None:
        """What the branch reads against what its norm should give."""
        if PLACEMENTS[self.places.layout.placement[i]] not in ("pre", "sandwich") or item.norm is None:
            return
        norm = find_any(self.model, item.norm, "norm")
        readers = reading_maps(self.model, item, cross=bool(self.places.layout.kind[i] == 1))
        if not readers or not isinstance(readers[0], nn.Module) or getattr(norm, "weight", None) is None:
            return

        def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_tensor(args) if args else first_tensor(kwargs.values())
            if x is not None:
                self._norm_inputs[i] = x.detach()

        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            got = first_tensor(args) if args else first_tensor(kwargs.values())
            x = self._norm_inputs.pop(i, None)
            if x is None or got is None or got.shape[-1] != x.shape[-1] or got.numel() != x.numel():
                return
            expected = self._normed(norm, x).reshape(-1, x.shape[-1])
            y = got.detach().float().reshape(-1, x.shape[-1])
            norm2 = float((expected * expected).sum())
            if math.isfinite(norm2) and norm2 > 0:
                self.factors.setdefault(i, []).append(float((y * expected).sum()) / norm2)

        self._handles.append(norm.register_forward_pre_hook(enters, with_kwargs=True))
        self._handles.append(readers[0].register_forward_pre_hook(read, with_kwargs=True))

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        a = self.mapping.architecture
        wide, weight = x.float(), norm.weight.detach().float() + self.mapping.gain_offset  # type: ignore[operator]
        eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", a.norm_eps)) or a.norm_eps)
        if a.norm == "rmsnorm":
            return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        bias = getattr(norm, "bias", None)
        return F.layer_norm(wide, (x.shape[-1],), weight, None if bias is None else bias.detach().float(), eps)

    def _on_attention(self, i: int, item: Any) -> None:
        """Attention functions run between their query map and their output map."""
        query, output = (split(item.weights.get(role))[0] for role in ("query", "output"))
        query, output = (find_any(self.model, ref, "attention") for ref in (query, output))
        if not (isinstance(query, nn.Module) and isinstance(output, nn.Module)):
            return

        def starts(*_: Any) -> None:
            self.watch.row = i

        def ends(*_: Any) -> None:
            self.watch.row = None

        self._handles.append(query.register_forward_pre_hook(starts))
        self._handles.append(output.register_forward_pre_hook(ends))


def observe(
    model: nn.Module,
    batches: Iterable[Batch],
    mapping: Mapping,
    *,
    skip_first: int = 4,
    gradient_batches: int = 2,
    progress: Progress | None = None,
    total: int = 0,
) -> tuple[LayerSignal, ...]:
    """The signal at every layer, mean over all batches.

    Args:
        model: in evaluation mode is usual; it is left in the mode it is in. mapping: where its signal runs.
        skip_first: positions of every sequence that averages leave out.
        gradient_batches: how many of the first batches are also run backward (0, or a model without a loss: none).
        progress: called with (batches done, total).

    Raises:
        InputError: the batches do not fit the model, or there are none.
    """
    places = plan(model, mapping)
    held: list[Batch] = []
    done = 0
    with _Observer(model, mapping, places, skip_first) as seen, ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        stack.enter_context(torch.no_grad())
        for batch in batches:
            arguments = arguments_of(model, mapping, batch)
            seen.begin(_padding(mapping, arguments))
            with seen.watch:
                model(**arguments)
            if len(held) < gradient_batches:
                held.append(batch)
            done += 1
            if progress is not None:
                progress(done, max(total, done))
    if not done:
        raise InputError("there is no data to run the model on: not one sequence of the asked length")
    finite = all(point.finite for point in seen.points.values())
    gradients = _gradients(model, held, mapping, places, skip_first) if finite and held else None
    return tuple(_layer(seen, k, gradients) for k in range(len(seen.layers)))


def _padding(mapping: Mapping, arguments: dict[str, Any]) -> Tensor | None:
    mask = arguments.get(mapping.padding)
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _layer(seen: _Observer, k: int, gradients: FloatArray | None) -> LayerSignal:
    rows, mapping, places = seen.layers[k], seen.mapping, seen.places
    table = places.layout
    points = seen.points
    enter, leave = points.get(places.stream_in[rows[0]], _Point()), points.get(places.stream_out[rows[-1]], _Point())
    unit_in, unit_out = mapping.sublayers[rows[0]].units[0] ** 2, mapping.sublayers[rows[-1]].units[2] ** 2
    variance = _times(leave.mean(), unit_out)

    def share(kind: int) -> Number:
        total = 0.0
        for i in rows:
            if (table.kind[i] == _FEED_FORWARD) == (kind == _FEED_FORWARD):
                branch = points.get(places.branch[i], _Point()).mean()
                if branch is None or not variance:
                    return None
                item = mapping.sublayers[i]
                total += branch * (item.units[1] * multiplier_of(item.multiplier)) ** 2 / variance
        return total

    attention = next((i for i in rows if table.kind[i] == _ATTENTION), None)
    heads = _heads(seen, attention)
    root = math.sqrt(leave.variance / leave.tokens) if leave.tokens and leave.variance > 0 else None
    return LayerSignal(
        layer=k,
        stack=STACKS[table.stack[rows[0]]],
        finite=leave.finite,
        variance_in=_times(enter.mean(), unit_in),
        variance=variance,
        first_variance=number(unit_out * leave.first_variance / leave.first_tokens) if leave.first_tokens else None,
        token_correlation=number(leave.correlation / leave.tokens) if leave.tokens and leave.finite else None,
        effective_rank=seen.ranks.get(k),
        attention_share=share(_ATTENTION),
        feed_forward_share=share(_FEED_FORWARD),
        alignment=number(float(np.mean(seen.alignment[k]))) if k in seen.alignment else None,
        gradient=None if gradients is None else number(float(gradients[rows[-1]])),
        outlier=leave.largest / root if root else None,
        first_outlier=leave.first_largest / root if root and leave.first_tokens else None,
        score_std=heads[0],
        entropy=heads[1],
        head_share=heads[2],
        norm_factor=tuple(number(float(np.mean(seen.factors[i]))) if i in seen.factors else None for i in rows),
    )


def _times(value: Number, factor: float) -> Number:
    return None if value is None else number(value * factor)


def _heads(seen: _Observer, i: int | None) -> tuple[Numbers, Numbers, Numbers]:
    """(score standard deviation, relative entropy, share of the output's variance), per head."""
    sums = None if i is None else seen.watch.seen.get(i)
    if i is None or sums is None or sums.rows == 0 or sums.outputs is None:
        return (), (), ()
    stds = tuple(number(math.sqrt(max(v, 0.0) / sums.rows)) for v in sums.score_variance)
    entropies = tuple(number(float(v) / sums.rows) for v in sums.entropy)
    return stds, entropies, _head_shares(seen, i, sums.outputs)


def _head_shares(seen: _Observer, i: int, outputs: Tensor) -> Numbers:
    reference, rows = split(seen.mapping.sublayers[i].weights.get("output"))
    owner = find_any(seen.model, reference, "output")
    weight = getattr(owner, "weight", owner)
    if rows is not None or not isinstance(weight, Tensor):
        return ()
    heads, d_head = outputs.shape[0], outputs.shape[1]
    w = weight.detach().double().cpu()
    if w.shape[1] != heads * d_head or type(owner).__name__ == "Conv1D":
        w = w.T
    if w.shape[1] != heads * d_head:
        return ()
    parts = w.reshape(w.shape[0], heads, d_head).transpose(0, 1)
    shares = torch.einsum("hoi,hij,hoj->h", parts, outputs, parts)
    total = float(shares.sum())
    if not total > 0:
        return ()
    return tuple(number(float(v) / total) for v in shares)


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the eigenvalues of the normalised kernel of tokens (n, features); 1: all are alike."""
    unit = F.normalize(x.double(), dim=-1)
    values = torch.linalg.svdvals(unit) ** 2
    share = values / values.sum()
    share = share[share > 0]
    return float(torch.exp(-(share * share.log()).sum())) if len(share) else 0.0


def _gradients(
    model: nn.Module, batches: Sequence[Batch], mapping: Mapping, places: Plan, skip_first: int
) -> FloatArray | None:
    """Gradient variance at stream_out of every sublayer, relative to the last one's; None where there is no loss."""
    if mapping.architecture.head == "none":
        return None
    found = []
    for batch in batches:
        arguments = arguments_of(model, mapping, batch)
        recorder = Recorder(model, mapping, places, backward=True)
        given = _padding(mapping, arguments)
        n_stacks = sorted(set(places.layout.stack.tolist()))
        if batch.tokens is not None and batch.decoder_tokens is None:
            keep = positions(given, batch.tokens.shape, skip_first, next(model.parameters()).device)
            recorder.given_padding = dict.fromkeys(n_stacks, keep)
        try:
            recorder.attach()
            with torch.inference_mode(False), torch.enable_grad(), lent_gradients(model):
                loss_of(model(**arguments), batch, None).backward()  # type: ignore[no-untyped-call]
        finally:
            recorder.detach()
        _, gradient = tables(recorder)
        row = []
        for i in range(len(places.stream_out)):
            key = places.stream_out[i] if places.stream_out[i] >= 0 else -1 - i
            unit = mapping.sublayers[i].units[2]
            row.append(gradient[key][1] / unit**2 if key in gradient else math.nan)
        found.append(row)
    mean = np.mean(np.array(found), axis=0)
    last = mean[-1]
    return np.asarray(mean / last) if math.isfinite(last) and last > 0 else None
