"""Guards against lost speed that need no clock: how calls grow with depth and sweep, and ATen operations added.

A count per sublayer is the difference between two depths, so that what is done once drops out. Bounds stand at what is
counted now (of the PyTorch that CI pins). Raise one only with the reason in its comment.
"""

from __future__ import annotations

import gc
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
from torch.utils.flop_counter import flop_registry

import signalprop as sp
from signalprop.data.batches import Batch, default_statistics
from signalprop.kernels.bidirectional_attention import UnmaskedAttention
from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.causal_shaping import ESPA
from signalprop.models.shaping import shaped_attention, torch_shape
from signalprop.network.inputs import zipf
from signalprop.network.parametrization import Parametrization
from signalprop.ranking import predict_all_for_ranking
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


LATENT = {"branches": ("latent_attention", "feed_forward"), "activation": "silu"}


# Calls of a sublayer, mean of both; those of activations without a closed form by Hermite's series.
@pytest.mark.parametrize(("changes", "bound"), [({}, 125), ({"activation": "silu"}, 137), (LATENT, 194)])
def test_a_prediction_grows_as_its_depth(changes: dict[str, Any], bound: int) -> None:
    """Every sublayer costs the same: none of the passes is quadratic in the depth."""
    predict_moments(network(64, **changes), INPUTS)  # tables that are made once
    counts = [calls(lambda n=n: predict_moments(network(n, **changes), INPUTS)) for n in (16, 32, 64)]  # type: ignore[misc]
    assert (counts[2] - counts[1]) == pytest.approx(2 * (counts[1] - counts[0]), rel=0.02)
    assert counts[2] - counts[1] <= 64 * bound


def test_what_sp_predict_adds_grows_as_the_depth() -> None:
    """Bands are derived when they are read: a prediction costs what its passes cost."""
    sp.predict(network(64), INPUTS)
    counts = [calls(lambda n=n: sp.predict(network(n), INPUTS)) for n in (16, 32, 64)]  # type: ignore[misc]
    assert (counts[2] - counts[1]) == pytest.approx(2 * (counts[1] - counts[0]), rel=0.02)
    assert counts[2] - counts[1] <= 64 * 126


@pytest.mark.parametrize(("preset", "bound"), [("gpt2", 681), ("qwen3-30b-a3b", 1060), ("olmo2-7b", 895)])
def test_a_prediction_on_a_grid_grows_as_its_depth(preset: str, bound: int) -> None:
    """Presets at their own contexts: calls of a sublayer, both ways; tests before it move them by four."""
    counts = []
    for n in (4, 8):
        p = sp.scheme("huggingface")(sp.Architecture.preset(preset, n_layers=n))
        sp.predict(p)  # tables that are made once
        counts.append(calls(lambda p=p: sp.predict(p)))  # type: ignore[misc]
    assert counts[1] - counts[0] <= 8 * bound


def test_schemes_that_are_ranked_together_make_the_calls_of_one() -> None:
    """Calls of a sublayer, both ways, of eight tables beside those of two."""

    def ranked(n_layers: int, members: int) -> int:
        a = sp.Architecture.preset("gpt2", n_layers=n_layers, seq_len=128)
        inputs = default_statistics(a)
        tables = [sp.scheme("ds-init", alpha=1 - 0.05 * k)(a) for k in range(members)]
        list(predict_all_for_ranking(tables, inputs))
        return calls(lambda: list(predict_all_for_ranking(tables, inputs)))

    two, eight = (ranked(8, members) - ranked(4, members) for members in (2, 8))
    assert eight == two <= 8 * 826


def sweep(size: int) -> Parametrization:
    base = network(8)
    branch = np.random.default_rng(0).uniform(0.1, 1, (size, 1)) * np.ones(base.n_sublayers)
    return base.with_columns(branch=branch)


def test_a_sweep_makes_as_many_calls_whatever_its_size() -> None:
    predict_moments(sweep(2), INPUTS)
    assert calls(lambda: predict_moments(sweep(300), INPUTS)) == calls(lambda: predict_moments(sweep(3), INPUTS))


