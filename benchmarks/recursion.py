"""Token kernels through an infinitely wide transformer: ours beside neural-tangents and beside dense NumPy.

The network: pre-norm layers of uniform attention (queries of zero) and a ReLU feed-forward, no biases; float64, one
thread, CPU time. All variants start from the same kernel of one sequence, (T, T). It runs in an environment of its own,
which holds neural-tangents and reads our sources.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.timing import compared, take_turns
from signalprop.kernels.buffers import reused
from signalprop.kernels.stack import Stack
from signalprop.kernels.state import State
from signalprop.kernels.tokens import passes
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named, rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme

REQUIREMENTS = (
    "neural-tangents==0.6.5",
    "jax==0.4.38",  # its imports of jax.core find their names in this one
    "jaxlib==0.4.38",
    "numpy>=2",
    "pydantic>=2.7",
    "threadpoolctl>=3",
)
ENVIRONMENT = (
    "neural-tangents",
    REQUIREMENTS,
    {
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "TF_CPP_MIN_LOG_LEVEL": "3",  # its import brings TensorFlow, which reports on GPUs
    },
)
LAYERS, WIDTH = 4, 64
EPSILON = 1e-12  # of the norms; neural-tangents' own
ROUNDS = {128: 15, 512: 9, 2048: 5}
BASE = "ours"


def network(n_layers: int, tokens: int, *, scores: float = 0.0) -> Parametrization:
    """The network as a table: every weight has the standard deviation that neural-tangents' layers give it.

    Args:
        scores: variance of attention scores on uncorrelated normed tokens.
    """
    a = Architecture(
        kind="encoder", n_layers=n_layers, d_model=WIDTH, n_heads=1, d_ff=4 * WIDTH, vocab_size=1000, seq_len=tokens,
        norm_placement="pre", norm_eps=EPSILON, activation="relu", bias=False, positions="none", dropout=0.0,
        attention_dropout=0.0, embedding_dropout=0.0, n_segments=0, final_norm=False,
    )  # fmt: skip
    p = scheme("xavier")(a)
    feed_forward = kind_named("feed_forward").of(p)
    root = WIDTH**-0.5
    query = np.where(feed_forward, 0.0, (scores / WIDTH**2) ** 0.25)
    return p.with_columns(
        skip=np.ones(p.n_sublayers),
        branch=np.ones(p.n_sublayers),
        weight__query=query,
        weight__key=query,
        weight__value=np.where(feed_forward, 0.0, root),
        weight__output=np.where(feed_forward, 0.0, root),
        weight__up=np.where(feed_forward, (2 / WIDTH) ** 0.5, 0.0),
        weight__down=np.where(feed_forward, (4 * WIDTH) ** -0.5, 0.0),
    )


def ours(p: Parametrization, kernel: FloatArray) -> Callable[[], FloatArray]:
    """Our recursion, moments of every point included; the last kernel."""
    stack = Stack(p)

    def run() -> FloatArray:
        last: list[State] = []
        passes(stack, State(kernel), None, see=lambda i, state: last.append(state) if i == stack.n else None)
        return last[0].absolute()

    return run


def our_feed_forwards(p: Parametrization, kernel: FloatArray) -> Callable[[], FloatArray]:
    """Our steps of the feed-forwards alone; the last kernel."""
    stack = Stack(p)

    def run() -> FloatArray:
        state = State(kernel)
        for i in np.flatnonzero(~rows_where(p, lambda kind: kind.attends)).tolist():
            _, state = stack.sublayer(i, state, None)
        return state.absolute()

    return run


def dense(n_layers: int, kernel: FloatArray, *, attention: bool = True) -> Callable[[], FloatArray]:
    """What one writes down first: products of dense matrices, and the arc-cosine kernel of ReLU."""
    average = np.full(kernel.shape, 1 / len(kernel))

    def normed(k: FloatArray) -> FloatArray:
        root = 1 / np.sqrt(np.diagonal(k) + EPSILON)
        return np.asarray(root[:, None] * k * root)

    def run() -> FloatArray:
        k = kernel
        for _ in range(n_layers):
            if attention:
                k = k + average @ normed(k) @ average.T
            r = np.clip(normed(k), -1, 1)
            k = k + (np.sqrt(1 - r * r) + (np.pi - np.arccos(r)) * r) / np.pi
        return k

    return run


def peer(n_layers: int, x: FloatArray, *, attention: bool = True) -> tuple[Callable[[], FloatArray], float]:
    """neural-tangents' compiled kernel function of the network, and the CPU seconds that compiling took."""
    import jax
    from neural_tangents import stax

    def residual(*branch: Any) -> Any:
        normed = stax.serial(stax.LayerNorm(axis=-1, eps=EPSILON), *branch)
        return stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), normed), stax.FanInSum())

    layers = [stax.Dense(WIDTH)]
    for _ in range(n_layers):
        if attention:
            layers.append(residual(stax.GlobalSelfAttention(WIDTH, WIDTH, WIDTH, 1, W_key_std=0.0, W_query_std=0.0)))
        layers.append(residual(stax.Dense(WIDTH, W_std=2**0.5), stax.Relu(), stax.Dense(WIDTH)))
    *_, kernel_fn = stax.serial(*layers)
    compiled = jax.jit(lambda x: kernel_fn(x, None, get="nngp", diagonal_spatial=False))
    device = jax.numpy.asarray(x[None])

    def run() -> FloatArray:
        return np.asarray(compiled(device).block_until_ready())[0, 0]

    began = time.process_time()
    run()
    return run, time.process_time() - began


