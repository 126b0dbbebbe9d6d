"""The one place where hooks are registered: what modules read and output, while a model runs.

Whoever watches says which modules, and what to do with the tensor; this knows the rest: compiled code runs uncompiled
meanwhile, hooks come off whatever happens, passes in other threads are ignored, and a module that is called several
times has several points.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.errors import InputError

T = TypeVar("T")
# What is done with the first tensor that a module reads or outputs; a tensor that is returned takes its place.
See = Callable[[Tensor | None], Tensor | None]
Handle = torch.utils.hooks.RemovableHandle
LOCK = threading.RLock()  # held for the few instructions that decide whose pass is watched, never while one runs


@dataclass(frozen=True)
class Site:
    """A tensor of the forward pass: what enters a module, or what leaves it (at its `call`-th of `calls` calls)."""

    module: nn.Module
    side: str  # "input" or "output"
    call: int = 0
    calls: int = 1
    stack: int = 0


class Hooks:
    """Hooks on modules of a model, from `attach` to `detach`, or in a `with` block.

    Args:
        ignores: whether the thread that asks is in a pass that is not watched. Default: in all threads but the one
            that attached.
    """

    def __init__(self, ignores: Callable[[], bool] | None = None) -> None:
        self._owner: int | None = None
        self._ignores = self._elsewhere if ignores is None else ignores
        self._wanted: list[Callable[[], Handle]] = []
        self._handles: list[Handle] = []
        self._calls: dict[tuple[int, str], int] = {}
        self._stance: ExitStack | None = None

    # --- what to watch ---------------------------------------------------------------------------------------------

    def before(
        self, module: nn.Module, act: Callable[..., Any], *, first: bool = False, everywhere: bool = False
    ) -> None:
        """Call `act(module, args, kwargs)` before the module runs.

        Args:
            first: before the hooks that are there already. everywhere: in passes that are not watched as well.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return act(module, args, kwargs) if everywhere or not self._ignores() else None

        self._wanted.append(lambda: module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))

    def after(
        self, module: nn.Module, act: Callable[..., Any], *, always: bool = False, everywhere: bool = False
    ) -> None:
        """Call `act(module, args, kwargs, output)` after the module ran.

        Args:
            always: also where it failed. everywhere: in passes that are not watched as well.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return act(module, args, kwargs, output) if everywhere or not self._ignores() else None

        self._wanted.append(lambda: module.register_forward_hook(hook, with_kwargs=True, always_call=always))

    def reads(self, module: nn.Module, see: See, *, first: bool = False) -> None:
        """Show the first tensor that the module reads."""
        self.before(module, lambda _, args, kwargs: replaced(args, kwargs, see(read_by(args, kwargs))), first=first)

    def outputs(self, module: nn.Module, see: See) -> None:
        """Show the first tensor that the module outputs."""

        def act(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            new = see(output if isinstance(output, Tensor) else first_tensor(output))
            return None if new is None else new if isinstance(output, Tensor) else (new, *output[1:])

        self.after(module, act)

    def sites(self, sites: Sequence[Site], see: Callable[[int, Tensor | None], Any], *, first: bool = False) -> None:
        """Show what passes every site, by its index; one hook for all calls of a module."""
        groups: dict[tuple[int, str], list[int]] = {}
        for index, site in enumerate(sites):
            groups.setdefault((id(site.module), site.side), []).append(index)
        for key, indices in groups.items():
            self._group(key, indices, sites, see, first=first)

    def _group(
        self,
        key: tuple[int, str],
        indices: list[int],
        sites: Sequence[Site],
        see: Callable[[int, Tensor | None], Any],
        *,
        first: bool,
    ) -> None:
        site = sites[indices[0]]

        def meets(tensor: Tensor | None) -> Tensor | None:
            call, new = 0, None
            if site.calls > 1:
                call = self._calls.get(key, 0) % site.calls
                self._calls[key] = call + 1
            for index in indices:
                if site.calls == 1 or sites[index].call == call:
                    new = see(index, tensor)
            return new

        if site.side == "input":
            self.reads(site.module, meets, first=first)
        else:
            self.outputs(site.module, meets)

    # --- on and off ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on; compiled modules run uncompiled until `detach`."""
        try:
            self._owner = threading.get_ident()
            self._stance = uncompiled()
            self._handles += [register() for register in self._wanted]
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take every hook off, for good, and let compiled modules run compiled again; harmless a second time."""
        for handle in self._handles:
            handle.remove()
        # what is watched is let go of, and a pass that another thread is in goes on, unwatched
        self._ignores = _ended
        self._handles.clear()
        self._wanted.clear()
        self._calls.clear()
        if self._stance is not None:
            self._stance.close()
            self._stance = None

    def begin(self) -> None:
        """A new pass begins: calls are counted from 0."""
        self._calls.clear()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _elsewhere(self) -> bool:
        return threading.get_ident() != self._owner


def plainly_before(module: nn.Module, hook: Callable[[Any, Any, Any], Any]) -> Handle:
    """Call `hook(module, args, kwargs)` itself before the module, with nothing around it, as compiled graphs want."""
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def plainly_after(module: nn.Module, hook: Callable[[Any, Any, Any, Any], Any]) -> Handle:
    """Likewise `hook(module, args, kwargs, output)` after it."""
    return module.register_forward_hook(hook, with_kwargs=True)


def _ended() -> bool:
    return True


def read_by(args: Any, kwargs: Any) -> Tensor | None:
    """The first tensor of a module's arguments."""
    first = args[0] if args else None
    return first if isinstance(first, Tensor) else first_tensor(args or kwargs.values())


