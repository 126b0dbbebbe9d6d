"""Commands in processes of their own that are killed at a chosen moment, and a look at what they leave on the disk.

A process is forked from one that has imported PyTorch, so that it lives for its work only. It notes every change that
it begins to make to a file, and can be killed by that: instead of its n-th change, or a given time after it began.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import trained

_PRELOADED = [
    "signalprop.cli", "signalprop_lab.training.run", "signalprop_lab.training.sweep", "signalprop.diagnosis.run",
    "signalprop.diagnosis.loading", "signalprop.report.html", "signalprop.report.diagnosis_plots", "plotly",
    "signalprop_lab.training.tables", "pandas",
    "matplotlib.backends.backend_agg", "torch.utils.tensorboard", "transformers.models.llama.modeling_llama", "peft",
]  # fmt: skip
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SECONDS = 300.0  # in which any of these commands has to end, on a busy machine
# What the clock or the process decides, in the files of commands.
_PASSING = {"seconds", "throughput", "started", "command", "threads", "environments", "environment", "revision",
            "processor_seconds"}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When a command is killed.

    Attributes:
        change: the change to a file, from 1, by which the time is told; 0: the start of the command.
        delay: seconds after that; None: instead of the change.
        number: of the signal.
    """

    change: int
    delay: float | None = None
    number: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: exit status, or minus the number of the signal.
        changes: (seconds since the start, what was done, path inside the folder) of the changes that it began.
    """

    status: int
    out: str
    err: str
    changes: tuple[tuple[float, str, str], ...]
    seconds: float

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


@dataclass
class Running:
    """A command that runs in a folder; its output goes to files beside that."""

    process: BaseProcess
    folder: Path
    moment: Moment | None
    told: Connection
    began: float

    def end(self) -> Ended:
        """Wait for the end, and bring it about where a moment was named."""
        if self.moment is not None and self.moment.delay is not None:
            while not self.told.poll(0.05):
                if not self.process.is_alive():
                    break
            else:
                self.process.join(self.moment.delay)
                self.kill(self.moment.number)
        status = trained.finish(self.process, _SECONDS)
        seconds = time.monotonic() - self.began
        self.told.close()
        changes = []
        for line in _beside(self.folder, "changes").read_text(encoding="utf-8").splitlines():
            when, what, path = line.split(" ", 2)
            changes.append((float(when), what, path))
        out, err = (_beside(self.folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return Ended(status, out, err, tuple(changes), seconds)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the command and all its processes."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


def _beside(folder: Path, name: str) -> Path:
    return folder.with_name(f"{folder.name}.{name}")


def start(
    arguments: Sequence[str],
    folder: Path,
    moment: Moment | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file_size: int | None = None,
) -> Running:
    """Start a command in a folder, with a process group of its own.

    Args:
        file_size: no file may grow beyond so many bytes.
    """
    folder.mkdir(exist_ok=True)
    for name in ("out", "err", "changes"):
        _beside(folder, name).write_text("")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    told, tell = context.Pipe(duplex=False)
    options = {"environment": dict(environment or {}), "file_size": file_size}
    process = context.Process(target=_command, args=([*arguments], folder, moment, tell, options))
    began = time.monotonic()
    process.start()
    tell.close()
    return Running(process, folder, moment, told, began)


def run(arguments: Sequence[str], folder: Path, moment: Moment | None = None, **options: Any) -> Ended:
    """Run a command in a folder to its end."""
    return start(arguments, folder, moment, **options).end()


def _command(
    arguments: list[str], folder: Path, moment: Moment | None, tell: Connection, options: dict[str, Any]
) -> None:
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(_beside(folder, name), os.O_WRONLY | os.O_APPEND), number)
    # as on a terminal: what a killed command has said has been seen
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    import torch

    from signalprop.cli import main

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has made of it
    os.environ.update(options["environment"])
    if options["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_size"], options["file_size"]))
    changes = os.open(_beside(folder, "changes"), os.O_WRONLY | os.O_APPEND)
    sys.addaudithook(_watch(folder, changes, moment, tell))
    if moment is not None and moment.change == 0:
        tell.send_bytes(b"now")
    sys.argv = ["signalprop", *arguments]
    main()


def _watch(
    folder: Path, changes: int, moment: Moment | None, tell: Connection
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that writes down what is about to be changed in a folder, and brings about the moment."""
    began, count, root = time.monotonic(), 0, f"{folder.resolve()}/"

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
        os.write(changes, f"{time.monotonic() - began:.6f} {event} {path.removeprefix(root)}\n".encode())
        if moment is not None and count == moment.change:
            if moment.delay is None:
                os.killpg(os.getpgid(0), moment.number)
            tell.send_bytes(b"now")

    return hook


