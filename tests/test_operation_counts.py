"""Guards against lost speed that need no clock: calls, array operations, bytes and imports, counted.

A count per sublayer is the difference between two depths, so that what is done once drops out. Bounds stand a few
percent above what is counted now (Python 3.11) or at it (ATen operations of the PyTorch that CI pins): one that is met
no longer means that a change made every sublayer dearer. Raise a bound only with the reason in its comment.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.models import hugging_face
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import signalprop as sp
from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.shaping import ESPA
from signalprop.models.shaping import shaped_attention, torch_shape
from signalprop.models.token_positions import Positions
from signalprop.network.inputs import zipf
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.feed_forward.moments import FeedForwardMoments
from signalprop.theory.elements import Branch
from signalprop.theory.network import predict_moments

Action = Callable[[], Any]
INPUTS = zipf(32_000)


def calls(action: Action) -> int:
    """Function calls, of Python's functions and of built-in ones."""
    count = 0

    def see(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # libraries (hypothesis) have themselves called at every collection
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def peak_bytes(action: Action) -> int:
    """Largest memory held at a time, of Python's and NumPy's objects made in the action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- predictions ---------------------------------------------------------------------------------------------------


def network(n_layers: int, **changes: Any) -> Parametrization:
    return sp.scheme("xavier")(sp.Architecture.preset("tgs", n_layers=n_layers, **changes))


def per_sublayer(**changes: Any) -> float:
    """Calls of a prediction per sublayer, from 8 and 24 layers."""
    few, many = network(8, **changes), network(24, **changes)
    predict_moments(few, INPUTS)  # tables that are made once
    counts = [calls(lambda p=p: predict_moments(p, INPUTS)) for p in (few, many)]  # type: ignore[misc]
    return (counts[1] - counts[0]) / 32


@pytest.mark.parametrize(("placement", "bound"), [("pre", 180), ("post", 184)])
def test_a_prediction_costs_per_sublayer(placement: str, bound: int) -> None:
    assert per_sublayer(norm_placement=placement) <= bound


def test_a_branch_that_is_computed_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    once = FeedForwardMoments.forward

    def twice(*arguments: Any) -> Branch:
        once(*arguments)
        return once(*arguments)

    monkeypatch.setattr(FeedForwardMoments, "forward", twice)
    assert per_sublayer() > 180


def test_a_prediction_grows_as_its_depth() -> None:
    """Every sublayer costs the same: none of the passes is quadratic in the depth."""
    counts = [calls(lambda n=n: predict_moments(network(n), INPUTS)) for n in (16, 32, 64)]  # type: ignore[misc]
    assert (counts[2] - counts[1]) == pytest.approx(2 * (counts[1] - counts[0]), rel=0.01)


def test_a_prediction_holds_few_numbers_per_sublayer() -> None:
    # 12 columns of the forward pass, 6 of the result, their copies on the way, and the backward maps: 736 bytes;
    # with the sizes of queries and keys that QK-norm's epsilon asks for, 760
    few, many = network(32), network(64)
    held = [peak_bytes(lambda p=p: predict_moments(p, INPUTS)) for p in (few, many)]  # type: ignore[misc]
    assert (held[1] - held[0]) / 64 <= 780


def sweep(size: int) -> Parametrization:
    base = network(8)
    branch = np.random.default_rng(0).uniform(0.1, 1, (size, 1)) * np.ones(base.n_sublayers)
    return base.with_columns(branch=branch)


def test_a_sweep_makes_as_many_calls_whatever_its_size() -> None:
    predict_moments(sweep(2), INPUTS)
    assert calls(lambda: predict_moments(sweep(300), INPUTS)) == calls(lambda: predict_moments(sweep(3), INPUTS))


def test_a_sweep_holds_few_numbers_per_member_and_sublayer() -> None:
    held = [peak_bytes(lambda p=sweep(size): predict_moments(p, INPUTS)) for size in (500, 1500)]  # type: ignore[misc]
    assert (held[1] - held[0]) / 1000 / 16 / 8 <= 79  # 74 doubles


def test_kernels_take_few_matrices() -> None:
    """Attention on token kernels: matrices of (T, T) that are held at a time."""

    def held(causal: bool, scores: float) -> float:
        sizes = []
        for t in (200, 400):
            kernel = np.full((t, t), 0.3) + 0.7 * np.eye(t)
            made = TokenAttention(kernel=kernel, qk=scores, d_model=64, causal=causal)
            made.forward()
            fresh = TokenAttention(kernel=kernel, qk=scores, d_model=64, causal=causal)
            sizes.append(peak_bytes(fresh.forward))
        return (sizes[1] - sizes[0]) / (8 * (400**2 - 200**2))

    assert held(False, 0.0) <= 1.2  # the result
    # of a pair of rows: lengths, ln nP and ln nJ at both scores, slopes, and the overlaps of weights and of Jacobians
    assert held(False, 1.0) <= 19
    assert held(True, 1.0) <= 21


# --- start-up ------------------------------------------------------------------------------------------------------

DEPENDENCIES = """
import sys, numpy, typer
from pydantic import BaseModel, Field, TypeAdapter, model_validator
class Least(BaseModel):
    width: int = Field(1, ge=1)
print(*sys.modules)
"""
COMMAND = """
import sys
from signalprop.cli import run
run(["predict", "tgs", "--layers", "2"])
print(*sys.modules)
"""


def test_predict_imports_little_beside_its_dependencies() -> None:
    loaded = [
        set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
            .stdout.splitlines()[-1].split())
        for code in (DEPENDENCIES, COMMAND)
    ]  # fmt: skip
    own = {name for name in loaded[1] - loaded[0] if name.partition(".")[0] == "signalprop"}
    assert len(own) <= 125  # 120: 20 of them name the commands, 17 are folders of kinds and what these are
    assert len(loaded[1] - loaded[0] - own) <= 30  # 19 to 25 from the standard library, by release


# --- PyTorch -------------------------------------------------------------------------------------------------------

pinned = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counts are those of torch 2.13")


class Operations(TorchDispatchMode):
    """Counts ATen operations, those of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(action: Action) -> int:
    with Operations() as mode:
        action()
    return mode.count


def model(family: str, n_layers: int) -> Any:
    torch.manual_seed(0)
    return hugging_face(family, n_layers, width=32, heads=2, vocab_size=50, tokens=16).train()


def step(network: nn.Module) -> None:
    ids = torch.arange(32).reshape(2, 16)
    network(input_ids=ids, labels=ids).loss.backward()


def added_by(family: str, prepare: Callable[[Any], Any], run: Callable[[Any], Any] = step) -> float:
    """ATen operations of a training step per sublayer beyond those of the model as it is."""
    counts = []
    for n_layers in (2, 4):
        plain, changed = model(family, n_layers), model(family, n_layers)
        prepare(changed)
        step(plain), step(changed), run(changed)  # gradients have their memory
        counts.append(operations(lambda c=changed: run(c)) - operations(lambda p=plain: step(p)))  # type: ignore[misc]
    return (counts[1] - counts[0]) / 4


def probed(network: nn.Module) -> None:
    with sp.Probe(network) as probe:
        step(network)
        assert probe.profile() is not None


def nothing(_: nn.Module) -> None:
    pass


# A sublayer has two tensors forward (stream, branch) and their gradients; without a norm behind the sum both gradients
# are one tensor. Of each: a view without graph, the sum over tokens, its sum and its norm, the norm of all, two reads.
@pinned
@pytest.mark.parametrize(("family", "tensors"), [("gpt2", 3), ("llama", 3), ("bert", 4)])
def test_a_probe_adds_seven_operations_per_tensor(family: str, tensors: int) -> None:
    assert added_by(family, nothing, probed) <= 7 * tensors


@pinned
def test_one_more_reading_of_every_branch_is_noticed() -> None:
    def sum_up(_: nn.Module, __: Any, out: Any) -> None:
        (out[0] if isinstance(out, tuple) else out).sum()

    def read(network: Any) -> None:
        for layer in network.transformer.h:
            layer.attn.register_forward_hook(sum_up)
            layer.mlp.register_forward_hook(sum_up)

    assert added_by("gpt2", read, probed) > 21


# Fixed multipliers cost what a scaled sum costs; a trained one per channel a product forward, two and a sum over tokens
# on the way back, and its own gradient.
@pinned
@pytest.mark.parametrize(
    ("family", "scheme", "bound"),
    [("gpt2", "deepscalelm", 0.5), ("llama", "deepscalelm", 0.5), ("bert", "deepscalelm", 0), ("gpt2", "layerscale", 8),
     ("llama", "layerscale", 8), ("gpt2", "lns", 2), ("llama", "lns", 2)],
)  # fmt: skip
def test_multipliers_add_operations(family: str, scheme: str, bound: float) -> None:
    assert added_by(family, lambda network: sp.apply(network, scheme, seed=0)) <= bound


@pinned
def test_one_more_product_per_branch_is_noticed() -> None:
    def scaled(network: Any) -> None:
        sp.apply(network, "deepscalelm", seed=0)
        for layer in network.transformer.h:
            layer.mlp.register_forward_hook(lambda _, __, out: out * 1.0)

    assert added_by("gpt2", scaled) > 0.5


@pinned
@pytest.mark.parametrize(("length", "bound"), [(128, 32), (256, 32), (512, 2 * 48 - 8), (1024, 4 * 48 - 8)])
def test_shaped_attention_adds_operations(length: int, bound: int) -> None:
    """Forward and backward, beyond plain attention; longer sequences go in blocks of 256 queries, 48 for each."""
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    at = Positions.of_length(length, torch.device("cpu"))
    made = torch_shape([ESPA(0.2, 0.3)], length)
    assert made is not None

    def plain() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def shaped() -> None:
        shaped_attention(made, q, k, v, at).sum().backward()

    plain(), shaped()  # gradients have their memory
    assert operations(shaped) - operations(plain) <= bound
