"""Speed of the closed-form prediction: one deep model, a sweep of 10,000, and the command's cold start."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import compared, take_turns
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import zipf
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop.theory.network import predict_moments

INPUTS = zipf(32_000)
BARE = "signalprop --version"
# What the command cannot do without: its dependencies, one pydantic model, and NumPy.
DEPENDENCIES = """
import numpy, typer
from pydantic import BaseModel, Field, TypeAdapter, model_validator
class Least(BaseModel):
    width: int = Field(1, ge=1)
"""


def network(n_layers: int) -> Parametrization:
    """Pre-norm encoder of width 256 with Xavier weights."""
    return scheme("xavier")(Architecture.preset("tgs", n_layers=n_layers))


def math_calls(action: Callable[[], Any]) -> int:
    """How many functions of `math` an action calls, tables apart: logarithms, exponentials, roots, angles."""
    action()  # makes the tables
    count = 0

    def see(_: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event == "c_call" and getattr(what, "__module__", None) == "math"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def bare_calls(n: int) -> None:
    """So many logarithms and nothing else, in a bare loop."""
    log = math.log
    for _ in range(n):
        log(1.25)


def members(size: int, n_layers: int) -> Parametrization:
    """A sweep over branch multipliers and query weights."""
    base = network(n_layers)
    rng = np.random.default_rng(0)
    branch = rng.uniform(0.1, 1.0, (size, 1)) * np.ones(base.n_sublayers)
    return base.with_columns(branch=branch, weight__query=base.weights["query"] * rng.uniform(0.5, 1.2, (size, 1)))


def result_bytes(profile: Profile) -> int:
    """Of the arrays in a profile."""
    sides = [profile.forward, *([profile.gradient] if profile.gradient else [])]
    arrays = {id(a): a for side in sides for series in side.values() for a in vars(series).values()
              if isinstance(a, np.ndarray)}  # fmt: skip
    return sum(a.nbytes for a in arrays.values())


def children_cpu() -> float:
    """CPU seconds of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fresh(rounds: int, cache: str, commands: Mapping[str, Sequence[str]], warm_up: int = 1) -> dict[str, list[float]]:
    """CPU time of `python ARGUMENTS` in fresh processes. Bytecode is cached, as once a package has been installed."""
    variables = environment(cache)

    def process(arguments: Sequence[str]) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=variables)

    return take_turns(
        {name: process(words) for name, words in commands.items()}, rounds, clock=children_cpu, warm_up=warm_up
    )


def environment(cache: str) -> dict[str, str]:
    """Variables of a process whose bytecode is cached in a folder."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": cache}


def cold_start(rounds: int = 9) -> str:
    """The command, beside importing its dependencies alone."""
    command = ("-m", "signalprop", "predict", "tgs", "--layers")
    commands = {
        "predict, 768 layers": (*command, "768"),
        "predict, 2 layers": (*command, "2"),
        BARE: ("-m", "signalprop", "--version"),
        "python alone": ("-c", "pass"),
        "floor": ("-c", DEPENDENCIES),
    }
    with tempfile.TemporaryDirectory() as cache:
        return compared("Cold start.", fresh(rounds, cache, commands), "floor")


def deep_model(n_layers: int = 768, rounds: int = 25) -> str:
    """One prediction, forward and backward, beside its floor."""
    p = network(n_layers)
    calls = math_calls(lambda: predict_moments(p, INPUTS))
    seconds = take_turns(
        {
            "prediction": lambda: predict_moments(p, INPUTS),
            "prediction again": lambda: predict_moments(p, INPUTS),
            "forward only": lambda: predict_moments(p, INPUTS, backward=False),
            "with what every layer adds (`sp.predict`)": lambda: predict(p, INPUTS),
            "floor": lambda: bare_calls(calls),
        },
        rounds,
    )
    each = 1e6 * float(np.median(seconds["prediction"])) / (2 * n_layers)
    return compared(
        f"Deep model: {n_layers} layers, {each:.0f} µs per sublayer; the floor makes {calls:,} calls.",
        seconds, "prediction",
    )  # fmt: skip


def sweep(size: int = 10_000, n_layers: int = 96, rounds: int = 5) -> str:
    """All members at once, beside one member (times their number) and beside writing the result down."""
    many, one = members(size, n_layers), network(n_layers)
    n_bytes = result_bytes(predict_moments(many, INPUTS))
    source, target = (np.zeros(n_bytes // 8) for _ in range(2))
    seconds = take_turns(
        {
            "sweep": lambda: predict_moments(many, INPUTS),
            "one by one": lambda: predict_moments(one, INPUTS),
            "floor": lambda: np.copyto(target, source),
        },
        rounds,
    )
    seconds["one by one"] = [size * own for own in seconds["one by one"]]
    each = 1e6 * float(np.median(seconds["sweep"])) / size / (2 * n_layers)
    return compared(
        f"Sweep: {n_layers} layers, {size:,} members, {each:.2f} µs per member and sublayer; the floor writes "
        f"{n_bytes / 1e6:.0f} MB.",
        seconds, "sweep",
    )  # fmt: skip


TITLE = "Predictions"
ABOUT = """\
The closed form (fidelity `moments`), which needs no PyTorch. CPU time.

- *Deep model*: one pre-norm encoder, forward and backward. Its floor is a bare Python loop with as many calls of
  `math` functions as the prediction makes (logarithms, exponentials, roots, angles), which no recursion in Python
  over these formulas can do without. With all their sums and products, written out by hand in one loop for this one
  network, they took 3.7 ms forward where the prediction took 21 (768 layers): what is beyond is one recursion for all
  kinds of sublayers, placements of norms and sweeps. So 10 ms for all of it, once a goal, would be a second recursion.
  Where the 21 ms go: 10 to attention (13.5 µs a sublayer, with 57 calls of Python functions and 55 of built-in ones),
  4 to feed-forwards (5.4 µs; 31 and 33), 7 to rows of numbers, to what is kept and to what runs but once. Arrays would
  not help: the branches of all sublayers at once take .8 ms and their derivatives by differences twice that again, so
  that Newton's method over the depth, in the loop's place, would have to end within some five steps to win anything.
- *Sweep*: members that differ in two columns, all in one call; *one by one* is the time of one member times their
  number. The floor writes as many bytes as the result has.
- *Cold start*: `signalprop predict` as a process, over a process that only imports NumPy, typer and pydantic and
  makes one model class."""


def measured() -> Iterator[str]:
    """The section of the page."""
    yield deep_model()
    yield sweep()
    yield cold_start()