def replaced(args: Any, kwargs: Any, new: Tensor | None) -> Any:
    """Arguments with another first tensor, as PyTorch wants them of a hook; None where nothing is new."""
    if new is None:
        return None
    if args:
        return (new, *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: new}


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor of a tuple, list, dictionary view or model output; None if there is none."""
    if isinstance(values, Tensor):
        return values
    if is_dataclass(values) and not hasattr(values, "keys"):
        values = list(vars(values).values())
    elif hasattr(values, "values"):
        values = values.values()
    try:
        return next((value for value in values if isinstance(value, Tensor)), None)
    except TypeError:
        return None


def logits_of(output: Any) -> Tensor:
    """A model's logits (of several heads the first's), or what else it outputs first."""
    _, logits = loss_and_logits(output)
    found = first_tensor(output if logits is None else logits)
    if found is None:
        raise InputError(f"the model outputs a {type(output).__name__} without a tensor; expected logits")
    return found


def whole(tensor: T) -> T:
    """A tensor itself, or all of one that is sharded over processes (FSDP2): every one of them has to ask."""
    return cast(T, tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def loss_and_logits(output: Any) -> tuple[Any, Any]:
    """By name; of a plain tuple, as (logits, loss), its only number and its only other tensor.

    Of a single tensor and of named outputs the only number is the loss.
    """
    named = vars(output) if is_dataclass(output) and not isinstance(output, dict) else output
    loss, logits = (
        named.get(name) if isinstance(named, dict) else getattr(named, name, None) for name in ("loss", "logits")
    )
    if loss is not None or logits is not None:
        return loss, logits
    values = list(named.values()) if isinstance(named, dict) else [named] if isinstance(named, Tensor) else named
    if not isinstance(values, (tuple, list)):
        return None, None
    tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    losses, others = ([x for x in tensors if (x.ndim == 0) == scalar] for scalar in (True, False))
    known = others if len(others) == 1 and not isinstance(named, dict) else [None]
    return losses[0] if len(losses) == 1 else None, known[0]


def rows_of(values: Iterable[Any]) -> tuple[int, int] | None:
    """(batch, tokens) of the first argument that has both: ids of two dimensions, or numbers of three."""
    tensors = (v for v in values if isinstance(v, Tensor) and v.ndim >= 2 + v.is_floating_point())
    return next(((v.shape[0], v.shape[1]) for v in tensors), None)


def is_compiled(model: nn.Module) -> bool:
    """Whether calling a model, or a module in it, runs code from torch.compile."""
    found = model.modules()
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in found)


def uncompiled() -> ExitStack:
    """Make compiled code run eagerly until the returned stack is closed.

    Hooks that are added after compilation are silently not called, so a probed step has to run uncompiled.
    """
    stack = ExitStack()
    if "torch._dynamo" in sys.modules:  # nothing can be compiled before that is imported
        stack.enter_context(_eagerly())
    return stack


_eager: list[ExitStack] = []  # one for each user; the first holds what PyTorch is to go back to after the last


@contextmanager
def _eagerly() -> Iterator[None]:
    """The stance is one for all threads, and probes may end in another order than they began in."""
    with LOCK:
        held = _eager[0] if _eager else ExitStack()
        if not _eager:
            held.enter_context(torch.compiler.set_stance("force_eager"))
        _eager.append(held)
    try:
        yield
    finally:
        with LOCK:
            _eager.pop()
            if not _eager:
                held.close()


class Products(TorchFunctionMode):
    """Sees the products with parameters that one module holds for all experts, which no hook does; in a `with` block.

    Args:
        parameters: which. reads: called with the number of one and what is multiplied with it, or with a slice of it; a
            tensor that is returned takes its place. makes: called with the number and the product.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reads: Callable[[int, Tensor], Tensor | None],
        makes: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._parameters, self._reads, self._makes = parameters, reads, makes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One function of torch."""
        kwargs = kwargs or {}
        index = self._index([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()])
        if index is not None:
            new = self._reads(index, args[0])
            args = args if new is None else (new, *args[1:])
        out = func(*args, **kwargs)
        if index is not None and self._makes is not None:
            self._makes(index, out)
        return out

    def _index(self, tensors: Sequence[Tensor]) -> int | None:
        """Which parameter the first tensor is multiplied with; a slice of one has nothing beside it."""
        for index, held in enumerate(self._parameters if len(tensors) > 1 else ()):
            start = held.data_ptr()
            if any(start <= x.data_ptr() < start + held.nbytes for x in tensors[1:]):
                return index
        return None
