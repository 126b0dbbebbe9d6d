"""What users wait for: commands of the README and of the five questions, and every preset, over their floors."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.memory import peak
from benchmarks.prediction import environment
from benchmarks.timing import compared, table
from signalprop.network.presets import PRESETS

TITLE = "What users wait for"
ABOUT = """
Commands as fresh processes, on one thread; CPU time and peak memory, with the goal of each. These need no model, and
stand over the start of the command line. Those that load a model are sections of their own: `python -m benchmarks
waiting_gpt2 waiting_llama waiting_smollm2`.
"""
OF_MODELS = """
As above, of a checkpoint with random weights. Commands stand over their floor: a process that imports PyTorch and
transformers, loads the same checkpoint, reads every weight once (transformers only maps the file into memory), and does
what the result is made of: for `apply` all weights drawn and written, for `measure` one forward and backward pass over
4 sequences of 128 tokens, for `compare` eight over 2, for `diagnose` one over its tokens, for `anatomy` and `check`
nothing more. Every command runs once before it is counted, so that bytecode is cached, as once a package has been
installed; a table whose round takes longer than a minute of CPU time has that one alone.
"""
READING = """
On a busy machine, old and new code in turns, the prediction in `predict qwen3-30b-a3b` took .65 s of processor time in
a process and .29 s again in the same one (.79 and .40 on 88 positions, before 28 November's last changes; now 77), that
in `predict olmo2-7b` .54 and .19 s (.67 and .26). What a process does once: two tables of routers take .06 s, memory
that is touched for the first time (24,000 pages) about .1; the rest are imports, and tables of softmax rows and of
activations.
"""
START = "signalprop --version"
OVER_START, OVER_FLOOR = 0.5, 1.3  # goals: seconds beyond the start of `predict` of a preset; times the floor
ONE_ROUND = 60.0  # seconds of a round from which a table has no second one
GOALS = {
    "schemes --for gpt2 --layers 48": "5 s",
    "predict gpt2 --layers 1000000": "refused before any work",
    "diagnose --tokens 2048": "4 passes",
}
_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model, drawn = AutoModelForCausalLM.from_pretrained(sys.argv[1]), {drawn}
with torch.no_grad():
    for p in model.parameters():
        p.normal_(std=0.02) if drawn else p.sum()
if drawn:
    model.save_pretrained(drawn)
for sequences, tokens in {passes}:
    ids = torch.randint(0, 10_000, (sequences, tokens))
    model(ids, labels=ids).loss.backward()
"""
_REFUSED = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode != 2)"
_AFRESH = (
    "import shutil, subprocess, sys; shutil.rmtree(sys.argv[-1], ignore_errors=True); "
    "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
)
COMMAND = ("-m", "signalprop")
Commands = dict[str, tuple[str, ...]]


def without_a_model() -> Commands:
    """Commands that import no PyTorch, by what a user types."""
    typed = (
        "predict tgs --layers 192 --norm post --scheme xavier",
        "predict tgs --layers 192 --norm post --scheme deepscalelm --plot signal.svg --overwrite",
        "advise tgs --layers 48 --norm post --scheme xavier", "advise gpt2", "schemes --for gpt2",
        "schemes --for gpt2 --layers 48", "kernel gallery",
    )  # fmt: skip
    refused = ("-c", _REFUSED, *COMMAND, "predict", "gpt2", "--layers", "1000000")
    return {
        **{line: (*COMMAND, *line.split()) for line in typed},
        "predict gpt2 --layers 1000000": refused,
        START: (*COMMAND, "--version"),
    }


def _floor(model: str, passes: str = "()", drawn: str | None = None) -> tuple[str, ...]:
    """A process that loads a checkpoint, reads its weights (or draws them and writes them there), and runs it."""
    return "-c", _LOAD.format(passes=passes, drawn=repr(drawn)), model


def looking(model: str) -> Commands:
    """Commands that load a model, and their floor."""
    return {
        "floor: load and read": _floor(model),
        "anatomy": (*COMMAND, "anatomy", model),
        "check --scheme huggingface": (*COMMAND, "check", model, "--scheme", "huggingface"),
    }


def applying(model: str) -> Commands:
    """A scheme put into a checkpoint, and its floor."""
    return {
        "floor: load, draw, write": _floor(model, drawn=f"{model}-drawn"),
        "apply --scheme lns": ("-c", _AFRESH, *COMMAND, "apply", model, "--scheme", "lns", "--out", f"{model}-applied"),
    }


