"""How time and memory grow with depth, width, tokens, experts, members of a sweep, and the size of a checkpoint."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import weights
from benchmarks.page import RECORDS
from benchmarks.prediction import INPUTS, members, network
from benchmarks.timing import table, take_turns
from signalprop.diagnosis.stored_weights import read_weights
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.schemes.base import parametrized
from signalprop.theory.network import predict_moments

ROUNDS = 3
PICTURE = RECORDS / "cost_growth.png"
Make = Callable[[int], Callable[[], Any]]


class Growth(NamedTuple):
    """What is done at several sizes, and the power of the size that the algorithm needs, of time and of memory."""

    name: str
    sizes: Sequence[int]
    make: Make
    time: float
    memory: float


def preset(name: str, field: str, fidelity: Any = "auto", **others: Any) -> Make:
    """Predictions of a preset with a field of that size."""

    def make(n: int) -> Callable[[], Any]:
        p = parametrized(Architecture.preset(name, **{field: n}, **others))
        return lambda: predict(p, fidelity=fidelity)

    return make


def experts(n: int) -> Callable[[], Any]:
    """Predictions of Qwen3's mixture with so many experts, 8 of them for a token."""
    a = Architecture.preset("qwen3-30b-a3b", n_layers=4)
    p = parametrized(a.replace(settings={"experts": {"normalised": True, "n_experts": n, "top_k": 8}}))
    return lambda: predict(p)


def growths(folder: Path) -> list[Growth]:
    """What is measured."""

    def checkpoint(layers: int) -> Callable[[], Any]:
        place = folder / str(layers)
        place.mkdir()
        weights.write(place, layers, 1024, 4096)
        return lambda: read_weights(str(place))

    def sweep(size: int) -> Callable[[], Any]:
        many = members(size, 12)
        return lambda: predict_moments(many, INPUTS)

    def deep(n: int) -> Callable[[], Any]:
        p = network(n)
        return lambda: predict(p, INPUTS)

    return [
        Growth("depth: averages, tgs", (96, 192, 384, 768), deep, 1, 1),
        Growth("depth: grid of positions, gpt2", (12, 24, 48, 96), preset("gpt2", "n_layers"), 1, 1),
        Growth("width: gpt2", (256, 768, 1536, 3072), preset("gpt2", "d_model", n_layers=4), 0, 0),
        Growth("tokens: grid, llama-7b", (1024, 4096, 16384), preset("llama-7b", "seq_len", n_layers=4), 0, 0),
        Growth("tokens: every position, gpt2", (128, 256, 512), preset("gpt2", "seq_len", "kernel", n_layers=2), 2, 2),
        Growth("experts: qwen3", (16, 64, 128), experts, 0, 0),
        Growth("members of a sweep, 12 layers", (1000, 3000, 10_000), sweep, 1, 1),
        Growth("checkpoint: layers of 17M weights", (1, 2, 4), checkpoint, 1, 0),
    ]


def peak_bytes(action: Callable[[], Any]) -> int:
    """Largest memory of Python's and NumPy's objects that an action makes."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The power of the size that fits best."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-12)), 1)[0])


def picture(found: Sequence[tuple[Growth, list[float], list[int]]]) -> None:
    """Time and memory over size, doubly logarithmic, with their slopes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, what, at in zip(figure.subplots(1, 2), ("CPU seconds", "peak memory, MB"), (1, 2), strict=True):
        for row in found:
            values = np.asarray(row[at], float) / (1 if at == 1 else 1e6)
            label = f"{row[0].name}: {slope(row[0].sizes, values):.2f}"
            axes.loglog(np.array(row[0].sizes) / row[0].sizes[0], values, marker="o", label=label)
        axes.set(xlabel="size over the smallest", ylabel=what)
        axes.legend(fontsize=8, title="slope", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(PICTURE, dpi=80)


TITLE = "How cost grows"
ABOUT = """
`python -m benchmarks cost_growth`: CPU time (one thread, median of three) and the largest memory of what is made at a
time. A slope is the power of the size that fits best; beside it what the algorithm needs. Fixed costs make slopes of
small sizes smaller. The figure: `records/benchmarks/cost_growth.png`.
"""
READING = """
Two rows are above what the algorithm needs by more than .05. On a grid positions lie at most .09 apart in ln n for one
error at any length, 62 of 1,024 tokens and 93 of 16,384, so that its matrices grow as the square of ln n (2.2 times
here, a slope of .28). A sweep's members are above in time. That is the system's:
10,000 members at once take as long in user time as ten times 1,000 (.42 to .48 s and .47 to .58), and .12 to .25 s of
system time in place of .03 to .05, for 35,000 to 57,000 pages that are handed out anew in place of 11,000.
"""


def measured() -> Iterator[str]:
    """The section of the page."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for growth in growths(Path(folder)):
            actions = {str(n): growth.make(n) for n in growth.sizes}
            seconds = take_turns(actions, ROUNDS)
            times = [float(np.median(seconds[str(n)])) for n in growth.sizes]
            found.append((growth, times, [peak_bytes(actions[str(n)]) for n in growth.sizes]))
    picture(found)
    rows = [
        [
            g.name, ", ".join(f"{n:,}" for n in g.sizes), ", ".join(f"{x:.3g}" for x in times),
            f"{slope(g.sizes, times):.2f} ({g.time:g})", ", ".join(f"{x / 1e6:.3g}" for x in peaks),
            f"{slope(g.sizes, peaks):.2f} ({g.memory:g})",
        ]
        for g, times, peaks in found
    ]  # fmt: skip
    yield table(["what", "sizes", "CPU seconds", "slope (needed)", "peak memory, MB", "slope (needed)"], rows)
