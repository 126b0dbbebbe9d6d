"""Probes and threads: several models at once, one model in several threads, probes that overlap, passes that fail."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalprop.measurement import Probe, measure
from signalprop.results.profile import Profile

from .test_measure import assert_same, n_hooks
from .test_measure_families import arguments_for, total


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    """Threads take turns every 10 us, so that a race shows within seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What all jobs return, each in a thread of its own and all started at once."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, job) for job in jobs]]


class Gate:
    """A forward hook that stops a thread, once, until it is told to go on."""

    def __init__(self, module: nn.Module) -> None:
        self._stops: dict[int, tuple[threading.Event, threading.Event]] = {}
        module.register_forward_hook(lambda *_: self._passed())

    def stop(self) -> tuple[threading.Event, threading.Event]:
        """(set when this thread arrives, to be set to let it go on)."""
        events = threading.Event(), threading.Event()
        self._stops[threading.get_ident()] = events
        return events

    def _passed(self) -> None:
        arrived, go_on = self._stops.pop(threading.get_ident(), (None, None))
        if arrived is not None and go_on is not None:
            arrived.set()
            assert go_on.wait(timeout=60)


def step(model: nn.Module, arguments: dict[str, Tensor], passes: int = 1) -> Profile:
    """The Profile of a step of training."""
    with Probe(model) as probe:
        for _ in range(passes):
            total(model(**arguments)).backward()
        profile = probe.profile()
    assert profile is not None
    return profile


def test_every_thread_probes_a_model_of_its_own(build: Any) -> None:
    names = ("gpt2", "gpt_neox", "t5")
    models = [build(name, seed=i).eval() for i, name in enumerate(names)]
    arguments = [arguments_for(model) for model in models]
    alone = [measure(m, a, loss=total) for m, a in zip(models, arguments, strict=True)]

    def job(i: int) -> list[Profile]:
        return [step(models[i], arguments[i]) if k % 2 else measure(models[i], arguments[i], loss=total)
                for k in range(4)]  # fmt: skip

    for expected, profiles in zip(alone, together(*(lambda i=i: job(i) for i in range(3))), strict=True):
        for profile in profiles:
            assert_same(expected, profile)
    assert all(n_hooks(model) == 0 for model in models)


def test_threads_that_measure_one_model_take_turns(build: Any) -> None:
    model = build("gpt2").eval()
    batches = [arguments_for(model, seed=i) for i in range(4)]
    alone = [measure(model, batch, loss=total) for batch in batches]
    total(model(**batches[0])).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    flags = [p.requires_grad for p in model.parameters()]
    jobs = [lambda b=b: [measure(model, b, loss=total) for _ in range(4)] for b in batches]
    for expected, profiles in zip(alone, together(*jobs), strict=True):
        for profile in profiles:
            assert_same(expected, profile)
    assert [p.requires_grad for p in model.parameters()] == flags
    for before, p in zip(gradients, model.parameters(), strict=True):
        assert p.grad is not None and torch.equal(before, p.grad)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_second_thread_does_not_disturb_the_pass_that_is_recorded(build: Any, evaluates: bool) -> None:
    """The other thread begins a pass while the first one is half way through, and ends it after the first."""
    model = build("gpt2").eval()
    mine, theirs = arguments_for(model), arguments_for(model, seed=5)
    expected = measure(model, mine, loss=total)
    gate, begun, both = Gate(model.transformer.h[1].mlp.act), threading.Event(), {}

    def record() -> Profile:
        both["first"] = gate.stop()
        begun.set()
        profile = step(model, mine)
        both["second"][1].set()
        return profile

    def disturb() -> None:
        assert begun.wait(timeout=60) and both["first"][0].wait(timeout=60)
        both["second"] = gate.stop()
        threading.Thread(target=lambda: (both["second"][0].wait(timeout=60), both["first"][1].set())).start()
        with torch.set_grad_enabled(not evaluates):
            total(model(**theirs))

    profile, _ = together(record, disturb)
    assert_same(expected, profile)
    assert any("the model ran 2 times" in note for note in profile.notes) == (not evaluates)
    assert n_hooks(model) == 1  # the gate


def test_a_probe_that_ends_in_the_middle_of_a_pass(build: Any) -> None:
    """The pass goes on as if there had been none, and leaves no hook on its tensors."""
    model = build("gpt_neox").eval()  # a parallel layer keeps its input until the branch is known
    arguments = arguments_for(model)
    expected = total(model(**arguments)).item()
    gate, begun, events = Gate(model.gpt_neox.layers[1].attention), threading.Event(), []
    probe = Probe(model)
    probe.__enter__()
    recorder = probe._recorder

    def run() -> float:
        events.extend(gate.stop())
        begun.set()
        loss = total(model(**arguments))
        loss.backward()
        return float(loss.item())

    def end() -> None:
        assert begun.wait(timeout=60) and events[0].wait(timeout=60)
        probe.__exit__(None, None, None)
        events[1].set()

    found, _ = together(run, end)
    assert found == expected
    assert not recorder._gradients._handles and not recorder._open_sums and not recorder.gradient
    assert n_hooks(model) == 1  # the gate


def test_probes_inside_of_probes(build: Any) -> None:
    model = build("llama").eval()
    arguments = arguments_for(model)
    expected = measure(model, arguments, loss=total)
    with Probe(model) as outer, Probe(model) as inner:
        total(model(**arguments)).backward()
        first, second = outer.profile(), inner.profile()
        within = measure(model, arguments, loss=total)  # a pass of a step that is probed
        assert outer.profile() is not None and inner.profile() is not None
    for profile in (first, second, within):
        assert profile is not None
        assert_same(expected, profile)
    assert n_hooks(model) == 0