def running(model: str) -> Commands:
    """Commands that run a model, and their floor."""
    return {
        "floor: load, one pass of 4 x 128": _floor(model, "((4, 128),)"),
        "measure": (*COMMAND, "measure", model),
        "diagnose --tokens 512": (*COMMAND, "diagnose", model, "--tokens", "512"),
    }


def comparing(model: str) -> Commands:
    """A comparison, which runs a model eight times, and its floor."""
    return {
        "floor: load, eight passes of 2 x 128": _floor(model, "((2, 128),) * 8"),
        "compare": (*COMMAND, "compare", model),
    }


def diagnosing(model: str) -> Commands:
    """A diagnosis over one pass."""
    return {
        "floor: load, one pass of 1 x 2,048": _floor(model, "((1, 2048),)"),
        "diagnose --tokens 2048": (*COMMAND, "diagnose", model, "--tokens", "2048"),
    }


def checkpoint_in(folder: Path, config: dict[str, object]) -> str:
    """A model of this configuration with random weights, in a folder that is made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    made = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made, dtype=config.get("dtype", "float32")).save_pretrained(folder)
    return str(folder)


def measured() -> Iterator[str]:
    """The section of the page."""
    with _in_a_folder() as (_, cache):
        yield _table("Without a model.", without_a_model(), START, cache)
        yield _presets(cache)


def with_a_model(config: dict[str, object], *tables: Callable[[str], Commands]) -> Iterator[str]:
    """Tables of commands on one checkpoint, which is made for them."""
    with _in_a_folder() as (work, cache):
        model = checkpoint_in(work / "model", config)
        for commands in tables:
            typed = commands(model)
            yield _table("", typed, next(iter(typed)), cache)


@contextmanager
def _in_a_folder() -> Iterator[tuple[Path, str]]:
    """A folder to work in, and one for bytecode."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as cache:
        os.chdir(work)
        try:
            yield Path(work), cache
        finally:
            os.chdir(here)


def _table(title: str, commands: Commands, base: str, cache: str) -> str:
    seconds, peaks = _run(commands, cache)
    if sum(values[0] for values in seconds.values()) < ONE_ROUND:
        rounds = [_run({name: commands[name] for name in order}, cache)[0] for order in (commands, reversed(commands))]
        seconds = {name: [one[name][0] for one in rounds] for name in commands}
    usual = "" if base == START else f"{OVER_FLOOR} times"
    goals = {name: GOALS.get(name, "" if name == base else usual) for name in commands}
    return compared(title, seconds, base, goal=goals, **{"peak memory": peaks}).strip()


def _run(commands: Commands, cache: str) -> tuple[dict[str, list[float]], dict[str, str]]:
    """CPU seconds of every command, once, and its peak memory."""
    found = {name: peak(words, env=environment(cache)) for name, words in commands.items()}
    return {name: [spent] for name, (_, spent) in found.items()}, {
        name: f"{most / 2**20:.0f} MB" for name, (most, _) in found.items()
    }


def _presets(cache: str) -> str:
    """All once, and the dearest, with the start, once more."""
    commands = {START: (*COMMAND, "--version"), **{name: (*COMMAND, "predict", name) for name in PRESETS}}
    once, peaks = _run(commands, cache)
    start = min(once.pop(START)[0], _run({START: commands[START]}, cache)[0][START][0])
    beyond = {name: values[0] - start for name, values in once.items()}
    dearest = sorted(beyond, key=lambda name: -beyond[name])[:10]
    again, _ = _run({name: commands[name] for name in dearest}, cache)
    for name in dearest:
        beyond[name] = min(beyond[name], again[name][0] - start)
    rows = [[f"`predict {name}`", f"{beyond[name]:.2f} s", f"{OVER_START} s", peaks[name]] for name in dearest]
    over = sum(x > OVER_START for x in beyond.values())
    said = (
        f"`predict` of all {len(beyond)} presets at their own contexts, beyond the start ({start:.2f} s): median "
        f"{statistics.median(beyond.values()):.2f} s, {over} above {OVER_START} s. The ten that take longest, the "
        "smaller of two runs:"
    )
    return f"{said}\n\n{table(['command', 'beyond the start', 'goal', 'peak memory'], rows)}"