# --- what is on the disk ----------------------------------------------------------------------------------------------


def is_temporary(path: Path) -> bool:
    """Whether a file is one that a command writes before it gets its name."""
    return any(part.endswith(".tmp") for part in path.parts)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files and directories, each once."""
    return [item for item in folder.rglob("*.tmp") if not is_temporary(item.parent.relative_to(folder))]


def broken(folder: Path) -> list[str]:
    """The files with final names that are not whole, and what is wrong with them."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() or is_temporary(name) or _thinned_out(path):
            continue
        try:
            _read(path)
        except Exception as error:  # of any reader
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def _thinned_out(path: Path) -> bool:
    """Whether a file is of a checkpoint that was being removed: an old one, whose marker went first, beside a newer one
    that is whole; or one of a sweep's run that has its result."""
    from signalprop_lab.training.checkpoints import MARKER, problem_of, step_of

    folder = path.parent
    if not folder.name.startswith("checkpoint-"):
        return False
    run = folder.parent.parent
    if "runs" in run.parts and (run / "result.json").exists():
        return True
    if (folder / MARKER).exists():
        return False
    newer = [item for item in folder.parent.glob("checkpoint-*") if step_of(item) > step_of(folder)]
    return any(problem_of(item) is None for item in newer)


def _read(path: Path) -> None:
    """Read a file to its end, as what its name says.

    Raises:
        Exception: it is not whole, or nothing that a command is known to write.
    """
    if path.suffix in (".lock", ".bin") or path.name == ".lock" or path.parent.name in ("locks", "tensorboard"):
        return  # empty, or checked with sums by who reads them
    if path.name == "complete.json":
        from signalprop_lab.training.checkpoints import problem_of

        problem = problem_of(path.parent)
        assert problem is None, problem
    elif path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        assert load_file(path)
    elif path.suffix in (".jsonl", ".log"):  # lines are added to these; of the last one there may be a half
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            json.loads(line)
    elif path.suffix == ".yaml":
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
    elif path.suffix == ".html":
        assert path.read_text(encoding="utf-8").endswith("</html>\n")
    elif path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            image.load()
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.read_table(path)
    elif path.suffix == ".npy":
        np.load(path, allow_pickle=False)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            assert all(arrays[name] is not None for name in arrays.files)
    else:
        assert path.suffix in (".csv", ".md"), "nothing that a command is known to write"
        assert path.read_text(encoding="utf-8").endswith("\n")


