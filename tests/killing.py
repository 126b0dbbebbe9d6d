"""Commands in processes of their own that are killed in place of a change to a file, and a look at what they leave.

A process is forked from one that has imported PyTorch, so that it lives for its work only.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import trained

_PRELOADED = [
    "signalprop.cli", "signalprop_lab.training.run", "signalprop_lab.training.sweep", "signalprop.diagnosis.run",
    "signalprop.report.html", "plotly", "transformers.models.llama.modeling_llama",
]  # fmt: skip
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SECONDS = 300.0  # in which any of these commands has to end, on a busy machine
# What the clock or the process decides, in the files of commands.
_PASSING = {"seconds", "throughput", "started", "command", "threads", "environments", "environment", "revision",
            "processor_seconds"}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, or minus the number of the signal; what it said; the changes that it began."""

    status: int
    out: str
    err: str
    changes: tuple[str, ...]


def run(
    arguments: Sequence[str], folder: Path, stop: tuple[int, signal.Signals] | None = None, *, room: int | None = None
) -> Ended:
    """Run a command in a folder, with a process group of its own; its output goes to files beside that.

    Args:
        stop: a signal that comes in place of the n-th change to a file, from 1. room: bytes that a file may grow to.
    """
    folder.mkdir(exist_ok=True)
    beside = {name: folder.with_name(f"{folder.name}.{name}") for name in ("out", "err", "changes")}
    for path in beside.values():
        path.write_text("")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_command, args=([*arguments], folder, beside, stop, room))
    process.start()
    status = trained.finish(process, _SECONDS)
    out, err, changes = (path.read_text(encoding="utf-8") for path in beside.values())
    return Ended(status, out, err, tuple(changes.splitlines()))


