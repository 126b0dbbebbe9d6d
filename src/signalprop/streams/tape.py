"""One forward pass as a graph: which tensor is a sum, a product or a view of which, and which modules saw it.

The graph is recorded below Python, by PyTorch's dispatcher, so it does not matter whether code says `x + y`, `x += y`
or `torch.lerp`, in a module or in a function. It works on the meta device too, where tensors hold no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from signalprop.hooks import Hooks, first_tensor, read_by
from signalprop.streams.calls import call

Operation = Literal["add", "scale", "product", "same", "moved", "norm", "mix", "other"]

_SAME = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "clone", "_to_copy", "detach", "alias", "contiguous",
    "squeeze", "unsqueeze", "lift_fresh", "native_dropout", "dropout", "positive",
}  # fmt: skip
_MOVED = {
    "permute", "transpose", "t", "roll", "slice", "select", "constant_pad_nd", "narrow", "split", "split_with_sizes",
    "unbind", "index", "expand", "flip", "unfold", "cat", "stack", "index_select", "gather", "masked_fill", "where",
}  # fmt: skip
_NORMS = {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"}
_ATTENTION = {
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "flex_attention",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
}  # fmt: skip
_SHIFTS = {"convolution", "cumsum", "_fft_r2c", "_fft_c2c", "roll", "flip", "lstm", "gru", "_thnn_fused_lstm_cell"}


@dataclass(eq=False)
class Node:
    """A tensor of the pass.

    Attributes:
        operation: how it came from its `inputs`: `add` (with `factors`), `scale` (by the one factor, which no input
            has a part in), `product` (of two that both depend on the input), `same` (another view or type of the same
            numbers in the same order), `moved` (a part, or another order), `norm`; `mix`, of an attention; `other`.
        inputs: those that depend on the model's input.
        factors: of a sum and a scale: numbers or fixed tensors.
        time: when it was computed. shape: of the tensor. readers: what was computed from it.
    """

    operation: Operation
    inputs: tuple[Node, ...]
    time: int
    shape: tuple[int, ...]
    factors: tuple[float | Tensor, ...] = ()
    readers: list[Node] = field(default_factory=list)

    @property
    def numbers(self) -> Node:
        """The tensor that this one is a view or a copy of."""
        node = self
        while node.operation == "same":
            node = node.inputs[0]
        return node


@dataclass(frozen=True, eq=False)
class Call:
    """One run of a module: when, and the tensors that it read and gave; the first are those that hooks see.

    Attributes:
        index: which of the module's calls it is, from 0. path: of the module in the model.
    """

    module: nn.Module
    path: str
    index: int
    start: int
    end: int
    read: tuple[Node, ...]
    gave: tuple[Node, ...]
    first_read: Node | None
    first_given: Node | None


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a pass while it is active (`with`), with its `hooks` on the model.

    Attributes:
        calls: runs of modules, in the order of their ends. counts: runs of each module, by its id.
        mixed, shifted: when an attention, and when something else that mixes tokens, was computed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.counts: dict[int, int] = {}
        self.mixed: list[int] = []
        self.shifted: list[int] = []
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._nodes: Any = WeakTensorKeyDictionary()
        self._written: dict[int, Node] = {}  # of tensors that parts were written into, by their memory
        self._open: list[tuple[int, int, tuple[Node, ...], Node | None]] = []
        self._time = 0

    # --- modules ---------------------------------------------------------------------------------------------------

    def hooks(self) -> Hooks:
        """Records every module's calls on this tape."""
        found = Hooks()
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                found.before(module, self._enters, first=True)
                found.after(module, self._leaves)
        return found

    def gives(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are the model's input."""
        for tensor in tensors:
            self._set(tensor, "other", ())

    def _enters(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._time += 1
        read = tuple(node for t in tensors_in((args, kwargs)) if (node := self.node(t)) is not None)
        first = read_by(args, kwargs)
        self._open.append((id(module), self._time, read, None if first is None else self.node(first)))

    def _leaves(self, module: nn.Module, _: Any, __: Any, output: Any) -> None:
        self._time += 1
        while self._open:
            owner, begins, read, first_read = self._open.pop()
            if owner == id(module):
                break
        else:
            return
        gave = tuple(node for t in tensors_in(output) if (node := self.node(t)) is not None)
        first = output if isinstance(output, Tensor) else first_tensor(output)
        given = None if first is None else self.node(first)
        index = self.counts.get(id(module), 0)
        self.counts[id(module)] = index + 1
        path = self._paths.get(id(module), "")
        self.calls.append(Call(module, path, index, begins, self._time, read, gave, first_read, given))

    # --- tensors ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1  # whether masks are full: structure does not depend on it
        out = func(*args, **(kwargs or {}))
        self._time += 1
        name = func.overloadpacket.__name__
        self._saw(name.rstrip("_"), args, kwargs or {}, out)
        target = args[0] if name.endswith("_") and args else None
        if isinstance(target, Tensor) and (node := self._nodes.get(target)) is not None:
            self._written[_storage(target)] = node
        return out

    def node(self, tensor: Tensor) -> Node | None:
        """What is known of a tensor; None of one that does not depend on the model's input."""
        found: Node | None = self._nodes.get(tensor)
        return self._written.get(_storage(tensor)) if found is None and self._written else found

    def _saw(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = tuple(node for t in tensors_in((args, kwargs)) if (node := self.node(t)) is not None)
        if not inputs:
            return
        results = list(tensors_in(out))
        if not results:
            return
        if name in _ATTENTION or (name in ("_softmax", "_safe_softmax") and results[0].ndim >= 3):
            self.mixed.append(self._time)
        if name in _SHIFTS and not (name == "convolution" and args[1].shape[2:].numel() == 1):
            self.shifted.append(self._time)
        if name == "constant_pad_nd" and any(args[1][2:]):  # a shift over tokens, as of RWKV
            self.shifted.append(self._time)
        first, rest = results[0], results[1:]
        if not first.is_floating_point():
            for tensor in results:
                self._set(tensor, "other", inputs)
            return
        self._set(first, *self._made(name, args, kwargs, first, inputs))
        for tensor in rest:
            self._set(tensor, "moved" if name in _MOVED else "other", inputs)

    def _made(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, inputs: tuple[Node, ...]
    ) -> tuple[Operation, tuple[Node, ...], tuple[float | Tensor, ...]]:
        """How a result came about: operation, inputs, factors."""
        if name in ("add", "sub", "rsub", "lerp", "addcmul", "addmm", "baddbmm") and (
            found := self._sum(name, args, kwargs, out)
        ):
            return found
        if name in ("mul", "div", "neg", "multiply", "true_divide"):
            return self._product(name, args, inputs)
        if name in _SAME and inputs[0].shape != () and math.prod(inputs[0].shape) == out.numel():
            return "same", inputs[:1], ()
        if name == "copy" and len(args) > 1 and isinstance(args[1], Tensor) and args[1].shape == out.shape:
            source = self.node(args[1])
            return ("same", (source,), ()) if source is not None else ("other", inputs, ())
        if name in _MOVED or name in _SAME:
            return "moved", inputs, ()
        if name in _NORMS and isinstance(args[0], Tensor):
            return "norm", inputs[:1], ()
        return "other", inputs, ()

    def _sum(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> tuple[Operation, tuple[Node, ...], tuple[float | Tensor, ...]] | None:
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 and isinstance(args[2], (int, float)) else 1.0)
        one, other = args[0], args[1]
        factors: tuple[float | Tensor, float | Tensor]
        if name in ("add", "sub", "rsub"):
            sign = -1.0 if name != "add" else 1.0
            factors = (1.0, sign * alpha) if name != "rsub" else (-alpha, 1.0)
        elif name == "lerp":
            weight = args[2] if len(args) > 2 else kwargs["weight"]
            if isinstance(weight, Tensor) and self.node(weight) is not None:
                return None
            factors = (1 - weight, weight.detach() if isinstance(weight, Tensor) else weight)
        elif name == "addcmul":
            return self._fused(one, args[1:3], "product", kwargs.get("value", 1.0))
        else:
            return self._fused(one, args[1:3], "other", kwargs.get("alpha", 1.0), kwargs.get("beta", 1.0))
        pairs = [
            (self.node(t) if isinstance(t, Tensor) else None, f) for t, f in zip((one, other), factors, strict=True)
        ]
        known = [(node, factor) for node, factor in pairs if node is not None]
        if len(known) == 2 and any(node.shape[-1:] == (1,) for node, _ in known) and out.shape[-1:] != (1,):
            return "product", tuple(node for node, _ in known), ()  # a norm that takes the mean off
        multiples = [multiple(node, factor) for node, factor in known]
        if len(known) == 2 and multiples[0][0] is multiples[1][0]:
            return "scale", (multiples[0][0],), (multiples[0][1] + multiples[1][1],)
        return "add", tuple(node for node, _ in known), tuple(factor for _, factor in known)

    def _fused(
        self, base: Tensor, terms: tuple[Any, ...], how: Operation, alpha: float, beta: float = 1.0
    ) -> tuple[Operation, tuple[Node, ...], tuple[float | Tensor, ...]] | None:
        """A sum of a tensor with the output of the same call on two others."""
        start = self.node(base)
        inner = [node for t in terms if isinstance(t, Tensor) and (node := self.node(t)) is not None]
        if start is None or not inner:
            return None
        merged = self._product("mul", terms, tuple(inner)) if how == "product" else (how, tuple(inner), ())
        part = self._node(merged[0], merged[1], start.shape, merged[2])
        return "add", (start, part), (float(beta), float(alpha))

    def _product(
        self, name: str, args: tuple[Any, ...], inputs: tuple[Node, ...]
    ) -> tuple[Operation, tuple[Node, ...], tuple[float | Tensor, ...]]:
        if name == "neg":
            return "scale", inputs[:1], (-1.0,)
        one, other = args[0], args[1]
        moving = [isinstance(t, Tensor) and self.node(t) is not None for t in (one, other)]
        if all(moving):
            return "product", inputs, ()
        if moving[1] and name != "mul" and name != "multiply":
            return "other", inputs, ()
        factor = other if moving[0] else one
        value = factor.detach() if isinstance(factor, Tensor) else float(factor)
        if name in ("div", "true_divide"):
            value = 1 / value
        return "scale", inputs[:1], (value,)

    def _node(
        self,
        operation: Operation,
        inputs: tuple[Node, ...],
        shape: Iterable[int],
        factors: tuple[float | Tensor, ...] = (),
    ) -> Node:
        node = Node(operation, inputs, self._time, tuple(shape), factors)
        for one in {id(one): one for one in inputs}.values():
            one.readers.append(node)
        return node

    def _set(
        self, tensor: Tensor, operation: Operation, inputs: tuple[Node, ...], factors: tuple[float | Tensor, ...] = ()
    ) -> None:
        self._nodes[tensor] = self._node(operation, inputs, tensor.shape, factors)


def multiple(node: Node, factor: float | Tensor = 1.0) -> tuple[Node, float | Tensor]:
    """The tensor that this one is a view, a copy or a multiple of, and of which factor; `factor` times that."""
    while node.operation in ("same", "scale"):
        for one in node.factors:
            factor = one * factor
        node = node.inputs[0]
    return node, factor


def record(model: nn.Module, arguments: Dictionary[str, Any]) -> Tape:
    """One forward pass without gradients, in the mode that the model is in."""
    tape = Tape(model)
    with tape.hooks(), torch.no_grad(), tape:
        tape.gives(tensors_in(arguments))
        call(model, arguments)
    return tape


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of arguments or outputs, a few levels deep."""
    if isinstance(values, Tensor):
        yield values
    elif depth and isinstance(values, (tuple, list)):
        yield from chain.from_iterable(tensors_in(value, depth - 1) for value in values)
    elif depth and isinstance(values, dict):
        yield from chain.from_iterable(tensors_in(value, depth - 1) for value in values.values())
    elif depth and is_dataclass(values) and not isinstance(values, type):
        yield from tensors_in(vars(values), depth)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else -1


def summands(node: Node | None, stop: Collection[int] = ()) -> list[Node]:
    """The tensors that one comes from through sums and factors, itself among them; not beyond those whose id stops."""
    ahead, passed = [] if node is None else [node.numbers], dict[int, Node]()
    while ahead:
        one = ahead.pop()
        if id(one) not in passed and id(one) not in stop and one.operation in ("add", "scale", "product"):
            ahead += [inner.numbers for inner in one.inputs]
        passed[id(one)] = one
    return list(passed.values())
