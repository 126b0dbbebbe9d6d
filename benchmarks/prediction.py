"""Speed of the closed-form prediction: one deep model, a sweep of 10,000, and the command's cold start.

python -m benchmarks.prediction [--json FILE]
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import command_line, one_thread, ratios, shown, take_turns, write_rows
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import zipf
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop.theory.network import predict_moments

INPUTS = zipf(32_000)
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
    """How many functions of `math` an action calls: logarithms, exponentials, roots, angles."""
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


def deep_model(n_layers: int = 768, rounds: int = 25) -> list[dict[str, Any]]:
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
    return _rows("deep model", seconds, "prediction", layers=n_layers, math_calls=calls)


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


def sweep(size: int = 10_000, n_layers: int = 96, rounds: int = 5) -> list[dict[str, Any]]:
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
    return _rows("sweep", seconds, "sweep", layers=n_layers, members=size, result_bytes=n_bytes)


def children_cpu() -> float:
    """CPU seconds of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cold_start(rounds: int = 9) -> list[dict[str, Any]]:
    """CPU time of the command in fresh processes, beside importing its dependencies alone.

    Bytecode is cached, as it is once a package has been installed by pip.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

        def process(*arguments: str) -> Callable[[], Any]:
            variables = environment | {"PYTHONPYCACHEPREFIX": cache}
            return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=variables)

        command = ["-m", "signalprop", "predict", "tgs", "--layers"]
        seconds = take_turns(
            {
                "predict, 768 layers": process(*command, "768"),
                "predict, 2 layers": process(*command, "2"),
                "signalprop --version": process("-m", "signalprop", "--version"),
                "python alone": process("-c", "pass"),
                "floor": process("-c", DEPENDENCIES),
            },
            rounds,
            clock=children_cpu,
        )
    return _rows("cold start", seconds, "floor")


def _rows(what: str, seconds: Mapping[str, Sequence[float]], base: str, **facts: Any) -> list[dict[str, Any]]:
    found = ratios(seconds, base)
    return [
        {"what": what, "variant": name, "seconds": float(np.median(values)), "base": base, "ratio": found.get(name),
         **facts}
        for name, values in seconds.items()
    ]  # fmt: skip


# --- the page ------------------------------------------------------------------------------------------------------

TITLE = "Predictions"
ABOUT = """\
The closed form (fidelity `moments`), which needs no PyTorch. CPU time.

- *Deep model*: one pre-norm encoder, forward and backward. Its floor is a bare Python loop with as many calls of
  `math` functions as the prediction makes (logarithms, exponentials, roots, angles), which no recursion in Python
  over these formulas can do without.
- *Sweep*: members that differ in two columns, all in one call; *one by one* is the time of one member times their
  number. The floor writes as many bytes as the result has.
- *Cold start*: `signalprop predict` as a process, over a process that only imports NumPy, typer and pydantic and
  makes one model class."""


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables and what they say."""
    from benchmarks.page import table

    titles = {"deep model": "Deep model", "sweep": "Sweep", "cold start": "Cold start"}
    parts = []
    for what, title in titles.items():
        mine = [row for row in rows if row["what"] == what]
        first = mine[0]
        facts = [f"{first[key]:,} {key}" for key in ("layers", "members") if key in first]
        cells = [
            [row["variant"], _seconds(row["seconds"]), "" if row["ratio"] is None else shown(row["ratio"])]
            for row in mine
        ]
        parts += [
            f"{title}{': ' + ', '.join(facts) if facts else ''}. {_said(what, mine)}",
            table(["variant", "time", f"over *{first['base']}*"], cells),
        ]
    return "\n\n".join(parts)


def _said(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    ratio = {row["variant"]: row["ratio"]["median"] for row in rows if row["ratio"] is not None}
    first = rows[0]
    if what == "deep model":
        each = 1e6 * first["seconds"] / (2 * first["layers"])
        return (
            f"{each:.0f} µs per sublayer, {1 / ratio['floor']:.1f} times the floor of {first['math_calls']:,} calls: "
            "the rest is arithmetic between them and calls of our own functions."
        )
    if what == "sweep":
        each = 1e6 * first["seconds"] / first["members"] / (2 * first["layers"])
        return (
            f"{each:.2f} µs per member and sublayer, {ratio['one by one']:.0f} times as fast as one by one, "
            f"{1 / ratio['floor']:.0f} times the floor of {first['result_bytes'] / 1e6:.0f} MB: every number that is "
            "written down has taken dozens of array operations."
        )
    return f"{ratio['predict, 768 layers']:.2f} times the imports that it cannot do without."


def _seconds(value: float) -> str:
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def main() -> None:
    """Command line of the module."""
    options = command_line(__doc__).parse_args()
    one_thread()
    rows = []
    for measure in (deep_model, sweep, cold_start):
        for row in measure():
            rows.append(row)
            ratio = "" if row["ratio"] is None else f"{shown(row['ratio'])} of {row['base']}"
            print(f"{row['what']:10}  {row['variant']:42} {_seconds(row['seconds']):>10}  {ratio}", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