def test_kernels_take_few_matrices() -> None:
    """Attention on token kernels: matrices of (T, T) that are held at a time."""

    def held(causal: bool, scores: float) -> float:
        sizes = []
        for t in (200, 400):
            kernel = np.full((t, t), 0.3) + 0.7 * np.eye(t)
            made = TokenAttention if causal else UnmaskedAttention
            made(kernel=kernel, qk=scores, d_model=64).forward()  # tables that are made once
            fresh = made(kernel=kernel, qk=scores, d_model=64)
            sizes.append(peak_bytes(fresh.forward))
        return (sizes[1] - sizes[0]) / (8 * (400**2 - 200**2))

    assert held(False, 0.0) <= 1.2  # the result
    # of a pair of rows: lengths, ln nP and ln nJ at both scores, slopes, and the overlaps of weights and of Jacobians
    assert held(False, 1.0) <= 19
    assert held(True, 1.0) <= 21


# --- PyTorch -------------------------------------------------------------------------------------------------------

pinned = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counts are those of torch 2.13")


class Operations(TorchDispatchMode):
    """Counts ATen operations, those of the backward pass too, and the floating-point operations of products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        out = function(*args, **(kwargs or {}))
        if function._overloadpacket in flop_registry:
            self.flops += flop_registry[function._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def operations(action: Action) -> int:
    with Operations() as mode:
        action()
    return mode.count


def flops(action: Action) -> int:
    with Operations() as mode:
        action()
    return mode.flops


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


# A fixed multiplier costs a product forward and one on the way back; a trained one per channel a product forward, two
# and a sum over tokens on the way back, and its own gradient.
@pinned
@pytest.mark.parametrize(
    ("family", "scheme", "bound"),
    [("gpt2", "stable-resnet", 2), ("bert", "deepnorm", 2), ("llama", "layerscale", 8), ("gpt2", "lns", 2)],
)
def test_multipliers_add_operations(family: str, scheme: str, bound: float) -> None:
    assert added_by(family, lambda network: sp.apply(network, scheme, seed=0)) <= bound


@pinned
@pytest.mark.parametrize(("length", "bound"), [(128, 32), (256, 32), (512, 2 * 48 - 8), (1024, 4 * 48 - 8)])
def test_shaped_attention_adds_operations(length: int, bound: int) -> None:
    """Forward and backward, beyond plain attention; longer sequences go in blocks of 256 queries, 48 for each."""
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    made = torch_shape([ESPA(0.2, 0.3)], length)
    assert made is not None

    def plain() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def shaped() -> None:
        shaped_attention(made, q, k, v).sum().backward()

    plain(), shaped()  # gradients have their memory
    assert operations(shaped) - operations(plain) <= bound


# One to find the stream, one to prove its sums, three for the axis of tokens, of two sequences: 8, of which all but the
# first end before the head.
@pinned
def test_an_anatomy_takes_few_passes() -> None:
    network = model("llama", 4).eval()
    one = flops(lambda: network(input_ids=torch.arange(7)[None]))
    assert flops(lambda: sp.anatomy(network).streams) <= 7.8 * one
    seen: list[int] = []
    network.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    found = sp.anatomy(network)
    assert found.proved and found.mapping.sublayers
    assert len(seen) <= 5


# In passes forward and backward over the same 16 sequences; Jacobians, of two of them, are part of it.
@pinned
@pytest.mark.parametrize(("family", "bound"), [pytest.param("gpt2", 2.05, marks=pytest.mark.slow), ("llama", 1.6)])
def test_a_diagnosis_takes_few_passes(family: str, bound: float) -> None:
    network = model(family, 3).eval()
    ids = torch.randint(0, 50, (16, 16), generator=torch.Generator().manual_seed(0))
    one = flops(lambda: network(input_ids=ids, labels=ids).loss.backward())
    batch = Batch(tokens=ids.numpy(), targets=np.roll(ids.numpy(), -1, 1))
    assert flops(lambda: sp.diagnose(network, [batch])) <= bound * one
