"""How time and memory grow: predictions, sweeps, token kernels, simulations.

CPU time, one thread; memory is the largest of a process of its own, less that of a process that only gets ready.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.memory import peak
from benchmarks.prediction import INPUTS, members, network
from benchmarks.recursion import network as kernel_network
from benchmarks.recursion import ours as kernel_recursion
from benchmarks.timing import duration, table, take_turns
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.results.cost import count_parameters, train_flops
from signalprop.schemes import scheme
from signalprop.theory.network import predict_moments

DEPTHS = (24, 96, 384, 1536, 6144, 10_000)
SIZES = (1, 10, 100, 1000, 10_000)
KERNEL_TOKENS = (128, 256, 512, 1024)
KERNEL_DEPTHS = (2, 8, 32)
SIMULATED_DEPTHS, SIMULATED_WIDTHS = (6, 24, 96), (128, 256, 512)


@dataclass(frozen=True)
class Case:
    """One point of a curve.

    Attributes:
        curve: what grows. at: with what, and how much of it there is. run: what is timed.
        floor: what the same job costs at least; of a prediction in depth and size that of the smallest, times how much
            larger it is.
    """

    curve: str
    at: int
    run: Callable[[], Any]
    floor: Callable[[], Any] | None = None


def cases() -> list[tuple[str, int, list[Case]]]:
    """(curve, rounds, its points)."""
    depth = [Case("prediction, layers", n, lambda p=network(n): predict_moments(p, INPUTS)) for n in DEPTHS]
    size = [Case("sweep, members", n, lambda p=members(n, 24): predict_moments(p, INPUTS)) for n in SIZES]
    return [
        ("prediction, layers", 5, depth),
        ("sweep, members", 5, size),
        ("kernels, tokens", 5, [_kernel("kernels, tokens", t, 4, t) for t in KERNEL_TOKENS]),
        ("kernels, layers", 5, [_kernel("kernels, layers", n, n, 256) for n in KERNEL_DEPTHS]),
        ("simulation, layers", 5, [_simulation("simulation, layers", n, n, 128) for n in SIMULATED_DEPTHS]),
        ("simulation, width", 5, [_simulation("simulation, width", w, 12, w) for w in SIMULATED_WIDTHS]),
    ]


def _kernel(curve: str, at: int, n_layers: int, tokens: int) -> Case:
    """Token kernels of attention with random queries and of feed-forwards; the floor copies a kernel per sublayer."""
    kernel = 0.3 + 0.7 * np.eye(tokens)
    out = np.empty_like(kernel)

    def moved() -> None:
        for _ in range(2 * n_layers):
            np.copyto(out, kernel)

    return Case(curve, at, kernel_recursion(kernel_network(n_layers, tokens, scores=1.0), kernel), moved)


def simulated(n_layers: int, width: int) -> Architecture:
    """What is simulated, with sequences of 128 tokens."""
    return Architecture.preset("tgs", n_layers=n_layers, d_model=width, n_heads=width // 64, seq_len=128)


def _simulation(curve: str, at: int, n_layers: int, width: int) -> Case:
    """One random network, forward and backward; the floor does its products as one of square matrices after another."""
    a = simulated(n_layers, width)
    p = scheme("xavier")(a)
    side = 512
    left, right = torch.randn(side, side), torch.randn(side, side)
    flops = train_flops(p, 4, 1)
    products = max(1, round((flops["total"] - flops["embeddings"]) / (2 * side**3)))  # embeddings are looked up

    def multiply() -> None:
        for _ in range(products):
            left @ right

    return Case(curve, at, lambda: simulate(p, n_seeds=1, batch_size=4), multiply)


def curve(title: str, rounds: int, points: Sequence[Case]) -> str:
    """Seconds of every point, its share of the floor's, and the exponent of its growth from the point before."""
    actions: dict[str, Callable[[], Any]] = {f"{point.at}": point.run for point in points}
    actions |= {f"{point.at} floor": point.floor for point in points if point.floor is not None}
    seconds = take_turns(actions, rounds)
    found = [float(np.median(seconds[f"{point.at}"])) for point in points]
    pairs = itertools.pairwise(zip(found, points, strict=True))
    grown = ["", *(f"{math.log(b / a) / math.log(q.at / p.at):.2f}" for (a, p), (b, q) in pairs)]
    rows = []
    for point, one, exponent in zip(points, found, grown, strict=True):
        floor = seconds.get(f"{point.at} floor")
        shares = [own / least for own, least in zip(seconds[f"{point.at}"], floor, strict=True)] if floor else []
        over = f"{np.median(shares):.1f}" if shares else ""
        rows.append([f"{point.at:,}", duration(one), f"{1e6 * one / point.at:,.1f} µs", exponent, over])
    what, unit = title.split(", ")
    header = [unit, "time", f"per unit of {unit}", "exponent", "over the floor"]
    return f"{what.capitalize()}:\n\n{table(header, rows)}"


# --- memory of a simulation ------------------------------------------------------------------------------------------

SEQUENCES = 16
_SIMULATE = """
import sys
from benchmarks.scaling import INPUTS, SEQUENCES, simulated
from signalprop.schemes import scheme
from signalprop.measurement.simulation import simulate
p = scheme("xavier")(simulated(int(sys.argv[1]), int(sys.argv[2])))
simulate(p, INPUTS, n_seeds=1, batch_size=SEQUENCES)
"""


def memory(repeats: int = 2) -> str:
    """Largest memory of simulations beyond that of one of a single layer of width 64."""

    def most(n_layers: int, width: int) -> float:
        arguments = ["-c", _SIMULATE, str(n_layers), str(width)]
        return float(np.median([peak(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"})[0] for _ in range(repeats)]))

    ready, rows = most(1, 64), []
    for n_layers, width in [(n, 128) for n in (6, 24, 96)] + [(24, width) for width in (256, 512)]:
        a = simulated(n_layers, width)
        stream = SEQUENCES * a.seq_len * width * 4  # bytes, float32
        sizes = (most(n_layers, width) - ready, (2 * n_layers + 1) * stream, count_parameters(a)["total"] * 4)
        rows.append([str(n_layers), str(width), *(f"{size / 1e6:.0f} MB" for size in sizes)])
    return (
        f"Memory of a simulation, {SEQUENCES} sequences of 128 tokens, forward and backward, beyond a process that has "
        f"simulated one layer of width 64 ({ready / 1e6:.0f} MB). It keeps the stream that enters every sublayer "
        "(*stream inputs*) and one sublayer's weights at a time, never all *parameters*:\n\n"
    ) + table(["layers", "width", "largest memory", "stream inputs", "parameters"], rows)


# --- the page ------------------------------------------------------------------------------------------------------

TITLE = "Growth with size"
ABOUT = """\
CPU time of a prediction by depth (closed form, up to 10,000 layers), of a sweep by its members (24 layers), of token
kernels by tokens (4 layers) and by layers (256 tokens), and of one simulated network by layers (width 128) and by
width (12 layers), forward and backward. *Exponent*: k where the time grew as (what grows)^k from the line above.
Floors: of kernels, copying one per sublayer; of simulations, its floating-point operations done as products of square
matrices of 512."""


def measured() -> Iterator[str]:
    """The section of the page."""
    for title, rounds, points in cases():
        yield curve(title, rounds, points)
    yield memory()
