"""Files of every kind that is read, damaged: what the campaign tries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MPLBACKEND="Agg", COLUMNS="200")

import transformers
from hypothesis.strategies import SearchStrategy

from commandline import Result
from damage import commanded, damaged_bytes, files_of, outcome, problem_of
from fuzzing import test_checkpoints, test_documents
from gguf_file import write_gguf
from reported import write_run
from signalprop.diagnosis.loading import load
from signalprop_lab.training.claims import Runs
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.tables import SCHEMA as RESULTS


def results() -> dict[str, Any]:
    """What a sweep keeps."""
    sweep = {
        "schema": "signalprop/sweep/1", "name": "s", "base": "gpt-small", "seeds": [0, 1],
        "axes": {"scheme": {"a": {"model.scheme": "xavier"}, "b": {"model.scheme": "lns"}}},
        "tune": {"key": "optimizer.learning_rate", "values": [0.001, 0.003]},
        "verdict": [{"less": ["a", "b"]}],
    }  # fmt: skip
    row = {"learning_rate": 0.001, "status": "finished", "score": 2.0, "train_loss": 2.0, "eval_loss": 2.0,
           "chance": 3.0, "seconds": 1.0, "scores": {"accuracy": 0.5}, "directory": "runs/a"}  # fmt: skip
    rows = [{"cell": cell, "seed": seed, **row} for cell in "ab" for seed in (0, 1)]
    return {"schema": RESULTS, "sweep": sweep, "base": {}, "environments": [{}], "rows": rows, "failed": [
        {"cell": "a", "rate": 0.003, "seed": 1, "error": "e"}]}  # fmt: skip


def subjects(folder: Path) -> Iterator[tuple[str, SearchStrategy[bytes], Callable[[bytes], None]]]:
    """Every kind of file: its name, its damaged contents, what reads one."""

    def reader(path: Path, act: Callable[[Path], Any]) -> Callable[[bytes], None]:
        def go(content: bytes) -> None:
            path.write_bytes(content)
            outcome(lambda: act(path))

        return go

    for name, (file, content, act) in test_documents.SUBJECTS.items():
        yield name, content, reader(folder / file, act)
    run = write_run(folder / "run", steps=3, status="finished")
    for file, content in test_documents.RUN_FILES.items():
        good = (run / file).read_bytes()
        yield f"run/{file}", content, reader(run / file, lambda path: test_documents.reported(path.parent))
        (run / file).write_bytes(good)
    yield "results of a sweep", files_of(results()), reader(folder / "r.json", test_documents.reported)
    grid = load_sweep("sweep-tgs-tab11")
    point = Point(next(iter(grid.cells)), grid.sweep.tune.values[0] if grid.sweep.tune else None, 0)
    entry = folder / "sweep" / f"{grid.directory(point)}.json"
    entry.parent.mkdir(parents=True)
    known = {"point": asdict(point), "settings": grid.settings(point), "error": None,
             "row": results()["rows"][0], "session": "x", "attempts": 1, "curve": {"1": 2.0}}  # fmt: skip
    yield "run of a sweep", files_of(known), reader(entry, lambda _: Runs(grid, folder / "sweep", "x").entries())
    yield (
        "table of a sweep",
        files_of(known),
        reader(
            entry, test_documents.command("sweep", "sweep-tgs-tab11", "--out", str(folder / "sweep"), "--table-only")
        ),
    )
    plain = test_checkpoints.make_plain(folder / "plain")
    applied = test_checkpoints.make_applied(plain)
    (plain / "tokenizer_config.json").write_text(json.dumps(test_checkpoints.TOKENS))
    for name, (which, file, making, act) in test_checkpoints.SUBJECTS.items():
        place = plain if which == "plain" else applied
        if file.endswith("index.json"):
            continue  # its directory is another one; test_checkpoints.py has it
        good = (place / file).read_bytes()
        yield name, making(plain, applied), reader(place / file, lambda path, act=act: act(path.parent))
        (place / file).write_bytes(good)
    gguf = gguf_of(folder / "tiny.gguf")
    yield "gguf", damaged_bytes(gguf), reader(folder / "a.gguf", load)
    yield (
        "header of a gguf",
        damaged_bytes(gguf[:4000]).map(lambda head: head + gguf[4000:]),
        reader(folder / "a.gguf", load),
    )
    config = files_of(json.loads((plain / "config.json").read_text()))
    for command in ("check", "fold", "measure"):
        more = {"check": ["--scheme", "rezero"], "fold": ["--out", str(folder / "new")], "measure": []}[command]
        yield (
            f"{command} of a config",
            config,
            reader(
                plain / "config.json",
                lambda path, name=command, more=more: one_line(commanded(name, path.parent, *more)),
            ),
        )


def one_line(result: Result) -> None:
    problem = problem_of(result)
    assert problem is None, problem


def gguf_of(path: Path) -> bytes:
    """A tiny model in llama.cpp's format."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator(["the state of the union "] * 20, trainer)
    config = transformers.LlamaConfig(
        vocab_size=bpe.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=32, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    write_gguf(path, transformers.LlamaForCausalLM(config).eval(), bpe)
    return path.read_bytes()
