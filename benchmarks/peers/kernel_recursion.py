"""Token kernels by three programs, in turns: `python -m benchmarks.peers.kernel_recursion [neural-tangents]`, as JSON.

Pre-norm layers of uniform attention (queries of zero) and a ReLU feed-forward at infinite width, without biases.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.timing import one_thread, take_turns
from signalprop.kernels.passes import passes
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme

LAYERS, WIDTH, EPSILON = 4, 64, 1e-12  # epsilon of the norms: neural-tangents' own
ROUNDS = {128: 11, 512: 7, 1024: 3}  # by tokens
Run = Callable[[], FloatArray]


def network(tokens: int) -> Parametrization:
    """Every weight has the standard deviation that neural-tangents' layers give it."""
    a = Architecture(
        kind="encoder", n_layers=LAYERS, d_model=WIDTH, n_heads=1, d_ff=4 * WIDTH, vocab_size=1000, seq_len=tokens,
        norm_placement="pre", norm_eps=EPSILON, activation="relu", bias=False, positions="none", dropout=0.0,
        attention_dropout=0.0, embedding_dropout=0.0, n_segments=0, final_norm=False,
    )  # fmt: skip
    p = scheme("xavier")(a)
    feed_forward, root = kind_named("feed_forward").of(p), WIDTH**-0.5
    std = {"query": 0.0, "key": 0.0, "value": root, "output": root}
    std |= {"up": (2 / WIDTH) ** 0.5, "down": (4 * WIDTH) ** -0.5}
    columns = {f"weight__{r}": np.where(feed_forward == (r in ("up", "down")), s, 0.0) for r, s in std.items()}
    return p.with_columns(skip=np.ones(p.n_sublayers), branch=np.ones(p.n_sublayers), **columns)


def ours(tokens: int, kernel: FloatArray) -> Run:
    """signalprop's recursion, with the moments of every point; the last kernel."""
    stack = Stack(network(tokens))

    def run() -> FloatArray:
        last: list[State] = []
        passes(stack, State(kernel), None, record=lambda i, state: last.append(state) if i == stack.n else None)
        return np.asarray(last[0].absolute())

    return run


def dense(kernel: FloatArray) -> Run:
    """What one writes down first: products of dense matrices, and the arc-cosine kernel of ReLU."""
    average = np.full(kernel.shape, 1 / len(kernel))

    def normed(k: FloatArray) -> FloatArray:
        root = 1 / np.sqrt(np.diagonal(k) + EPSILON)
        return np.asarray(root[:, None] * k * root)

    def run() -> FloatArray:
        k = kernel
        for _ in range(LAYERS):
            k = k + average @ normed(k) @ average.T
            r = np.clip(normed(k), -1, 1)
            k = k + (np.sqrt(1 - r * r) + (np.pi - np.arccos(r)) * r) / np.pi
        return k

    return run


def neural_tangents(x: FloatArray) -> Run:
    """Its compiled kernel function of the network."""
    import jax  # type: ignore[import-not-found]
    from neural_tangents import stax  # type: ignore[import-not-found]

    def residual(*branch: Any) -> Any:
        normed = stax.serial(stax.LayerNorm(axis=-1, eps=EPSILON), *branch)
        return stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), normed), stax.FanInSum())

    layers = [stax.Dense(WIDTH)]
    for _ in range(LAYERS):
        layers.append(residual(stax.GlobalSelfAttention(WIDTH, WIDTH, WIDTH, 1, W_key_std=0.0, W_query_std=0.0)))
        layers.append(residual(stax.Dense(WIDTH, W_std=2**0.5), stax.Relu(), stax.Dense(WIDTH)))
    *_, kernel_fn = stax.serial(*layers)
    compiled, device = (
        jax.jit(lambda x: kernel_fn(x, None, get="nngp", diagonal_spatial=False)),
        jax.numpy.asarray(x[None]),
    )
    return lambda: np.asarray(compiled(device).block_until_ready())[0, 0]


def comparison(tokens: int, rounds: int, peer: bool) -> dict[str, Any]:
    """CPU seconds by variant, how far last kernels are from ours, and what compiling took."""
    x = np.random.default_rng(0).normal(size=(tokens, WIDTH)) + 0.3
    kernel = x @ x.T / WIDTH
    variants = {
        "signalprop": ours(tokens, kernel),
        "signalprop again": ours(tokens, kernel),
        "dense NumPy": dense(kernel),
    }
    compiling = 0.0
    if peer:
        variants["neural-tangents"] = neural_tangents(x)
        began = time.process_time()
        variants["neural-tangents"]()
        compiling = time.process_time() - began
    expected = variants["signalprop"]()
    apart = {name: float(np.abs(run() / expected - 1).max()) for name, run in variants.items()}
    out = np.empty_like(kernel)
    floor = {"floor: copies": lambda: [np.copyto(out, kernel) for _ in range(2 * LAYERS)]}
    return {"seconds": take_turns({**variants, **floor}, rounds), "apart": apart, "compiling": compiling}


if __name__ == "__main__":
    one_thread()
    print(json.dumps({tokens: comparison(tokens, rounds, len(sys.argv) > 1) for tokens, rounds in ROUNDS.items()}))
