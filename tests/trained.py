"""Tiny training runs in processes of their own, which tests stop, kill and start again."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

STEPS = 24
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
BUILT = {"preset": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64}


def write_text(folder: Path, characters: int = 30_000) -> Path:
    """Sentences of words that follow each other by a rule, in lines."""
    words = ["the", "wide", "river", "carries", "small", "boats", "past", "old", "towns", "and", "green", "hills"]
    out, at = [], 1
    while sum(map(len, out)) < characters:
        at = (at * 5 + 3) % 97
        out.append(words[at % len(words)] + ("\n" if at % 11 == 0 else " "))
    path = folder / "text.txt"
    path.write_text("".join(out), encoding="utf-8")
    return path


def recipe_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe as YAML has it: a built GPT-2 with dropout, some 20 steps. `changes` replace fields of its parts."""
    text = folder / "text.txt"
    if not text.is_file():
        write_text(folder)
    recipe: dict[str, Any] = {
        "schema": "signalprop/recipe/1",
        "name": "tiny",
        "task": "causal-lm",
        "model": {"architecture": {**BUILT, "dropout": 0.1}, "scheme": "deepscalelm"},
        "data": {
            "source": str(text), "validation": 0.1, "tokenizer": {"kind": "bytes"}, "seq_len": 16,
            "cache": str(folder / "cache"),
        },
        "optimizer": {"learning_rate": 3e-3},
        "budget": {"steps": STEPS, "batch_size": 4},
        "cadence": {"log": 4, "evaluate": 10, "save": 3, "signal": 8, "validation_examples": 8},
    }  # fmt: skip
    for name, value in changes.items():
        recipe[name] = {**recipe[name], **value} if isinstance(value, dict) and name in recipe else value
    return recipe


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    """The recipe as a file."""
    path = folder / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def start(recipe: dict[str, Any], out: Path, said: Path, **options: Any) -> BaseProcess:
    """Train in a new process, whose stderr goes to the file `said`: exit status 0, or 2 with one line for bad input.

    Args:
        options: of `train`; `file_size`: no file may grow beyond so many bytes. `environment`: variables that are set.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["signalprop_lab.training.run"])
    process = context.Process(target=_train, args=(recipe, out, said, options))
    process.start()
    return process


def _train(recipe: dict[str, Any], out: Path, said: Path, options: dict[str, Any]) -> None:
    stderr = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    import torch

    from signalprop.errors import InputError
    from signalprop_lab.training.recipe import parse
    from signalprop_lab.training.run import train

    torch.set_num_threads(1)
    os.environ.update(options.pop("environment", {}))
    limit = options.pop("file_size", None)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        train(parse(recipe), out, progress=False, **options)
    except InputError as error:
        print(f"signalprop: {error}", file=sys.stderr)
        sys.exit(2)


def together(recipe: dict[str, Any], out: Path, processes: int = 2, **options: Any) -> list[BaseProcess]:
    """Train in several new processes, as torchrun starts them; each has its own file for stderr."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = []
    for rank in range(processes):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in (places | where).items()}
        started.append(start(recipe, out, stderr_of(out, rank), environment=environment, **options))
    return started


def stderr_of(out: Path, rank: int = 0) -> Path:
    """Where a process's stderr goes."""
    return out.with_name(f"{out.name}-{rank}.stderr")


def run_together(recipe: dict[str, Any], out: Path, processes: int = 2, **options: Any) -> None:
    """Train to the end in several new processes."""
    for rank, process in enumerate(together(recipe, out, processes, **options)):
        assert finish(process) == 0, stderr_of(out, rank).read_text(encoding="utf-8")


def finish(process: BaseProcess, seconds: float = 120) -> int:
    """Wait for its end; the exit status."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError("the run did not end")
    assert process.exitcode is not None
    return process.exitcode


def run(recipe: dict[str, Any], out: Path, **options: Any) -> str:
    """Train to the end in a new process; what it said on stderr."""
    said = stderr_of(out)
    status = finish(start(recipe, out, said, **options))
    text = said.read_text(encoding="utf-8")
    assert status == 0, text
    return text


def wait_for(path: Path, process: BaseProcess, seconds: float = 60) -> None:
    """Until a file or directory is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end and process.is_alive(), f"{path} did not come"
        time.sleep(0.002)


def stop(process: BaseProcess, number: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal and wait for the end."""
    assert process.pid is not None
    os.kill(process.pid, number)
    return finish(process)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's file, without what the clock decides."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("_per_second")} for line in found]


def same_course(one: Path, other: Path) -> bool:
    """Whether two runs logged the same numbers, bit by bit."""
    return all(lines(one / name) == lines(other / name) for name in ("metrics.jsonl", "signal.jsonl"))


def checkpoint_steps(out: Path) -> list[int]:
    """Steps of the checkpoints that a run has."""
    return sorted(int(item.name.split("-")[1]) for item in (out / "checkpoints").glob("checkpoint-*"))


def result_of(out: Path) -> dict[str, Any]:
    """result.json."""
    data: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return data


def loop_of(recipe: dict[str, Any], out: Path) -> Any:
    """The training loop of a recipe, in this process."""
    from signalprop_lab.training.loop import Loop
    from signalprop_lab.training.networks import network_of
    from signalprop_lab.training.recipe import parse
    from signalprop_lab.training.tasks import prepare

    parsed = parse(recipe)
    prepared = prepare(parsed)
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Loop(network_of(parsed, prepared), parsed, prepared, out / "checkpoints")
