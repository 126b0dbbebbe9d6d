"""What users wait for: commands of the README and of the five questions, and every preset, over their floors."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.memory import peak
from benchmarks.prediction import environment, fresh
from benchmarks.timing import compared, table
from signalprop.network.presets import PRESETS

TITLE = "What users wait for"
ABOUT = """
`python -m benchmarks waiting`: commands as fresh processes, on one thread; CPU time and peak memory, with the goal of
each. Commands that need no model stand over the start of the command line. Commands that run a model stand over their
floor: a process that imports PyTorch and transformers, loads the same checkpoint and does the passes that the command
cannot do without, on as many tokens. Checkpoints have random weights: GPT-2 small (124M parameters) in single
precision, a Llama of 1.2B in bfloat16, and SmolLM2-135M's shape in single precision.
"""
READING = """
A floor of a command that runs a model holds the passes that its result is made of: for `measure` one forward and
backward pass over 4 sequences of 128 tokens, for `diagnose` one over its tokens, for `apply` and `check` none.
"""
START = "signalprop --version"
OVER_START, OVER_FLOOR = 0.5, 1.3  # goals: seconds beyond the start of `predict` of a preset; times the floor
GOALS = {
    "schemes --for gpt2 --layers 48": "5 s",
    "predict gpt2 --layers 1000000": "refused before any work",
    "diagnose --tokens 2048": "4 passes",
}
_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
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
LLAMA_1B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "tie_word_embeddings": True, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def without_a_model() -> dict[str, tuple[str, ...]]:
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


def looking(model: str, out: Path) -> dict[str, tuple[str, ...]]:
    """Commands that load a model, and their floor."""
    return {
        "floor: load": ("-c", _LOAD.format(passes="()"), model),
        "anatomy": (*COMMAND, "anatomy", model),
        "check --scheme huggingface": (*COMMAND, "check", model, "--scheme", "huggingface"),
        "apply --scheme lns": ("-c", _AFRESH, *COMMAND, "apply", model, "--scheme", "lns", "--out", str(out)),
    }


def running(model: str) -> dict[str, tuple[str, ...]]:
    """Commands that run a model, and their floor."""
    return {
        "floor: load, one pass of 4 x 128": ("-c", _LOAD.format(passes="((4, 128),)"), model),
        "measure": (*COMMAND, "measure", model),
        "compare": (*COMMAND, "compare", model),
        "diagnose --tokens 512": (*COMMAND, "diagnose", model, "--tokens", "512"),
    }


def diagnosing(model: str) -> dict[str, tuple[str, ...]]:
    """A diagnosis over one pass."""
    return {
        "floor: load, one pass of 1 x 2,048": ("-c", _LOAD.format(passes="((1, 2048),)"), model),
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
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as cache:
        os.chdir(work)
        try:
            yield _table("Without a model.", without_a_model(), START, cache, 3)
            yield _presets(cache)
            out = Path(work) / "applied"
            for name, config, tables in (
                ("GPT-2 small", GPT2, (lambda m: looking(m, out), running)),
                ("a Llama of 1.2B", LLAMA_1B, (lambda m: looking(m, out),)),
                ("SmolLM2-135M's shape", SMOLLM2, (lambda m: looking(m, out), diagnosing)),
            ):
                model = checkpoint_in(Path(work) / name.replace(" ", "-"), config)
                for number, commands in enumerate(tables):
                    typed = commands(model)
                    yield _table(f"With {name}.", typed, next(iter(typed)), cache, 2, warm_up=number == 0)
        finally:
            os.chdir(here)


def _table(
    title: str, commands: dict[str, tuple[str, ...]], base: str, cache: str, rounds: int, warm_up: bool = True
) -> str:
    variables, names = environment(cache), list(commands)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, str] = {}
    if warm_up:
        peak(commands[base], env=variables)  # bytecode is cached, as once a package has been installed
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            most, spent = peak(commands[name], env=variables)
            seconds[name].append(spent)
            peaks[name] = f"{most / 2**20:.0f} MB"
    usual = "" if base == START else f"{OVER_FLOOR} times"
    goals = {name: GOALS.get(name, "" if name == base else usual) for name in commands}
    return compared(title, seconds, base, goal=goals, **{"peak memory": peaks})


def _peaks(commands: dict[str, tuple[str, ...]], cache: str) -> dict[str, str]:
    return {name: f"{peak(words, env=environment(cache))[0] / 2**20:.0f} MB" for name, words in commands.items()}


def _presets(cache: str) -> str:
    commands = {name: (*COMMAND, "predict", name) for name in PRESETS}
    seconds = fresh(2, cache, {START: (*COMMAND, "--version"), **commands})
    start = statistics.median(seconds.pop(START))
    beyond = {name: statistics.median(values) - start for name, values in seconds.items()}
    peaks = _peaks({name: commands[name] for name in _dearest(beyond)}, cache)
    rows = [[f"`predict {name}`", f"{beyond[name]:.2f} s", f"{OVER_START} s", peaks[name]] for name in peaks]
    over = sum(x > OVER_START for x in beyond.values())
    said = (
        f"`predict` of all {len(beyond)} presets at their own contexts, beyond the start ({start:.2f} s): median "
        f"{statistics.median(beyond.values()):.2f} s, {over} above {OVER_START} s. The ten that take longest:"
    )
    return f"{said}\n\n{table(['command', 'beyond the start', 'goal', 'peak memory'], rows)}"


def _dearest(beyond: dict[str, float]) -> Sequence[str]:
    return sorted(beyond, key=lambda name: -beyond[name])[:10]
