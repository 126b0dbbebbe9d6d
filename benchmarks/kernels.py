"""Token kernels: signalprop's recursion beside neural-tangents and dense NumPy."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers import PEERS, DidNotRun, result_of
from benchmarks.peers.kernel_recursion import LAYERS, ROUNDS, comparison
from benchmarks.timing import compared

TITLE = "Kernel recursion"
ABOUT = f"""
`python -m benchmarks kernels`: one sequence's token kernel, T x T in float64, through {LAYERS} pre-norm layers of
uniform attention (queries of zero) and a ReLU feed-forward at infinite width, forward only; one thread, CPU time.
*signalprop* takes the moments of every point too, as a prediction does; *dense NumPy* is `A @ K @ A.T` and the
arc-cosine formula; *neural-tangents* is its NNGP kernel compiled by `jax.jit`, without the time that compiling takes.
*Apart*: largest relative difference of an entry of the last kernel from signalprop's. The floor copies the kernel once
per sublayer.
"""
READING = """
Tried as extras, each on one thread, to be taken where it wins 3 times. **numba** 0.68: the dual of ReLU for a kernel of
1,024 tokens in 9.6 ms where NumPy takes 14.5 (1.5 times), a chain of exponentials, logarithms and roots of 10,000
members, as sweeps have, in the same time (.7 to 1.0 times); importing it takes .36 s and compiling one function .8,
more than a prediction of 768 layers. **torch** 2.13: the same dual in 25.5 ms by its own operations (NumPy 17.3 in that
run), in 6.5 compiled (2.6 times), after 5.5 s of compiling. Neither wins 3 times, so neither is an extra.
"""
ONE_THREAD = {
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def measured() -> Iterator[str]:
    """The section of the page."""
    try:
        found = result_of("neural-tangents", "benchmarks.peers.kernel_recursion", "neural-tangents", **ONE_THREAD)
    except DidNotRun as reason:
        yield f"{' '.join(PEERS['neural-tangents'])} did not run here: {reason}"
        found = {str(tokens): comparison(tokens, rounds, False) for tokens, rounds in ROUNDS.items()}
    for tokens, one in found.items():
        apart = {name: f"{value:.1e}" for name, value in one["apart"].items()}
        took = f", compiling took neural-tangents {one['compiling']:.1f} s" if one["compiling"] else ""
        yield compared(f"T = {tokens}{took}.", one["seconds"], "signalprop", apart=apart)
