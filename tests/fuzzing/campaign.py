"""Random command lines by the thousand, to find what does not end in one clear line.

    make fuzz                                  # 20,000 command lines from seed 0, and 60 damaged files of every kind
    PYTHONPATH=src:tests python tests/fuzzing/campaign.py --seed 7 --lines 5000
    PYTHONPATH=src:tests python tests/fuzzing/campaign.py --seed 7 --first 1234 --lines 1    # repeats one line

A line is made from its seed and number alone. All run in this process, within a temporary directory, offline, each for
SECONDS at most. What is raw is printed with what repeats it: another end than status 0, 1 or 2; a message that is not
one short printable line; a traceback; no end. The exit status is 1 where there was any.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MPLBACKEND="Agg", COLUMNS="200")

import click
import torch
import transformers
import typer

import signalprop as sp
from damage import commanded, problem_of
from fuzzing import test_checkpoints, test_documents
from reported import write_run
from signalprop.cli import all_commands, command_line
from signalprop.network.presets import PRESETS
from signalprop.schemes import SCHEMES
from signalprop_lab.verification.verify import EFFORTS, Effort

SECONDS = 60  # of a line, of processor time
MEMORY = 12 << 30
# how often a command is tried, and what keeps it cheap; the others wait, train or draw figures
COMMANDS: dict[str, tuple[int, list[str]]] = {
    "predict": (30, ["--layers", "2", "--set", "d_model=16", "--seq-len", "8"]),
    "schemes": (18, ["--for", "tgs", "--layers", "2", "--set", "d_model=16"]),
    "kernel": (12, ["--layers", "2", "--set", "d_model=16", "--seq-len", "6"]),
    "report": (6, ["--out", "r.html"]),
    "train": (2, ["--show"]),
    "sweep": (1, ["--jobs", "0"]),
    "diagnose": (3, []),
    "check": (2, []),
    "anatomy": (2, []),
    "apply": (1, []),
    "fold": (1, []),
    "measure": (1, ["--layers", "2", "--set", "d_model=16", "--seq-len", "8", "--set", "vocab_size=50"]),
    "compare": (2, ["--layers", "1", "--set", "d_model=16", "--seq-len", "8", "--set", "vocab_size=50"]),
    "verify": (1, ["--quick", "dropout"]),
    "reproduce": (1, []),
    "nonsense": (1, []),
}
COUNTS = ("-1", "0", "1", "2", "1.5", "nan", "x", "")  # of draws, removals, processes: what they multiply is the work
PLAIN = ("1", "2", "3", "4", "8", "0.5")  # what options take more often than not
NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "5",
    "1.5",
    "0.1",
    "1e-3",
    "1e8",
    "-1e30",
    "1e999",
    "nan",
    "inf",
    "9" * 30,
    "x",
    "",
)
FIELDS = (*NUMBERS, "true", "null", "[1]", "none", "rotary", "decoder", "patches")
FILES = ("o.json", "o.png", "no/such/o.json", "loop", "/dev/null", ".", "-", "a\x00b", "x" * 300, "o.xyz")
VALUES = (
    "-1", "0", "1", "2", "1e99", "NaN", "inf", "", "  ", "x", "9" * 30, "9" * 5000, "0x10", "1_000", "-0", "1.5",
    "\ud800",
    "\x00", "\x1b[31m", "../../etc/passwd", "-", "x" * 5000, "true", "null", "[]", "{}", "[1,2]", "[" * 2000, '{"a":1}',
    "%s", "a=b", "=", "1e-400", "\u0663", "../" * 2000,
)  # fmt: skip
WORDS = (*VALUES, "caf\u00e9", "--", "--help", "-h", "xavier", "gpt2")
SOURCES = (*PRESETS, "plain")


class Hang(BaseException):
    """A case that did not end in time."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def end(_: int, __: FrameType | None) -> None:
        raise Hang(f"no end after {SECONDS} s")

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def corpus(folder: Path) -> list[str]:
    """Files and directories that a line may name; of every kind that is read, some of them damaged."""
    profile = test_documents.PROFILE.to_json()
    comparison = sp.compare(test_documents.PROFILE, test_documents.PROFILE).to_json()
    documents = {
        "architecture": test_documents.ARCHITECTURE, "table": test_documents.TABLE.to_json(), "profile": profile,
        "comparison": comparison, "diagnosis": test_documents.DIAGNOSIS, "kernels": test_documents.kernels(),
        "results": test_documents.results(), "kernel": [[1.0, 0.1], [0.1, 1.0]],
    }  # fmt: skip
    for name, document in documents.items():
        text = json.dumps(document)
        (folder / f"{name}.json").write_text(text)
        (folder / f"{name}-cut.json").write_text(text[: len(text) // 2])
    write_run(folder / "run", steps=20, status="finished")
    plain = test_checkpoints.make_plain(folder / "plain")
    test_checkpoints.make_applied(plain)
    (folder / "text.txt").write_text("the state of the union is strong and the state of the union is good " * 30)
    (folder / "empty").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    return [*sorted(path.name for path in folder.iterdir()), "applied/signalprop.json", "plain/config.json"]


@functools.cache
def commands() -> dict[str, Any]:
    """The commands by name, with their options."""
    found: Any = typer.main.get_command(command_line(all_commands()))
    return dict(found.commands)


def line_of(seed: int, number: int, files: Sequence[str]) -> list[str]:
    """The arguments of one line: mostly what makes sense, with a few things that do not."""
    r = random.Random(f"line {seed} {number}")
    name = r.choices([*COMMANDS], [often for often, _ in COMMANDS.values()])[0]
    command = commands().get(name)
    out = [name, *COMMANDS[name][1]]
    if command is None:
        return [*out, r.choice(WORDS)]
    options = [item for item in command.params if isinstance(item, click.Option) or hasattr(item, "is_flag")]
    options = [item for item in options if item.opts[0].startswith("-")]
    for item in command.params:
        if not item.opts[0].startswith("-") and r.random() < 0.97:
            out.insert(1, argument(r, name, files))
    if name in ("check", "apply") and r.random() < 0.9:
        out += ["--scheme", r.choice([*SCHEMES])]
    if name in ("apply", "fold", "fit") and r.random() < 0.9:
        out += ["--out", r.choice(["new", *FILES])]
    for item in r.choices(options, k=r.randrange(4)):
        out.append(r.choice(item.opts))
        if not getattr(item, "is_flag", False):
            out.append(value_of(r, item.opts[-1], files))
    if r.random() < 0.05:
        out.insert(r.randrange(len(out) + 1), r.choice(WORDS))
    return out


def argument(r: random.Random, name: str, files: Sequence[str]) -> str:
    if r.random() < 0.08:
        return r.choice(WORDS)
    if name in ("report", "diagnose", "check", "apply", "fold", "fit", "anatomy"):
        return r.choice(files)
    if name == "train":
        return r.choice(["gpt-small", "bert-mini", *files])
    if name == "schemes":
        return r.choice([*SCHEMES])
    if name in ("sweep", "reproduce"):
        return r.choice(["sweep-tgs-tab11", *files])
    named = r.random() < 0.7
    return r.choice(SOURCES if named else files)


def value_of(r: random.Random, option: str, files: Sequence[str]) -> str:
    if r.random() < 0.08:
        return r.choice(WORDS)
    known: dict[str, Callable[[], str]] = {
        "--scheme": lambda: r.choice([*SCHEMES, *files]) + r.choice(["", "", option_of_a_scheme(r)]),
        "--norm": lambda: r.choice(["pre", "post", "sandwich", "none", "res-post", "x"]),
        "--for": lambda: r.choice(["tgs", "gpt2", *files]),
        "--fidelity": lambda: r.choice(["auto", "moments", "kernel", "simulate", "x"]),
        "--harness": lambda: r.choice(["arc_easy", "x", *files]),
        "--set": lambda: f"{r.choice([*sp.Architecture.model_fields])}={r.choice(FIELDS)}",
    }
    if option in known:
        return known[option]()
    if option in ("--seeds", "--steps", "--jobs"):
        return r.choice(COUNTS)
    if option in ("--json", "--plot", "--out"):
        return r.choice(FILES if r.random() < 0.5 else ("o.json", "-"))
    if option in ("--data", "--input", "--against", "--task", "--probe", "--batch"):
        return r.choice(files)
    return r.choice(PLAIN if r.random() < 0.6 else NUMBERS)


@functools.cache
def options_of_schemes() -> list[str]:
    return sorted({name for cls in SCHEMES.values() for name in cls.__dataclass_fields__})


def option_of_a_scheme(r: random.Random) -> str:
    return f":{r.choice(options_of_schemes())}={r.choice((*PLAIN, *NUMBERS))}"


def run_lines(seed: int, first: int, n: int, folder: Path) -> Iterator[tuple[str, str]]:
    """(what it was, what is raw about it or '') of every line."""
    files = corpus(folder)
    for number in range(first, first + n):
        arguments = line_of(seed, number, files)
        try:
            with limited(), warnings.catch_warnings():
                result = commanded(*arguments)
            found, kind = (
                problem_of(result),
                f"{arguments[0] if arguments[0] in COMMANDS else 'another'} {result.status}",
            )
        except SystemExit as error:
            found, kind = (None, "help") if error.code == 0 else (f"exit {error.code}", "exit")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found, kind = f"{type(error).__name__}: {error}", "raised"
        yield kind, "" if found is None else f"line {seed} {number} {arguments!r:.600}: {found}"


def tally(tried: Iterator[tuple[str, str]], title: str, what: str) -> int:
    """Print what is raw as it comes, and how many were tried, also when interrupted (SIGINT, SIGTERM).

    Returns:
        how many were raw.
    """
    counts: Counter[str] = Counter()
    raw, begun = 0, time.monotonic()
    asked_to_end: list[int] = []
    for ending in (signal.SIGINT, signal.SIGTERM):  # what is tried may catch an exception
        signal.signal(ending, lambda number, _: asked_to_end.append(number))
    for kind, problem in tried:
        counts[kind] += 1
        if problem:
            raw += 1
            print(f"RAW {' '.join(problem.split())}".encode("ascii", "backslashreplace").decode(), flush=True)
        if counts.total() % 500 == 0:
            print(f"{counts.total()} {what}, {raw} raw, {time.monotonic() - begun:.0f} s", flush=True)
        if asked_to_end:
            break
    seconds = time.monotonic() - begun
    interrupted = " (interrupted)" if asked_to_end else ""
    print(f"{title}: {counts.total()} {what} in {seconds:.0f} s{interrupted}; {dict(counts)}; {raw} raw")
    return raw


def main() -> int:
    """Run the lines, and print what is raw, counts and seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first line")
    parser.add_argument("--lines", type=int, default=20_000)
    asked = parser.parse_args()
    EFFORTS["quick"] = Effort(2, 8, 2, 8, 1e5, 100)  # `verify` ends as it does, with fewer samples
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    place = Path(tempfile.mkdtemp(prefix="campaign-"))
    os.chdir(place)
    raw = tally(run_lines(asked.seed, asked.first, asked.lines, place), f"seed {asked.seed}", "lines")
    os.chdir("/")
    shutil.rmtree(place)
    return int(raw > 0)


if __name__ == "__main__":
    sys.exit(main())
