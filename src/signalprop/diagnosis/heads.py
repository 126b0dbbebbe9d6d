"""Inside attention: the scores of every head, how many keys it looks at, and what it adds.

Attention functions run between their query map and their output map. There the scores are seen on their way into
`scaled_dot_product_attention` or `softmax`, whichever the model computes with; what the heads output is what the
output map reads. Models with a fused kernel (flash attention) show only the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.parametrization_of import numbers_of
from signalprop.attachment.rows import AttachedRow
from signalprop.diagnosis.result import Numbers, number
from signalprop.hooks import Hooks
from signalprop.network.moments import FloatArray
from signalprop.streams.live_model import weights_here
from signalprop.watching.first_positions import Streams

_SCORES = 1 << 24  # entries of a score matrix that are formed at a time
_HIDDEN = -1e4  # below every score and every bias; what masks add to hide a key lies far below it
_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)


@dataclass
class HeadSums:
    """Sums over the rows of one attention that count, per head."""

    rows: float = 0.0
    variance: FloatArray = field(default_factory=lambda: np.zeros(0))
    entropy: FloatArray = field(default_factory=lambda: np.zeros(0))
    largest: FloatArray = field(default_factory=lambda: np.zeros(0))  # over rows and keys
    outputs: Tensor | None = None  # (heads, d_head, d_head): second moments of what each head outputs

    def see_scores(self, scores: Tensor, seen: Tensor, keep: Tensor) -> None:
        """Scores (heads, rows, keys) of one sequence, the keys that each row sees, and the rows that count."""
        if self.rows == 0:
            self.variance, self.entropy = np.zeros(len(scores)), np.zeros(len(scores))
            self.largest = np.full(len(scores), -np.inf)
        scores, seen = scores[:, keep], seen.expand_as(scores)[:, keep]
        counts = seen.sum(-1)
        rows = counts > 1  # a row of one key has nothing to choose from
        if not bool(rows.any()):
            return
        known = scores.masked_fill(~seen, 0.0)
        largest = scores.masked_fill(~(seen & rows[..., None]), -math.inf).amax((1, 2))
        self.largest = np.maximum(self.largest, largest.double().cpu().numpy())
        mean = known.sum(-1, keepdim=True) / counts[..., None].clamp(min=1)
        variance = ((known - mean).square() * seen).sum(-1) / counts.clamp(min=1)
        logs = torch.log_softmax(scores.masked_fill(~seen, -math.inf), -1).masked_fill(~seen, 0.0)
        entropy = -(logs.exp() * seen * logs).sum(-1) / counts.clamp(min=2).log()
        self.rows += float(rows[0].sum())
        self.variance += (variance * rows).sum(-1, dtype=torch.float64).cpu().numpy()
        self.entropy += (entropy * rows).sum(-1, dtype=torch.float64).cpu().numpy()

    def see_outputs(self, heads: Tensor) -> None:
        """What heads output at positions that count: (positions, heads, d_head)."""
        wide = heads.double()
        moments = torch.einsum("thi,thj->hij", wide, wide).cpu()
        self.outputs = moments if self.outputs is None else self.outputs + moments

    def told(self) -> dict[str, Numbers]:
        """By field of a `LayerSignal`, per head.

        score_std: root of the mean variance of scores along a row. largest_score: what QK-clip holds below a threshold
        (Kimi K2, 2025, section 2.1). entropy: mean entropy of a row of weights over that of equal weights.
        """
        columns = {
            "score_std": np.sqrt(np.maximum(self.variance, 0.0) / max(self.rows, 1.0)),
            "largest_score": self.largest,
            "entropy": self.entropy / max(self.rows, 1.0),
        }
        return {name: tuple(number(v) for v in column) if self.rows else () for name, column in columns.items()}

    def shares(self, row: AttachedRow) -> Numbers:
        """What each head adds after the output map, squared, over the sum of that over heads."""
        output = row.weights.get("output")
        if self.outputs is None or output is None or output.rows is not None:
            return ()
        with weights_here(output.holder):
            weight = numbers_of(output.holder)
        if weight is None:
            return ()
        wide = weight.detach().double().cpu()
        flat = wide.T if output.transposed else wide
        parts = flat.reshape(len(flat), *self.outputs.shape[:2]).transpose(0, 1)
        shares = ((parts @ self.outputs) * parts).sum((1, 2))
        total = float(shares.sum())
        return tuple(number(float(v) / total) for v in shares) if total > 0 else ()


class Watch(TorchFunctionMode):
    """Sees the attention functions of a model while the streams are watched; outside of attention it costs nothing.

    Args:
        streams: which say the positions that count. outputs: also what the heads output.

    Attributes:
        seen: by sublayer; none of those whose maps are not modules.
    """

    def __init__(self, attached: Anatomy, streams: Streams, *, outputs: bool = True) -> None:
        super().__init__()
        self._outputs = outputs
        self.seen: dict[int, HeadSums] = {}
        self._keep: Callable[[int], Tensor | None] = lambda row: streams.keep.get(int(attached.layout.stack[row]))
        self._row: int | None = None  # that runs
        self._inside = 0  # how many of the modules that hold an attention are running
        paths = {module: path for path, module in attached.model.named_modules()}
        around: dict[str, None] = {}
        for i, row in enumerate(attached.rows):
            maps = [row.weights[role].holder for role in ("query", "output") if role in row.weights]
            if row.kind.attends_itself and len(maps) == 2 and all(isinstance(one, nn.Module) for one in maps):
                self._follow(streams.hooks, i, maps[0], maps[1], attached.mapping.architecture.n_heads)
                both = zip(*(paths[one].split(".") for one in maps), strict=False)
                around[".".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], both))] = None
        for path in around:
            module = attached.model.get_submodule(path)
            streams.hooks.before(module, self._enters)
            streams.hooks.after(module, self._leaves, always=True)

    def _enters(self, *_: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _leaves(self, *_: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _follow(self, hooks: Hooks, index: int, query: nn.Module, output: nn.Module, n_heads: int) -> None:
        """The part of a pass from the query map of an attention to its output map."""

        def starts(_: Tensor | None) -> None:
            self._row = index

        def ends(x: Tensor | None) -> None:
            self._row = None
            keep = self._keep(index)
            if self._outputs and x is not None and keep is not None and x.shape[:-1].numel() == keep.numel():
                heads = x.detach().reshape(*keep.shape, n_heads, -1)[keep]
                self.seen.setdefault(index, HeadSums()).see_outputs(heads)

        hooks.reads(query, starts)
        hooks.reads(output, ends)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keep = None if self._row is None else self._keep(self._row)
        if self._row is not None and keep is not None:
            sums = self.seen.setdefault(self._row, HeadSums())
            if func is F.scaled_dot_product_attention:
                _products(sums, keep, *args, **kwargs)
            elif func in _SOFTMAX and args[0].ndim == 4:
                for b, scores in enumerate(args[0].detach()):
                    sums.see_scores(scores.float(), scores > _HIDDEN, keep[b])
        return func(*args, **kwargs)


def _products(
    sums: HeadSums,
    keep: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The scores that `scaled_dot_product_attention` forms of its arguments, some rows at a time."""
    n_heads, n, d_head = query.shape[1:]
    factor = 1 / math.sqrt(d_head) if scale is None else scale
    keys = torch.arange(key.shape[2], device=key.device)
    step = max(1, _SCORES // (n_heads * len(keys)))
    for b in range(len(query)):
        k = key[b].detach().float().repeat_interleave(n_heads // key.shape[1], 0).transpose(1, 2)
        mask = None if attn_mask is None else attn_mask.expand(len(query), n_heads, n, len(keys))[b]
        for start in range(0, n, step):
            rows = slice(start, min(n, start + step))
            scores = query[b, :, rows].detach().float() @ k * factor
            seen = torch.ones_like(scores, dtype=torch.bool)
            if is_causal:
                seen &= keys <= keys[rows, None]
            if mask is not None and mask.dtype == torch.bool:
                seen &= mask[:, rows]
            elif mask is not None:
                scores = scores + mask[:, rows].float()
                seen &= mask[:, rows] > _HIDDEN
            sums.see_scores(scores, seen, keep[b, rows])