def here(arguments: Sequence[str], folder: Path, *, room: int | None = None) -> Ended:
    """The same in this process, which is quicker and cannot be killed."""
    from signalprop import cli

    folder.mkdir(exist_ok=True)
    out, err, before = io.StringIO(), io.StringIO(), resource.getrlimit(resource.RLIMIT_FSIZE)
    warn = warnings.showwarning
    try:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.run([*arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        warnings.showwarning = warn
    return Ended(status, out.getvalue(), err.getvalue(), ())


def _command(
    arguments: list[str],
    folder: Path,
    beside: dict[str, Path],
    stop: tuple[int, signal.Signals] | None,
    room: int | None,
) -> None:
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(beside[name], os.O_WRONLY | os.O_APPEND), number)
    # as on a terminal: what a killed command has said has been seen
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    import torch

    from signalprop.cli import main

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has made of it
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    sys.addaudithook(_watch(folder, os.open(beside["changes"], os.O_WRONLY | os.O_APPEND), stop))
    sys.argv = ["signalprop", *arguments]
    main()


def _watch(
    folder: Path, changes: int, stop: tuple[int, signal.Signals] | None
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that writes down what is about to be changed in a folder, and stops the process."""
    count, root = 0, f"{folder.resolve()}/"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event != "open" and event not in _CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        name = arguments[1 if event == "os.rename" else 0]
        if not isinstance(name, (str, bytes, os.PathLike)):
            return
        path = os.path.abspath(os.fsdecode(name))
        if not path.startswith(root):
            return
        count += 1
        os.write(changes, f"{event} {path.removeprefix(root)}\n".encode())
        if stop is not None and count == stop[0]:
            os.killpg(os.getpgid(0), stop[1])

    return hook


# --- what is on the disk ----------------------------------------------------------------------------------------------


def _is_temporary(path: Path) -> bool:
    return any(part.endswith(".tmp") for part in path.parts)


def _content(path: Path) -> Any:
    """What a file says, without what the clock decides: two runs of one command agree on it."""
    if path.suffix == ".json":
        return _lasting(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [_lasting(line) for line in trained.lines(path)]
    return path.read_bytes()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in _PASSING}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _agree(one: Path, other: Path) -> bool:
    try:
        return bool(_content(one) == _content(other))
    except ValueError:  # one is damaged
        return False


def different(whole: Path, folder: Path, names: Sequence[str]) -> list[str]:
    """Files (of directories: all in them) that two folders do not agree on."""
    found = []
    for name in names:
        paths = {
            p.relative_to(top)
            for top in (whole / name, folder / name)
            for p in top.rglob("*")
            if p.is_file() and not _is_temporary(p.relative_to(top))
        }
        for inner in sorted(paths) or [Path()]:
            one, other = whole / name / inner, folder / name / inner
            if not (one.is_file() and other.is_file() and _agree(one, other)):
                found.append(str(Path(name) / inner))
    return found


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A command, and what it writes into the folder in which it runs.

    Attributes:
        written: files and directories on which two runs agree. once: of these, directories that a second call refuses
            to write again. goes_on: whether a second call goes on where the first was, from files that have grown.
    """

    arguments: tuple[str, ...]
    written: tuple[str, ...]
    once: tuple[str, ...] = ()
    goes_on: bool = False


RUN = tuple(f"run/{name}" for name in (
    "metrics.jsonl", "signal.jsonl", "final", "folded", "result.json", "parametrization.json", "recipe.yaml"
))  # fmt: skip


def cases(given: Path) -> dict[str, Case]:
    """The commands that write, on what `prepare` has made."""
    return {
        "train": Case(("train", str(given / "tiny.yaml"), "--out", "run", "--resume"), RUN, goes_on=True),
        "sweep": Case(("sweep", str(given / "sweep.yaml"), "--out", "sweep"), ("sweep/results.json",), goes_on=True),
        "diagnose": Case(
            ("diagnose", str(given / "plain"), "--data", str(given / "text.txt"), "--tokens", "64", "--seq-len", "16",
             "--json", "d.json", "--plot", "d.html"),
            ("d.json", "d.html"),
        ),
        "fold": Case(("fold", str(given / "applied" / "deep"), "--out", "folded", "--json", "f.json"),
                     ("folded", "f.json"), ("folded",)),
        "apply": Case(("apply", str(given / "plain"), "--scheme", "lns", "--out", "deep", "--json", "a.json"),
                      ("deep", "a.json"), ("deep",)),
        "report": Case(("report", str(given / "p.json"), "--out", "r.html"), ("r.html",)),
        "reproduce": Case(("reproduce", "tgs-fig12/13", "--out", "pictures", "--json", "t.json"),
                          ("pictures/tgs-fig12-13.json", "pictures/tgs-fig12-13.png", "t.json")),
        "kernel": Case(("kernel", "tgs", "--layers", "2", "--seq-len", "8", "--json", "k.json",
                        "--plot", "k.png"), ("k.json", "k.png")),
    }  # fmt: skip


def prepare(given: Path) -> None:
    """Make what the commands read: a text, a tiny Llama plain and with a scheme, a recipe, a sweep, a profile."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given.mkdir(exist_ok=True)
    cadence = {"log": 1, "evaluate": 6, "save": 2, "signal": 4, "validation_examples": 4}
    short = {"budget": {"steps": 8, "batch_size": 2}, "cadence": cadence}
    llama = {"architecture": None, "huggingface": trained.LLAMA, "scheme": "layerscale"}
    own = {"data": {"cache": "cache"}}  # in the folder where the command runs
    trained.write_recipe(given, trained.recipe_of(given, model=llama, **short, **own))
    base = trained.recipe_of(given, budget={"steps": 4, "batch_size": 2}, cadence=cadence | {"signal": 0}, **own)
    sweep = {
        "schema": "signalprop/sweep/1",
        "name": "tiny",
        "base": base,
        "axes": {"scheme": {name: {"model.scheme": name} for name in ("xavier", "deepscalelm")}},
        "seeds": [0, 1],
    }
    (given / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    torch.manual_seed(0)
    shape = {key: value for key, value in trained.LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **shape)).save_pretrained(given / "plain")
    tiny = ("--layers", "2", "--set", "d_model=16", "--set", "vocab_size=50", "--seq-len", "8")
    for arguments, folder in (
        (("predict", "gpt2", *tiny, "--json", "p.json"), given),
        (cases(given)["apply"].arguments, given / "applied"),
    ):
        ended = here(arguments, folder)
        assert ended.status == 0, ended.err


def remade(case: Case, folder: Path) -> Ended:
    """Run a command again after it was stopped; a directory that it had finished, and will not write again, goes."""
    ended = run(case.arguments, folder)
    if ended.status == 2 and any((folder / name).exists() for name in case.once):
        for name in case.once:
            shutil.rmtree(folder / name)
        ended = run(case.arguments, folder)
    return ended
