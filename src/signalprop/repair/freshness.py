"""Whether a model's weights are fresh, draws of an initialiser, and how much a scheme changes what others compute.

Any initialiser will do: the model's, a registered scheme's, one in the model's constructor. What they have in
common is that they leave constants (gains, biases, zeros) and tables of independent draws, and training leaves neither:
it moves gains and biases by other amounts, and adds to matrices terms that rows or columns share. So no scale is
asked for, only:

* a vector that is not constant has to be what the model's initialiser draws, or a registered scheme, or the same in
  another layer (decay rates of state-space models, as a matrix of equal rows too);
* a matrix has to have the mean 0, tails no heavier than normal ones, rows (and columns) of one size and without means
  of their own, and no direction that stands out of the rest (the largest singular value of independent draws:
  Johnstone 2001, Annals of Statistics 29, theorem 1.1; universal in the draws' distribution). Else it has to be what
  the model's initialiser gives.

Each test is passed by draws but for one time in 10^9 (quantiles of normal and Tracy-Widom tails, and Wilson and
Hilferty's of chi-squared). docs/applying.md has rates measured on models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.parameters_by_role import Part, walk
from signalprop.errors import InputError, first_line
from signalprop.hooks import logits_of, whole
from signalprop.models.weights import tensor_seed
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.repair.goodness_of_fit import CHUNK, fault, sample
from signalprop.repair.tiny_pass import arguments_for
from signalprop.repair.undoing import Saved
from signalprop.schemes import SCHEMES
from signalprop.schemes import scheme as scheme_of
from signalprop.streams.calls import call
from signalprop.streams.live_model import evaluating

_DEVIATIONS = 6.0  # of a normal number: 1e-9 on one side
_TRACY_WIDOM = 10.0  # the quantile of 1 - 1e-10, of the law for real matrices
_LARGEST = 1 << 20  # entries of a matrix that are looked at
_STEPS = 20  # of the power iteration, which may stop short of the largest singular value but never beyond it
_KOLMOGOROV = 3.3  # sup |F - F'| sqrt(n / 2) of two samples of n, exceeded by one in 10^9


def learnt(attached: Anatomy) -> str:
    """The first parameter that no initialiser has left as it is, and why; '' where all are fresh.

    Parameters of a single number tell nothing, nor do those on the meta device and those that hold no floating-point
    numbers. Every role of a fused map is tested by itself.

    Args:
        attached: a vanilla model; nothing of it changes.
    """
    own: list[dict[str, Tensor]] = []
    parts = _fused(attached)
    # matrices first: a vector has to be held against every scheme
    named = sorted(attached.model.named_parameters(), key=lambda item: (item[1].ndim < 2, item[1].numel()))
    for name, parameter in named:
        if parameter.is_meta or not parameter.is_floating_point():
            continue
        numbers = whole(parameter.detach())
        for chosen in parts.get(id(parameter), [lambda tensor: tensor]):
            values = _matrix(chosen(numbers))
            why = unlike_draws(values)
            if not why or _repeated_ramp(attached.model, parameter, values):
                continue
            own = own or [_own_values(attached.model, method) for method in ("_init_weights", "reset_parameters")]
            drawn = [other for each in own if bool((other := _matrix(chosen(each[name]))).isfinite().all())]
            if any(_like(values, other) for other in drawn) or (not drawn and _centred(values)):
                continue
            if not _by_a_scheme(attached, parameter, values):
                return f"{name} ({why})"
    return ""


def first_outputs(attached: Anatomy, arguments: dict[str, Any] | None) -> Tensor | str:
    """Logits of a model on a small batch, or why there are none.

    Args:
        arguments: keyword arguments of its forward; default: a few random tokens.
    """
    given = arguments_for(attached, arguments)
    try:
        with evaluating(attached.outer), torch.no_grad():
            return logits_of(call(attached.outer, copy.copy(given))).double()
    except Exception as error:  # whatever a model raises that a tiny batch is not enough for
        return first_line(error)


def difference_in_words(attached: Anatomy, before: Tensor | str, after: Tensor | str) -> str:
    """How far logits have moved; '' for no more than rounding, and the epsilon of norms, explain."""
    if isinstance(before, str) or isinstance(after, str):
        reason = before if isinstance(before, str) else after
        return f"by how much is not known, since the model does not run on a small batch ({reason})"
    largest, moved = float(before.abs().max()), float((after - before).abs().max())
    rounding = 1e-4 if next(attached.model.parameters()).dtype in (torch.float32, torch.float64) else 0.03
    if moved <= rounding * largest:
        return ""
    return f"logits by up to {moved:.3g}, the largest being {largest:.3g}, on a small batch"


def _fused(attached: Anatomy) -> dict[int, list[Callable[[Tensor], Tensor]]]:
    """By the parameter's id: what takes the numbers of each role out of one that several share, or padding out."""
    found: dict[int, list[Callable[[Tensor], Tensor]]] = {}
    fused = (held for row in attached.rows for held in row.weights.values() if held.rows is not None)
    for held in (held for held in fused if not held.problem):
        for tensor, axis in held.tensors:
            found.setdefault(id(tensor), []).append(partial(held.of, axis=axis))
    for table in attached.model.modules():
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            rows = torch.arange(table.num_embeddings) != table.padding_idx
            found.setdefault(id(table.weight), [itemgetter(rows)])
    return found


