"""Why activations are not finite though parameters are: the first operation that makes NaN or infinity, and its cause.

Causes are tested in this order: buffers, a row of a mask that allows no key, the largest entry against the number
format, a division by zero. What was ruled out is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.diagnosis.sentences import fault
from signalprop.hooks import Hooks
from signalprop.results.findings import Finding

_PRODUCTS = ("linear", "matmul", "bmm", "mul", "addmm", "baddbmm", "einsum")
_SOFTMAX = ("softmax", "scaled_dot_product_attention")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")
_DIVISIONS = ("div", "truediv", "true_divide", "reciprocal", "rsqrt", "log", "rdiv")
_RULED = ("buffers, which are finite", "mask rows that allow no key", "the range of the number format",
          "divisions by 0")  # fmt: skip


class _First(NamedTuple):
    """The first operation whose output is not finite and whose inputs are: its name, module and arguments."""

    name: str
    module: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values.detach()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


def _bad(x: Tensor, *, negative: bool) -> bool:
    """Whether a tensor holds NaN or infinity; -inf, with which masks hide keys, only where `negative`."""
    wrong = x.isnan() | (x == math.inf)
    return bool((wrong | (x == -math.inf)).any() if negative else wrong.any())


class _Operations(TorchFunctionMode):
    """Finds the first operation; `path` says which module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.first: _First | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        out = func(*args, **kwargs)
        if self.first is None and name and not name.startswith(("is", "get", "set", "masked", "full", "register")):
            made = list(_tensors(out))
            if any(_bad(x, negative=name in _PRODUCTS) for x in made) and not any(
                _bad(x, negative=False) for x in _tensors([args, kwargs])
            ):
                self.first = _First(name, self.path[-1] if self.path else "", func, args, kwargs)
        return out


def _followed(model: nn.Module, path: list[str]) -> Hooks:
    """Hooks that keep the path of the module that runs last in a list."""
    hooks = Hooks()
    for name, module in model.named_modules():
        hooks.before(module, lambda *_, name=name: path.append(name))
        hooks.after(module, lambda *_: path.__delitem__(-1), always=True)
    return hooks


def layer_paths(model: nn.Module, layers: Iterable[Any]) -> dict[str, int]:
    """The number of the layer of each layer's path."""
    paths = {id(module): name for name, module in model.named_modules()}
    return {paths[id(layer)]: k for k, layer in enumerate(layers) if id(layer) in paths}


def why_not_finite(
    model: nn.Module, calls: Iterable[Mapping[str, Any]], layers: Mapping[str, int]
) -> tuple[Finding, ...]:
    """Where and why activations stop being finite; () where no pass shows it.

    Args:
        model: in evaluation mode; its parameters and buffers are finite. calls: arguments of its forward, tried in
            order. layers: number of the layer of each path of a module.
    """
    mode = _Operations()
    for arguments in calls:
        with torch.no_grad(), _followed(model, mode.path), mode:
            model(**arguments)
        mode.path.clear()
        if mode.first is not None:
            return (_said(mode.first, layers),)
    return ()


def _said(first: _First, layers: Mapping[str, int]) -> Finding:
    parts = first.module.split(".")
    places = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    layer = next((layers[place] for place in places if place in layers), None)
    tests = (None, _masked(first), _overflow(first), _divided(first))
    found = next(((i, said) for i, said in enumerate(tests) if said), None)
    cause, advice = found[1] if found else ("none of the causes that were tested", "look at this operation")
    ruled = _RULED[: found[0]] if found else _RULED
    where = f" in {first.module}" if first.module else ""
    who = "the model" if layer is None else f"layer {layer} is the first that"
    return fault(
        name="not finite", layers=() if layer is None else (layer,),
        text=f"{who} produces NaN or infinite values, in {first.name}{where}: {cause}",
        remedy=advice, cause=f"tested: its inputs are finite; ruled out: {', '.join(ruled)}",
    )  # fmt: skip


def _hidden(x: Any) -> bool:
    """Whether a mask, or masked scores, have a row that allows nothing."""
    if not isinstance(x, Tensor) or not x.ndim:
        return False
    return bool((~x if x.dtype == torch.bool else x == -math.inf).all(-1).any())


def _masked(first: _First) -> tuple[str, str] | None:
    if first.name not in _SOFTMAX:
        return None
    held = [*first.args[3:4], first.kwargs.get("attn_mask")] if "product" in first.name else first.args[:1]
    if not any(_hidden(x) for x in held):
        return None
    return (
        "a row of the mask allows no key, and the softmax of -inf alone is NaN",
        "let every query see itself (padding too), or fill masks with a large negative number",
    )


def _overflow(first: _First) -> tuple[str, str] | None:
    """Whether the same operation in double precision is finite, and beyond the format's largest number."""
    given = list(_tensors([first.args, first.kwargs]))
    form = next((x.dtype for x in given), None)
    if form is None or form == torch.float64:
        return None

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, (list, tuple)):
            return type(value)(wide(x) for x in value)
        return value

    try:
        out = first.func(*wide(first.args), **{k: wide(v) for k, v in first.kwargs.items()})
    except Exception:  # an operation that has no other format
        return None
    largest = max((float(x.abs().max()) for x in _tensors(out) if x.numel()), default=math.nan)
    if not math.isfinite(largest) or largest <= torch.finfo(form).max:
        return None
    word = str(form).removeprefix("torch.")
    return (
        f"the largest number is {largest:.3g}, and {word} ends at {torch.finfo(form).max:.5g}",
        "run in bfloat16 or float32, or make what comes before smaller (signalprop fit)",
    )


def _divided(first: _First) -> tuple[str, str] | None:
    given = list(_tensors([first.args, first.kwargs]))
    if first.name in _NORMS:
        flat = given and bool((given[0].float().var(-1, correction=0) == 0).any())
        return (
            ("all features of a token are equal and epsilon is 0: 0 / 0", "give the norm an epsilon (1e-5)")
            if (flat)
            else None
        )
    if first.name in _DIVISIONS and any(bool((x == 0).any()) for x in given[-1:]):
        return "it divides by 0, or takes the logarithm of it", "add a small number to the divisor"
    return None
