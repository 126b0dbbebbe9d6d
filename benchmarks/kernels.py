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