def _matrix(tensor: Tensor) -> Tensor:
    """A parameter as a vector or a matrix, of a large one a corner."""
    sizes = [size for size in tensor.shape if size > 1]
    if len(sizes) < 2:
        return tensor.reshape(-1)[:_LARGEST].float()
    matrix = tensor.reshape(-1, sizes[-1]) if len(sizes) == 2 or sizes[-1] > 16 else tensor.reshape(sizes[0], -1)
    columns = min(matrix.shape[1], max(1024, _LARGEST // matrix.shape[0]))
    return matrix[: max(1, _LARGEST // columns), :columns].float()


def unlike_draws(x: Tensor) -> str:
    """Why numbers cannot be constants or independent draws of one distribution of mean 0; '' where they can."""
    n = x.numel()
    if n < 2:
        return ""
    least, most = map(float, x.aminmax())
    if least == most:
        return ""
    if not math.isfinite(most - least):
        return "not all of it is finite"
    if x.ndim == 1:
        return "its entries differ"
    rows, columns, fourth = _means(x)
    mean, variance = (float(line.mean()) for line in rows)
    kurtosis = fourth / variance**2
    if abs(mean) > _DEVIATIONS * math.sqrt(variance / n):
        return f"its mean is {mean:.2g}, with a standard deviation of {math.sqrt(variance):.2g}"
    # the cube root of a sample's kurtosis has lighter tails than the kurtosis itself
    if (kurtosis / 3) ** (1 / 3) > 1 + _DEVIATIONS * math.sqrt(24 / n) / 3 ** (4 / 3):
        return f"its numbers have heavier tails than draws (kurtosis {kurtosis:.3g})"
    for (means, sizes), along, words in ((rows, x.shape[1], "rows"), (columns, x.shape[0], "columns")):
        lines = len(sizes)
        if lines < 2 or along < 2:
            continue
        spread = float((sizes - variance).square().sum()) * along / (max(kurtosis - 1, 0.5) * variance**2)
        # sums of squares scatter by more than normal numbers would, the more so the fewer there are
        if _deviations(spread, lines - 1, 1 + 6 * kurtosis / along) > _DEVIATIONS:
            return f"its {words} differ in size"
        if _deviations(float(means.square().sum()) * along / variance, lines, 1.0) > _DEVIATIONS:
            return f"its {words} have means that differ"
    if min(x.shape) >= 4:
        largest = _largest_singular_value(x) / math.sqrt(variance)
        a, b = math.sqrt(x.shape[0] - 0.5), math.sqrt(x.shape[1] - 0.5)
        edge = math.sqrt((a + b) ** 2 + _TRACY_WIDOM * (a + b) * (1 / a + 1 / b) ** (1 / 3))
        if largest > edge:
            return f"one direction in it dominates ({largest / edge:.2f} times what draws have)"
    return ""


def _means(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Means of the entries and of their squares, of every row (2, rows) and column (2, columns), and of all fourth
    powers; of a few rows at a time, so that these stay in the cache."""
    rows, columns, fourth = [], torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device), 0.0
    for piece in torch.split(x, max(1, CHUNK // x.shape[1])):
        wide = piece.double()
        square = wide.square()
        rows.append(torch.stack([wide.mean(1), square.mean(1)]))
        columns += torch.stack([wide.sum(0), square.sum(0)])
        fourth += float(square.square().sum())
    return torch.cat(rows, 1), columns / len(x), fourth / x.numel()


def _deviations(chi: float, freedom: float, wider: float) -> float:
    """How far a sum of squares lies above its mean, as deviations of a normal number (Wilson and Hilferty 1931).

    Args:
        wider: its variance over that of chi-squared with as many degrees of freedom.
    """
    freedom /= wider
    root = math.pow(chi / wider / freedom, 1 / 3)
    return (root - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def _largest_singular_value(x: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    x = x.float() if x.dtype.itemsize < 4 else x
    vector = torch.randn(x.shape[1], generator=generator).to(x)
    size = 0.0
    for _ in range(_STEPS):
        image = x @ (vector / vector.norm())
        size = float(image.norm())
        vector = x.mT @ image
    return size


@lru_cache(maxsize=4)
def _tables(architecture: Architecture, schemes: tuple[str, ...]) -> list[Parametrization]:
    """The numbers of every scheme that can have this network."""
    tables = []
    for name in schemes:
        with suppress(InputError):
            tables.append(scheme_of(name)(architecture))
    return tables


def _repeated_ramp(model: nn.Module, parameter: Tensor, values: Tensor) -> bool:
    """Whether numbers that vary along one axis at most are those of another parameter, bit for bit, as no training
    leaves them."""
    if values.ndim == 2 and not (bool((values == values[:1]).all()) or bool((values == values[:, :1]).all())):
        return False
    others = (other for other in model.parameters() if other is not parameter and other.shape == parameter.shape)
    return any(torch.equal(other, parameter) for other in others)


def _by_a_scheme(attached: Anatomy, parameter: Tensor, values: Tensor) -> bool:
    """Whether a vector can be a scheme's draws: biases of PyTorch's scale, tokens of the embedding's."""

    def parts(*schemes: str) -> Iterator[Part]:
        tables = _tables(attached.mapping.architecture, schemes)
        return (part for table in tables for part in walk(attached, table) if part.tensor is parameter)

    if values.ndim > 1 or {part.role for part in parts("xavier")} == {"norm"}:  # which no scheme draws
        return False
    return any(
        part.std > 0 and not fault(sample(values), part.std, part.distribution, _DEVIATIONS) for part in parts(*SCHEMES)
    )


# --- the model's own initialiser --------------------------------------------------------------------------------------


def _own_values(model: nn.Module, method: str) -> dict[str, Tensor]:
    """What an initialiser draws, by the parameter's name; NaN where it leaves a parameter alone.

    Args:
        method: `_init_weights` of the model, as transformers calls it, or `reset_parameters`, PyTorch's of modules.
    """
    own: Any = getattr(model, method, None) if method == "_init_weights" else None
    made: dict[int, nn.Parameter] = {}
    saved = Saved(model, model.buffers())
    try:
        for parameters in [module._parameters for module in model.modules()]:
            for name, q in parameters.items():
                if q is not None:
                    dtype = q.dtype if q.is_floating_point() else torch.float32
                    other = nn.Parameter(torch.full(q.shape, math.nan, dtype=dtype), requires_grad=False)
                    parameters[name] = made.setdefault(id(q), other)
        values = {name: q.detach() for name, q in model.named_parameters()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(tensor_seed(0, "model", "fresh"))
            for module in reversed(list(model.modules())):  # children first
                reset = getattr(module, "reset_parameters", None) if method == "reset_parameters" else None
                with suppress(Exception):  # of a method of another's, of another signature, or of what is not finite
                    if callable(own):
                        own(module)
                    if callable(reset):
                        reset()
        return values
    finally:
        saved.restore()


def _like(values: Tensor, own: Tensor) -> bool:
    """Whether numbers can be what an initialiser left, of which `own` are other draws."""
    own = own.to(values.device)
    if bool((own == own.flatten()[0]).all()):
        return False
    if values.numel() < 8 or torch.allclose(
        values, own, rtol=1e-2, atol=0
    ):  # too few to tell, or computed (in half precision too)
        return True
    if values.ndim > 1 and not unlike_draws(own):
        return False  # those of the initialiser are independent draws
    one, other = sample(values), sample(own)
    if abs(one.mean - other.mean) > _DEVIATIONS * math.sqrt(2 / one.n) * max(one.std, other.std):
        return False
    # few numbers say little about their scatter
    doubt = (1 + 20 / one.n) * math.sqrt(2 * max((other.kurtosis or 3.0) - 1, 0.5) / one.n)
    if 2 * abs(math.log(one.std / other.std)) > _DEVIATIONS * doubt:
        return False
    both = torch.cat([values.flatten(), own.flatten()]).double()
    mine, theirs = both[: one.n].sort().values, both[one.n :].sort().values
    gap = torch.searchsorted(mine, both, right=True) - torch.searchsorted(theirs, both, right=True)
    return float(gap.abs().max()) / one.n <= _KOLMOGOROV * math.sqrt(2 / one.n)


def _centred(x: Tensor) -> bool:
    """Whether a vector that no initialiser fills can hold draws of mean 0, with tails no heavier than normal ones."""
    if x.ndim > 1:
        return False
    seen = sample(x)
    small = abs(seen.mean) <= _DEVIATIONS * seen.std / math.sqrt(seen.n)
    most = 3 + _DEVIATIONS * math.sqrt(24 / seen.n)
    return small and 1.5 - _DEVIATIONS / math.sqrt(seen.n) <= (seen.kurtosis or 0.0) <= most
