"""Nothing is left behind: hooks, objects and memory after a thousand cycles of everything that hooks into a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalprop.errors import InputError
from signalprop.measurement import Probe, input_kernels, measure
from signalprop.monitoring import SignalMonitor
from signalprop.watching.recording import Recorder

from .test_measure import n_hooks
from .test_measure_families import arguments_for, total

# Bytes by which a process may have grown over the second half of many cycles: blocks that the allocator keeps.
_SLACK = 4 << 20


def alive(kind: type) -> int:
    """How many objects of this class there are."""
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("/proc tells how much memory a process has; it is not here")
    return int(pages.read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_thousand_cycles_of_attaching_leave_nothing(build: Any) -> None:
    model = build("gpt_neox").eval()
    before = alive(Recorder)
    for k in range(1000):
        if k % 2:
            with Probe(model):
                pass
        else:
            with SignalMonitor(model, tolerance=None):
                pass
    assert n_hooks(model) == 0
    assert alive(Recorder) == before
    for module in model.modules():  # PyTorch keeps options of a hook in tables of their own
        for name in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
            assert not getattr(module, name), name


def test_a_step_leaves_no_hook_on_tensors_and_no_graph(build: Any) -> None:
    """The stream's tensors outlive the step here, as they do where a caller keeps outputs."""
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    kept: list[torch.Tensor] = []
    model.transformer.h[1].register_forward_hook(
        lambda _, __, output: kept.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    with Probe(model) as probe:
        loss = total(model(**arguments))
        assert kept[0]._backward_hooks  # a hook for the gradient, while the step lasts
        loss.backward()
        assert probe.profile() is not None
    assert not kept[0]._backward_hooks
    reference = weakref.ref(kept.pop())
    del loss
    gc.collect()
    assert reference() is None  # nobody holds the stream


@pytest.mark.parametrize("breaks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recorders_are_let_go(build: Any, breaks: bool) -> None:
    """Also after an exception in the middle of a pass, whose traceback holds frames."""
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    before = alive(Recorder)

    def fails(*_: Any) -> None:
        raise RuntimeError("broke in the middle")

    handle = model.transformer.h[1].register_forward_hook(fails) if breaks else None
    for _ in range(3):
        for run in (lambda: measure(model, arguments, loss=total), lambda: stepped(model, arguments)):
            if breaks:
                with pytest.raises((InputError, RuntimeError), match="broke in the middle"):
                    run()
            else:
                run()
    if handle is not None:
        handle.remove()
    assert n_hooks(model) == 0
    assert alive(Recorder) == before


def test_a_measured_model_goes_with_its_last_name(build: Any) -> None:
    """At once, without the collector, which comes late for few large objects: `compare` had held several models."""
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    gc.collect()
    gc.disable()
    try:
        measure(model, arguments, loss=lambda output: total(output))
        references = [weakref.ref(item) for item in (model, *model.parameters())]
        del model
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()


def test_gradients_of_parameters_do_not_stand_beside_each_other(build: Any) -> None:
    model = build("gpt2").eval()
    held: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: held.append(sum(q.grad is not None for q in model.parameters())))
    measure(model, arguments_for(model), loss=total)
    assert held and max(held) == 1


def test_a_model_can_be_let_go(build: Any) -> None:
    """Nothing of ours keeps a model alive: no cache, no turn of a thread, no callback."""
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    measure(model, arguments, loss=total)
    stepped(model, arguments)
    with SignalMonitor(model, tolerance=None) as monitor:
        total(model(**arguments)).backward()
        monitor.step()
    reference = weakref.ref(model)
    del model, monitor
    gc.collect()
    assert reference() is None


def stepped(model: nn.Module, arguments: dict[str, Any]) -> None:
    with Probe(model) as probe:
        total(model(**arguments)).backward()
        probe.profile()


def monitored(model: nn.Module, arguments: dict[str, Any]) -> None:
    with SignalMonitor(model) as monitor:
        model(**arguments, labels=arguments["input_ids"]).loss.backward()
        monitor.step()
    model.zero_grad()


def measured(model: nn.Module, arguments: dict[str, Any]) -> None:
    measure(model, arguments, loss=total)


def read(model: nn.Module, arguments: dict[str, Any]) -> None:
    input_kernels(model, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("cycle", [stepped, monitored, measured, read])
def test_a_thousand_measured_steps_take_no_more_memory(
    build: Any, cycle: Callable[[nn.Module, dict[str, Any]], None]
) -> None:
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    for _ in range(300):  # until caches are full and the allocator has what it needs
        cycle(model, arguments)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    for _ in range(1000):
        cycle(model, arguments)
    gc.collect()
    assert n_hooks(model) == 0
    assert len(gc.get_objects()) - objects < 100
    assert resident() - before < _SLACK
