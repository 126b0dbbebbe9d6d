"""What users wait for: every command of the README and of the five questions, over its floor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.memory import peak
from benchmarks.prediction import environment, fresh
from benchmarks.timing import compared

TITLE = "What users wait for"
ABOUT = """
`python -m benchmarks waiting`: commands as fresh processes, on one thread; CPU time and peak memory. Commands that need
no model stand over the start of the command line. Commands that run a model stand over their floor: a process that
imports PyTorch and transformers, loads the same checkpoint and does the passes that the command cannot do without, on
as many tokens. The checkpoint is GPT-2 small (124M parameters) with random weights in single precision.
"""
READING = """
A floor of a command that runs a model holds the passes that its result is made of: for `measure` one forward and
backward pass over 4 sequences of 128 tokens, for `diagnose` one over 512 tokens, for `apply` and `check` none.
"""
ROUNDS = 3
_LOAD = """
import sys, torch
from transformers import GPT2LMHeadModel
torch.set_num_threads(1)
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
for sequences, tokens in {passes}:
    ids = torch.randint(0, 50257, (sequences, tokens))
    model(ids, labels=ids).loss.backward()
"""


def without_a_model() -> dict[str, tuple[str, ...]]:
    """Commands that import no PyTorch, by what a user types."""
    command = ("-m", "signalprop")
    typed = (
        "predict tgs --layers 192 --norm post --scheme xavier",
        "predict tgs --layers 192 --norm post --scheme deepscalelm --plot signal.svg --overwrite",
        "predict gpt2", "predict llama-7b", "predict olmo2-7b", "predict qwen3-30b-a3b",
        "advise tgs --layers 48 --norm post --scheme xavier", "schemes --for gpt2 --layers 48", "kernel gallery",
    )  # fmt: skip
    return {line: (*command, *line.split()) for line in typed} | {"signalprop --version": (*command, "--version")}


def with_a_model(checkpoint: Path, out: Path) -> dict[str, tuple[str, ...]]:
    """Commands that run or load a model, and their floors."""
    command, model = ("-m", "signalprop"), str(checkpoint)
    loaded, passed = (("-c", _LOAD.format(passes=passes), model) for passes in ("()", "((4, 128),)"))
    return {
        "floor: load": loaded,
        "anatomy": (*command, "anatomy", model),
        "check --scheme huggingface": (*command, "check", model, "--scheme", "huggingface"),
        "apply --scheme lns": (*command, "apply", model, "--scheme", "lns", "--out", str(out), "--overwrite"),
        "floor: load, one pass of 4 x 128": passed,
        "measure": (*command, "measure", model),
        "compare": (*command, "compare", model, "--no-report"),
        "diagnose --tokens 512": (*command, "diagnose", model, "--tokens", "512", "--no-report"),
    }


def checkpoint_in(folder: Path) -> Path:
    """GPT-2 small with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    return folder


def measured(rounds: int = ROUNDS) -> Iterator[str]:
    """The section of the page."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as cache:
        os.chdir(work)
        try:
            light = without_a_model()
            yield _table("Without a model.", light, "signalprop --version", cache, rounds)
            heavy = with_a_model(checkpoint_in(Path(work) / "gpt2"), Path(work) / "applied")
            yield _table("With GPT-2 small.", heavy, "floor: load, one pass of 4 x 128", cache, rounds)
        finally:
            os.chdir(here)


def _table(title: str, commands: dict[str, tuple[str, ...]], base: str, cache: str, rounds: int) -> str:
    seconds = fresh(rounds, cache, commands)
    peaks = {name: f"{peak(words, env=environment(cache))[0] / 2**20:.0f} MB" for name, words in commands.items()}
    return compared(title, seconds, base, **{"peak memory": peaks})
