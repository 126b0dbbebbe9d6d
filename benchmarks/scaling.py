"""How time and memory grow: predictions, sweeps, token kernels, simulations.

    python -m benchmarks.scaling [--json FILE]

CPU time, one thread; memory is the largest of a process of its own, less that of a process that only gets ready.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.memory import peak
from benchmarks.prediction import INPUTS, members, network
from benchmarks.recursion import network as kernel_network
from benchmarks.recursion import ours as kernel_recursion
from benchmarks.timing import command_line, one_thread, summary, take_turns, write_rows
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.cost import count_parameters, train_flops
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


def curve_rows(curve: str, rounds: int, points: Sequence[Case]) -> list[dict[str, Any]]:
    """Seconds of every point, its share of the floor's, and the exponent of its growth from the point before."""
    actions: dict[str, Callable[[], Any]] = {}
    for point in points:
        actions[f"{point.at}"] = point.run
        if point.floor is not None:
            actions[f"{point.at} floor"] = point.floor
    seconds = take_turns(actions, rounds)
    rows: list[dict[str, Any]] = []
    for point in points:
        own, floor = seconds[f"{point.at}"], seconds.get(f"{point.at} floor")
        found = summary([a / b for a, b in zip(own, floor, strict=True)]) if floor else None
        rows.append({"curve": curve, "at": point.at, "seconds": summary(own), "over_floor": found,
                     "exponent": exponent(rows[-1], point.at, own) if rows else None})  # fmt: skip
    return rows


def exponent(before: Mapping[str, Any], at: int, seconds: Sequence[float]) -> float:
    """k where time grew as (what grows)^k from one point to the next."""
    return math.log(float(np.median(seconds)) / before["seconds"]["median"]) / math.log(at / before["at"])


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


def memory_rows(repeats: int = 2) -> Iterator[dict[str, Any]]:
    """Largest memory of simulations beyond that of one of a single layer of width 64."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def most(n_layers: int, width: int) -> float:
        arguments = ["-c", _SIMULATE, str(n_layers), str(width)]
        return float(np.median([peak(arguments, env=environment)[0] for _ in range(repeats)]))

    ready = most(1, 64)
    shapes = [(n, 128) for n in (6, 24, 96)] + [(24, width) for width in (256, 512)]
    for n_layers, width in shapes:
        a = simulated(n_layers, width)
        stream = SEQUENCES * a.seq_len * width * 4  # bytes, float32
        parameters = count_parameters(a)["total"] * 4
        yield {
            "curve": "memory of a simulation", "layers": n_layers, "width": width,
            "bytes": most(n_layers, width) - ready, "ready_bytes": ready,
            "streams_bytes": (2 * n_layers + 1) * stream, "parameters_bytes": parameters,
        }  # fmt: skip


# --- the page ------------------------------------------------------------------------------------------------------

TITLE = "Growth with size"
ABOUT = """\
CPU time of a prediction by depth (closed form, up to 10,000 layers), of a sweep by its members (24 layers), of token
kernels by tokens (4 layers) and by layers (256 tokens), and of one simulated network by layers (width 128) and by
width (12 layers), forward and backward. *Exponent*: k where the time grew as (what grows)^k from the line above.
Floors: of kernels, copying one per sublayer; of simulations, its floating-point operations done as products of square
matrices of 512."""
_UNITS = {"prediction, layers": "layers", "sweep, members": "members", "kernels, tokens": "tokens",
          "kernels, layers": "layers", "simulation, layers": "layers", "simulation, width": "width"}  # fmt: skip


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables and what they say."""
    from benchmarks.page import table

    parts = []
    for curve, unit in _UNITS.items():
        mine = [row for row in rows if row["curve"] == curve]
        if not mine:
            continue
        floor = any(row["over_floor"] for row in mine)
        cells = []
        for row in mine:
            s = row["seconds"]
            time = f"{1000 * s['median']:,.1f} ± {1000 * s['standard_error']:.1f} ms"
            grown = "" if row["exponent"] is None else f"{row['exponent']:.2f}"
            line = [f"{row['at']:,}", time, f"{1e6 * s['median'] / row['at']:,.1f} µs", grown]
            cells.append([*line, *([f"{row['over_floor']['median']:.1f}"] if floor else [])])
        header = [unit, "time", f"per unit of {unit}", "exponent", *(["over the floor"] if floor else [])]
        parts += [f"{curve.partition(',')[0].capitalize()}:", table(header, cells)]
    memory = [row for row in rows if row["curve"] == "memory of a simulation"]
    if memory:
        cells = [
            [str(row["layers"]), str(row["width"]), *(f"{row[key] / 1e6:.0f} MB" for key in
             ("bytes", "streams_bytes", "parameters_bytes"))]
            for row in memory
        ]  # fmt: skip
        header = ["layers", "width", "largest memory", "stream inputs", "parameters"]
        parts += [
            f"Memory of a simulation, {SEQUENCES} sequences of 128 tokens, forward and backward, beyond a process that "
            f"has simulated one layer of width 64 ({memory[0]['ready_bytes'] / 1e6:.0f} MB). It keeps the stream that "
            "enters every sublayer (*stream inputs*) and one sublayer's weights at a time, never all *parameters*:",
            table(header, cells),
        ]
    return "\n\n".join(parts)


def main() -> None:
    """Command line of the module."""
    options = command_line(__doc__).parse_args()
    one_thread()
    rows = []
    for curve, rounds, points in cases():
        for row in curve_rows(curve, rounds, points):
            rows.append(row)
            floor = "" if row["over_floor"] is None else f"  {row['over_floor']['median']:.1f} times the floor"
            print(f"{curve:20} {row['at']:6,} {1000 * row['seconds']['median']:10,.1f} ms{floor}", flush=True)
    for row in memory_rows():
        rows.append(row)
        print(f"{row['curve']} {row['layers']} x {row['width']}: {row['bytes'] / 1e6:.0f} MB", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