def functions(n_layers: int, tokens: int) -> Callable[[], None]:
    """An arccosine and a root of as many entries as the halves of the feed-forwards' kernels have, in the cache."""
    entries, square = n_layers * tokens * (tokens + 1) // 2, np.random.default_rng(0).uniform(size=2**13)
    out = np.empty_like(square)

    def run() -> None:
        for start in range(0, entries, len(square)):
            part = slice(0, min(len(square), entries - start))
            np.arccos(square[part], out=out[part])
            np.sqrt(square[part], out=out[part])

    return run


def comparison(tokens: int, rounds: int, attention: bool, n_layers: int = LAYERS) -> str:
    """Times of all variants over ours, and how far apart their last kernels are."""
    x = np.random.default_rng(0).normal(size=(tokens, WIDTH)) + 0.3
    kernel = x @ x.T / WIDTH
    make = ours if attention else our_feed_forwards
    theirs, compiling = peer(n_layers, x, attention=attention)
    variants = {
        BASE: make(network(n_layers, tokens), kernel),
        "ours again": make(network(n_layers, tokens), kernel),
        "dense NumPy": dense(n_layers, kernel, attention=attention),
        "neural-tangents": theirs,
    }
    expected = variants[BASE]()
    apart = {name: f"{np.abs(run() / expected - 1).max():.1e}" for name, run in variants.items() if name != BASE}
    if attention:
        variants["ours, scores of variance 1"] = ours(network(n_layers, tokens, scores=1.0), kernel)
    out = np.empty_like(kernel)

    def moved() -> FloatArray:
        for _ in range(n_layers * (1 + attention)):
            np.copyto(out, kernel)
        return out

    variants["functions alone"] = functions(n_layers, tokens)
    variants["floor"] = moved
    title = f"T = {tokens}, {'with attention' if attention else 'feed-forwards only'}."
    with reused():
        seconds = take_turns(variants, rounds)
    columns = {"kernel apart by": apart, "compiling": {"neural-tangents": f"{compiling:.1f} s"}}
    return compared(title, seconds, BASE, **columns)


TITLE = "Kernel recursion"
ABOUT = f"""\
One sequence's token kernel, T × T in float64, through {LAYERS} pre-norm layers of uniform attention (queries of zero)
and a ReLU feed-forward at infinite width, forward only. Three programs compute the same kernel:

- *ours*: `signalprop.kernels`, which uses that uniform attention is an average and that kernels are symmetric; with
  attention it also takes the moments of every probe point, as a prediction does;
- *dense NumPy*: `A @ K @ A.T` and the arc-cosine formula, as one writes it down first;
- *neural-tangents*: `stax.GlobalSelfAttention`, `LayerNorm`, `Relu` and residual sums, NNGP kernel only, compiled by
  `jax.jit` for one thread; compiling is not in its times but in a column of its own. Its attention takes any weights
  and is dense for it.

The floor copies the kernel once per sublayer (8 T² bytes read, 8 T² written), into memory that is there. Ours uses its
matrices again from run to run, as it does from layer to layer. A ratio above 1 is slower than ours."""


READING = """\
*Kernel apart by*: largest relative difference of an entry of the last kernel from ours. With attention, dense products
grow as T³ and ours as T²; without, all three make a few passes of elementwise functions, and ours makes some thirty
calls of NumPy a step, which at 128 tokens weigh as much as the arithmetic. There the arrays of our feed-forwards'
steps alone, in a bare loop, take 1.1 times as long as dense NumPy's (correlations are made of what norms leave, which
keeps their epsilon), and ours 2.0 times: being faster there, once a goal, is out of reach. *Scores of variance 1*: what
ours takes where queries are random, for which the others have no closed form. *Functions alone*: one arccosine and one
root for every entry of half a kernel, per feed-forward, in the cache: less than that and a copy no program in float64
can take that works with ReLU's formula. The floor alone is out of reach: up to 512 tokens a copy stays in the cache."""


def measured() -> Iterator[str]:
    """The section of the page."""
    warnings.filterwarnings("ignore", category=UserWarning, module="neural_tangents")  # on what FanIn assumes
    for attention in (True, False):
        for tokens, rounds in ROUNDS.items():
            yield comparison(tokens, rounds, attention)