def content(path: Path) -> Any:
    """What a file says, without what the clock decides: two runs of one command agree on it."""
    if path.suffix == ".json":
        return lasting(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [lasting(line) for line in trained.lines(path)]
    return path.read_bytes()


def _agree(one: Path, other: Path) -> bool:
    try:
        return bool(content(one) == content(other))
    except ValueError:  # one is damaged
        return False


def lasting(value: Any) -> Any:
    """A JSON value without what the clock decides."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in _PASSING}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def different(whole: Path, folder: Path, names: Sequence[str]) -> list[str]:
    """Files (of directories: all in them) that two folders do not agree on."""
    found = []
    for name in names:
        paths = {
            p.relative_to(top)
            for top in (whole / name, folder / name)
            for p in top.rglob("*")
            if p.is_file() and not is_temporary(p.relative_to(top))
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
        written: files and directories on which two runs agree. once: of these, directories that are written whole, and
            that a second call refuses to write again.
    """

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    once: tuple[str, ...] = ()


RUN = tuple(f"run/{name}" for name in (
    "metrics.jsonl", "signal.jsonl", "final", "folded", "result.json", "parametrization.json", "recipe.yaml"
))  # fmt: skip


def cases(given: Path) -> dict[str, Case]:
    """The commands that write, on what `prepare` has made."""
    text = str(given / "text.txt")
    found = (
        Case("train", ("train", str(given / "tiny.yaml"), "--out", "run", "--resume"), RUN),
        Case("sweep", ("sweep", str(given / "sweep.yaml"), "--out", "sweep"), ("sweep/results.json",)),
        Case(
            "diagnose",
            ("diagnose", str(given / "plain"), "--data", text, "--tokens", "64", "--seq-len", "16", "--prune", "1",
             "--save", "pruned", "--json", "d.json", "--plot", "d.png", "--report", "d.html"),
            ("pruned", "d.json", "d.png", "d.html"),
            ("pruned",),
        ),
        Case("fold", ("fold", str(given / "applied" / "deep"), "--out", "folded", "--json", "f.json"),
             ("folded", "f.json"), ("folded",)),
        Case("apply", ("apply", str(given / "plain"), "--scheme", "lns", "--out", "deep", "--json", "a.json"),
             ("deep", "a.json"), ("deep",)),
        Case("report", ("report", str(given / "p.json"), str(given / "run"), "--out", "r.html"), ("r.html",)),
        Case("reproduce", ("reproduce", "tgs-fig12/13", "--out", "pictures", "--json", "t.json"),
             ("pictures", "t.json")),
        Case("kernel", ("kernel", "tgs", "--layers", "2", "--seq-len", "8", "--matrices", "k.npz", "--json", "k.json",
                        "--plot", "k.png"), ("k.npz", "k.json", "k.png")),
    )  # fmt: skip
    return {case.name: case for case in found}


def prepare(given: Path, *, trained_run: bool = True) -> None:
    """Make what the commands read: a text, a tiny Llama plain and with a scheme, a recipe, a sweep, results.

    Args:
        trained_run: also the directory of a run, for reports.
    """
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
    tiny = ("--layers", "2", "--d-model", "16", "--vocab-size", "50", "--seq-len", "8")
    commands = [("predict", "gpt2", *tiny, "--json", "p.json")]
    commands += [("train", "tiny.yaml", "--out", "run")] if trained_run else []
    for arguments in commands:
        ended = run(arguments, given)
        assert ended.status == 0, ended.err
    ended = run(cases(given)["apply"].arguments, given / "applied")
    assert ended.status == 0, ended.err


def said(ended: Ended) -> list[str]:
    """The files and directories that a command has reported as written."""
    labels = r"^(?:report:|report|json|plot|saved|written(?: to)?|folded|matrices)"
    return re.findall(labels + r" +(?!no: |outputs )([^ ,\n]+)", ended.err + ended.out, re.MULTILINE)


def runs_said(ended: Ended) -> set[str]:
    """The runs that a sweep has reported as done, in its words."""
    return set(re.findall(r"^sweep: \d+/\d+ runs.*: (\S+ seed=\d+): \S+ [\d.]+$", ended.err, re.MULTILINE))


def some_moment(chance: random.Random, whole: Ended, number: signal.Signals = signal.SIGKILL) -> Moment:
    """A random moment of a command that took its course once: half of them uniform over its time, half of them soon
    after a change to a file, each change as likely as any other."""
    times = [0.0, *(when for when, _, _ in whole.changes), whole.seconds]
    if chance.random() < 0.5:
        when = chance.uniform(0, whole.seconds)
        change = max(i for i, t in enumerate(times[:-1]) if t <= when)
        return Moment(change, when - times[change], number)
    change = chance.randint(1, len(times) - 2)
    return Moment(change, chance.uniform(0, times[change + 1] - times[change]), number)


def remade(case: Case, folder: Path) -> Ended:
    """Run a command again after it was killed; a directory that it had finished, and will not write again, goes."""
    ended = run(case.arguments, folder)
    if ended.status == 2 and any((folder / name).exists() for name in case.once):
        for name in case.once:
            shutil.rmtree(folder / name)
        ended = run(case.arguments, folder)
    return ended
