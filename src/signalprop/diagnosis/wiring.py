"""How a fresh model is wired, by what its passes show: scores, attention weights, skips, who sees whom.

Nothing is assumed of the code: matrix products and softmaxes are watched as PyTorch runs them, blocks are the modules
of the longest list, and what depends on what is found by changing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.diagnosis.sentences import fault
from signalprop.hooks import Hooks, first_tensor, loss_and_logits
from signalprop.results.findings import Finding
from signalprop.results.text import named

_SAME = 1e-4  # of the size of what is compared
_FEW, _NORMED, _PADS = 3, 1e-3, 8
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_SOFTMAXES = {torch.softmax, Tensor.softmax, torch.nn.functional.softmax}
_SCORED = 1.35  # a factor between the usual scale and another
ADVICE = "divide queries times keys by sqrt(d_head), before the softmax"


class Scores(NamedTuple):
    """One attention: the factor on its scores, the size of a head, the sum of a row of its weights (mean, spread)."""

    block: int
    factor: float
    d_head: int
    row: tuple[float, float] | None


class Attentions(TorchFunctionMode):
    """Watches products, softmaxes and maps while a model runs; `seen` holds every attention that they make up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Scores] = []
        self.block = -1
        self._product: tuple[Tensor, Tensor, Tensor] | None = None
        self._maps: list[Tensor] = []  # since the block began
        self._scores: tuple[float, int, tuple[int, ...]] | None = None

    def enter(self, block: int) -> None:
        """A block begins."""
        self.block, self._maps = block, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and isinstance(out, Tensor):
            self._maps = [*self._maps[-3:], out.detach()]
        elif func in _PRODUCTS and isinstance(out, Tensor) and out.ndim >= 3:
            left = args[0]
            if self._scores is not None and tuple(left.shape) == self._scores[2]:
                sums = left.detach().float().sum(-1)
                fitted, size, _ = self._scores
                self.seen.append(Scores(self.block, fitted, size, (float(sums.mean()), float(sums.std()))))
                self._scores = None
            else:
                self._product = (left.detach(), args[1].detach(), out.detach().clone())
        elif func in _SOFTMAXES and self._product is not None and args[0].shape == self._product[2].shape:
            left, right, product = self._product
            factor = _factor(product, args[0].detach(), left, right, self._maps)
            self._scores = None if factor is None else (factor, left.shape[-1], tuple(product.shape))
            self._product, self._maps = None, []
        elif func is torch.nn.functional.scaled_dot_product_attention and isinstance(out, Tensor):
            self._in_one_call(*args, **(kwargs or {}))
        return out

    def _in_one_call(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> None:
        """PyTorch's attention, which says by what it multiplies scores; its weights sum to 1."""
        size, scale = query.shape[-1], named.get("scale")
        left, right = query.detach(), key.detach().transpose(-2, -1)
        before = None if _is_normed(left, right) else _before(left, right, self._maps)
        if before is not None:
            self.seen.append(Scores(self.block, (size**-0.5 if scale is None else scale) * before, size, None))
        self._maps = []


def _factor(product: Tensor, scores: Tensor, left: Tensor, right: Tensor, maps: list[Tensor]) -> float | None:
    """What queries times keys, as their maps give them, are multiplied with; None if a norm lies between."""
    if _is_normed(left, right):
        return None
    x, y = product.float().flatten(), scores.float().flatten()
    fits = torch.isfinite(y) & (y > -1e4)
    x, y = x[fits], y[fits]
    square = float((x - x.mean()).square().sum())
    if not square:
        return None
    return float((x - x.mean()) @ (y - y.mean())) / square * _before(left, right, maps)


def _is_normed(left: Tensor, right: Tensor) -> bool:
    """Whether queries or keys have one size each, as QK-norm leaves them: whatever its gains and scale."""
    sizes = [x.float().square().sum(axis) for x, axis in ((left, -1), (right, -2))]
    return any(float(s.std() / s.mean()) < _NORMED for s in sizes if s.numel() > 2 and float(s.mean()) > 0)


def _before(left: Tensor, right: Tensor, maps: list[Tensor]) -> float:
    """What queries, or keys too, were multiplied with since their maps gave them."""
    size, both = left.numel(), _rms(left) * _rms(right)
    if maps and maps[-1].numel() == 3 * size:  # one map, in thirds or head by head: whichever explains the sizes
        heads = [m for m in (1, maps[-1].shape[-1] // (3 * left.shape[-1])) if m]
        parts = [maps[-1].reshape(*maps[-1].shape[:-1], n, 3, -1) for n in heads]
        wholes = [_rms(x[..., 0, :]) * _rms(x[..., 1, :]) for x in parts]
    else:
        read = [m for m in maps if m.numel() in (size, right.numel())][-3:]
        wholes = [math.prod(map(_rms, read)) ** (2 / len(read))] if read else []
    factors = [both / whole for whole in wholes if both > 0 and whole > 0]
    before = min(factors, key=lambda factor: abs(math.log(factor)), default=1.0)
    return before if not 1 / 1.25 < before < 1.25 else 1.0


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list of one class; [] where there are few."""
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    alike = [found for found in lists if len(found) >= _FEW and len({type(m) for m in found}) == 1]
    return max(alike, key=len, default=[])


class Seen(NamedTuple):
    """A block's call: what it read of the stream, gave, and all arguments."""

    read: Tensor
    gave: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _watched(blocks: list[nn.Module], mode: Attentions, seen: dict[int, Seen]) -> Hooks:
    """Hooks that record which block runs, and every block's call."""
    hooks = Hooks()
    for i, block in enumerate(blocks):

        def leaves(module: Any, args: Any, kwargs: Any, output: Any, i: int = i) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            y = first_tensor(output)
            if x is not None and y is not None and x.shape == y.shape and x.is_floating_point():
                seen[i] = Seen(x.detach(), y.detach(), args, kwargs)

        hooks.before(block, lambda *_, i=i: mode.enter(i))
        hooks.after(block, leaves)
    return hooks


def wiring_of(model: nn.Module, arguments: dict[str, Any], *, own: bool, causal: bool) -> tuple[Finding, ...]:
    """What is wired wrongly in a fresh model, in evaluation mode; three short passes.

    Args:
        arguments: of its forward. own: its family is not known, so the scale of scores its configuration has.
        causal: it is to read no later token.
    """
    found: list[Finding] = []
    with torch.no_grad():
        blocks, mode, seen = blocks_of(model), Attentions(), dict[int, Seen]()
        with _watched(blocks, mode, seen), mode:
            model(**arguments)
        found += _scores(mode.seen, own=own)
        found += _skips(blocks, seen)
        found += _who_sees_whom(model, arguments, causal)
    return tuple(found)


def _layers(seen: list[Scores]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(s.block for s in seen if s.block >= 0))


def _scores(seen: list[Scores], *, own: bool) -> Iterator[Finding]:
    bent = [s for s in seen if s.row is not None and (abs(s.row[0] - 1) > 0.01 or s.row[1] > 0.01)]
    off = [s for s in seen if s.factor > 0 and abs(math.log(s.factor * math.sqrt(s.d_head))) > math.log(_SCORED)]
    if own and off and not bent:
        factor, size = off[0].factor, off[0].d_head
        yield fault(
            name="score scale",
            layers=_layers(off),
            text=f"scores are multiplied by {factor:.4g} (fitted); 1/sqrt(d_head) would be {size**-0.5:.4g}",
            remedy=ADVICE,
        )
    if bent:
        assert bent[0].row is not None
        mean, spread = bent[0].row
        even = spread < 0.01 * abs(mean)
        yield fault(
            name="attention weights",
            layers=_layers(bent),
            text=f"attention weights of a query sum to {mean:.4g}{'' if even else f' +- {spread:.2g}'}, not to 1: "
            + ("they are multiplied after the softmax" if even else "the softmax runs over another axis than the keys"),
            remedy="multiply scores before the softmax, and take it over the keys (dim=-1)",
        )


def _skips(blocks: list[nn.Module], seen: dict[int, Seen]) -> Iterator[Finding]:
    """How much of what a block reads is in what it gives, and whether doubling what it reads changes that."""
    along: dict[int, tuple[float, float]] = {}
    for i, s in seen.items():
        x, y = s.read.float(), s.gave.float()
        x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
        square = float((x * x).sum())
        if square:
            inner = float((x * y).sum())
            along[i] = (inner / square, inner / math.sqrt(square * float((y * y).sum()) or 1.0))
    if len(along) < _FEW:
        return
    coefficients = sorted(c for c, _ in along.values())
    middle = coefficients[len(coefficients) // 2]
    doubled = tuple(i for i, (c, _) in along.items() if abs(c - 2) < 0.15 or abs(c - 4) < 0.3)
    around = {i: _same_doubled(blocks[i], seen[i]) for i in along}
    usual = sorted(cosine for _, cosine in along.values())[len(along) // 2]
    # where a norm ends the block, a branch that is large enough hides the skip
    alone = {i: around[i] and not _normed(seen[i].gave) for i in along}
    lost = tuple(i for i, (c, cosine) in along.items() if max(abs(c), abs(cosine)) < 0.3 and (alone[i] or usual > 0.6))
    carried = tuple(i for i, (_, cosine) in along.items() if cosine > 0.6 and alone[i])
    if lost:
        yield fault(
            name="no skip", layers=lost,
            text=f"{named(lost)}: the output contains nothing of the input (cosine {along[lost[0]][1]:.2g}; "
            f"median of all layers {usual:.2g}): a skip is missing",
            remedy="add the branch to its input: x = x + branch(norm(x))",
        )  # fmt: skip
    if len(carried) > len(along) / 2:
        yield fault(
            name="norm on the skip", layers=carried, severity="note",
            text=f"{named(carried)}: the skip carries what the first norm gives, not what the block reads: twice the "
            "stream gives the same output, so that this is post-norm in effect",
            remedy="where pre-norm is meant, keep the block's input for the skip: x = x + branch(norm(x)); where "
            "post-norm is, nothing is wrong",
        )  # fmt: skip
    if doubled and (abs(middle - 1) < 0.2 or len(doubled) > len(along) / 2):
        yield fault(
            name="doubled skip", layers=doubled,
            text=f"{named(doubled)}: gives {along[doubled[0]][0]:.3g} times what was read: the stream is added twice, "
            "as in x + (x + branch)",
            remedy="add the stream once; a branch that returns x + f(x) is added to nothing",
        )  # fmt: skip


def _normed(x: Tensor) -> bool:
    """Whether all tokens have one size, as a norm at the end of a block leaves them."""
    sizes = x.float().square().mean(-1).sqrt()
    return bool(sizes.std() < 5e-4 * sizes.mean())


def _same_doubled(block: nn.Module, s: Seen) -> bool:
    """Whether twice the stream gives the same, up to the epsilon of norms."""
    twice = [
        2 * a if a is s.read or (isinstance(a, Tensor) and a.data_ptr() == s.read.data_ptr()) else a for a in s.args
    ]
    kwargs = {
        k: 2 * v if isinstance(v, Tensor) and v.data_ptr() == s.read.data_ptr() else v for k, v in s.kwargs.items()
    }
    try:
        out = first_tensor(block(*twice, **kwargs))
    except Exception:  # whatever a stranger's block raises when it is called alone
        return False
    if out is None:
        return False
    return float((out - s.gave).norm()) < 0.1 * float(s.gave.norm())


def _who_sees_whom(model: nn.Module, arguments: dict[str, Any], causal: bool) -> Iterator[Finding]:
    """Other sequences of a batch, and later tokens, may change nothing of what is said of a sequence's beginning."""
    ids = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and v.ndim == 2 and not v.is_floating_point()}
    name = next((k for k in ("input_ids", "decoder_input_ids", *ids) if k in ids), None)
    if name is None or "decoder_input_ids" in arguments or ids[name].shape[1] < _FEW:
        return
    read = ids[name]
    other = read.roll(1, 1)
    pair = {k: torch.cat([v, v]) if isinstance(v, Tensor) and v.ndim and len(v) == len(read) else v
            for k, v in arguments.items()}  # fmt: skip
    said = _logits(model, pair)
    if said is None or said.ndim < 2 or len(said) != 2 * len(read):
        return
    n, size = len(read), float(said.abs().max())
    if float((said[:n] - said[n:]).abs().max()) > _SAME * size:
        again = _logits(model, pair)
        if again is not None and (moved := float((again - said).abs().max())) > _SAME * size:
            yield fault(
                name="differs between calls",
                text=f"the same call gives different numbers (by up to {moved:.2g} of {size:.2g}) in evaluation mode",
                remedy="dropout that does not ask for the mode: F.dropout(x, p, self.training), or nn.Dropout",
                cause="tested: the same text was read twice",
            )
            return
    after, before = (_logits(model, pair | {name: torch.cat(both)}) for both in ([read, other], [other, read]))
    if after is None or before is None:
        return
    moved = max(float((after[:n] - said[:n]).abs().max()), float((before[n:] - said[n:]).abs().max()))
    if moved > _SAME * size:
        turned = _logits(model, pair | {name: torch.cat([read, read]).flip(1)})
        if turned is not None and float((turned.flip(1) - said).abs().max()) <= _SAME * size:
            return  # tokens of axis 1 do not know their place: sequences side by side, (tokens, batch)
        yield fault(
            name="reads other sequences",
            text="the logits of a sequence change with the others in its batch",
            remedy="look at the axes of attention, (batch, tokens, features), and of norms",
        )  # fmt: skip
        return
    last = read.clone()
    last[:, -1] = read[:, 0] if bool((read[:, 0] != read[:, -1]).any()) else read[:, 1]
    ahead = _logits(model, pair | {name: torch.cat([last, read])})
    if causal and ahead is not None and said.ndim == 3 and said.shape[1] > 1 and bool((last != read).any()):
        change = float((ahead[: len(read), :-1] - said[: len(read), :-1]).abs().max())
        if change > _SAME * size:
            yield fault(
                name="reads ahead",
                text="the logits of a token change with later tokens: the causal mask is missing",
                remedy="mask the scores of later tokens with -inf before the softmax (is_causal=True)",
            )  # fmt: skip

    padding = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    if not causal and said.ndim == 3 and len(padding) == 1 and len(signature(model.forward).parameters) == 1:
        pads = torch.full((n, _PADS), padding.pop(), device=read.device, dtype=read.dtype)
        padded = _logits(model, {name: torch.cat([read, pads], 1)})
        if padded is not None and float((padded[:, : said.shape[1]] - said[:n]).abs().max()) > _SAME * size:
            yield fault(
                name="padding is read", severity="warning",
                text=f"the logits of a sequence change with padding after it (id {int(pads[0, 0])}, the table's "
                "padding_idx): attention reads it",
                remedy="mask the keys of padding with -inf before the softmax (key_padding_mask)",
                cause="tested: a text was read with and without padding",
            )  # fmt: skip


def _logits(model: nn.Module, arguments: dict[str, Any]) -> Tensor | None:
    out = model(**arguments)
    found = out if isinstance(out, Tensor) else loss_and_logits(out)[1]
    return found.detach().float() if isinstance(found, Tensor) else first_tensor(out)
