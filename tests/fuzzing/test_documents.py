"""Every JSON and YAML file that is read, damaged in all ways: read, or refused in one short line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

import signalprop as sp
from damage import as_json, check_command, commanded, damaged, damaged_bytes, examine, files_of
from reported import as_measured, predicted, table_of, write_run
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.files.storage import finite
from signalprop.kernels.trace import trace
from signalprop.report.html import document, read, render
from signalprop.report.kernel_tables import to_json
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.recipe import load_recipe
from signalprop_lab.training.recipe_files import read_recipe, read_yaml
from signalprop_lab.training.run_locks import Runs
from signalprop_lab.training.tables import SCHEMA as RESULTS

ARCHITECTURE = {
    "kind": "encoder", "n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 50, "seq_len": 8,
    "norm_placement": ["pre", "post"], "dropout": 0.1, "final_norm": True,
}  # fmt: skip
TABLE = table_of("deepscalelm", n_layers=2)
PROFILE = predicted("xavier", n_layers=2)
ESTIMATE = {"value": 1.5, "standard_error": 0.1}
DIAGNOSIS = {
    "schema": "signalprop/diagnosis/1", "model": "m", "family": "gpt2", "n_parameters": 10, "perplexity": 4.4,
    "data": {"source": "s", "sequences": 2, "tokens": 16, "length": 8, "skip_first": 1}, "loss": ESTIMATE,
    "signal": [
        {"layer": i, "stack": "decoder", "variance_in": 1.0, "variance": 1.2, "token_correlation": 0.1,
         "effective_rank": 3.0, "gradient": 1.0, "entropy": [0.5, 0.4], "score_std": [1.0, 2.0]} for i in range(2)
    ],
    "weights": [
        {"layer": i, "stack": "decoder", "std": {"query": 0.1}, "predicted_variance": 1.0, "identity": 0.2}
        for i in range(2)
    ],
    "identity": {"cosine": [0.9, 0.8], "angular": [[0.1, 0.2], [0.3]], "jacobian": [ESTIMATE, ESTIMATE]},
    "removal": {
        "single": [{"layers": [i], "loss": ESTIMATE, "increase": ESTIMATE} for i in range(2)],
    },
    "casts": [{"format": "int8", "of": "both", "scaled": True, "loss": ESTIMATE, "increase": ESTIMATE,
               "signal_to_noise": [30.0, 20.0]}],
    "findings": [{"severity": "fault", "name": "dead head", "layers": [0], "text": "t", "cause": "c", "remedy": "a"}],
    "notes": ["n"],
}  # fmt: skip


def kernels() -> dict[str, Any]:
    """The JSON of `signalprop kernel`."""
    return finite(to_json({"x": trace(table_of("xavier", n_layers=2, seq_len=6))}, "signalprop/kernel/1"))


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


def sweep() -> dict[str, Any]:
    """A shipped sweep that holds its base."""
    data = read_yaml("sweep-tgs-tab11")
    return data | {"base": read_recipe(data["base"])}


def lines_of(row: Any) -> st.SearchStrategy[bytes]:
    """Files of JSON lines, some of them damaged."""
    rows = st.lists(damaged(row, 2) | st.just(row), min_size=1, max_size=4)
    return rows.map(lambda found: "\n".join(map(as_json, found)).encode())


def reported(path: Path) -> None:
    render(document(list(read(path).items())))


def command(*arguments: str) -> Callable[[Path], None]:
    """Run a command on the file, FILE among its arguments."""

    def go(path: Path) -> None:
        check_command(commanded(*(str(path) if item == "FILE" else item for item in arguments)))

    return go


# name of the file, what may stand in it, what reads it
SUBJECTS: dict[str, tuple[str, st.SearchStrategy[bytes], Callable[[Path], Any]]] = {
    "architecture": ("a.json", files_of(ARCHITECTURE), command("predict", "FILE")),
    "parametrization": ("a.json", files_of(TABLE.to_json()), command("predict", "FILE")),
    "parametrization on a page": ("a.json", files_of(TABLE.to_json()), reported),
    "profile": ("a.json", files_of(PROFILE.to_json()), reported),
    "comparison": ("a.json", files_of(sp.compare(PROFILE, as_measured(PROFILE)).to_json()), reported),
    "diagnosis": ("a.json", files_of(DIAGNOSIS), command("diagnose", "FILE")),
    "diagnosis on a page": ("a.json", files_of(DIAGNOSIS), reported),
    "kernels": ("a.json", st.deferred(lambda: files_of(kernels())), reported),
    "recipe": ("a.yaml", st.deferred(lambda: files_of(read_recipe("gpt-small"))), command("train", "FILE", "--show")),
    "recipe in YAML": (
        "a.yaml", st.deferred(lambda: damaged_bytes(yaml.safe_dump(read_recipe("gpt-small")).encode())), load_recipe,
    ),
    "sweep": ("a.yaml", st.deferred(lambda: files_of(sweep())), load_sweep),
    "results of a sweep": ("a.json", st.deferred(lambda: files_of(results())), reported),
}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
def test_damaged_documents(subject: str, tmp_path: Path) -> None:
    name, content, reader = SUBJECTS[subject]
    file = tmp_path / name
    examine(file, content, lambda: reader(file))


RESULT = {"schema": "signalprop/run/1", "status": "finished", "steps": 3, "train_loss": 1.0}
RUN_FILES = {
    "metrics.jsonl": lines_of({"step": 1, "loss": 2.5, "learning_rate": 0.1}),
    "signal.jsonl": lines_of({"step": 0, "profile": predicted("xavier", n_layers=1).to_json()}),
    "result.json": files_of(RESULT),
    "environment.json": files_of({"versions": {"torch": "2"}, "python": "3.11"}),
    "recipe.yaml": damaged_bytes(b"scheme: xavier\n"),
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_files_of_a_run(name: str, tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", steps=3, status="finished")
    examine(root / name, RUN_FILES[name], lambda: reported(root))


def test_damaged_runs_of_a_sweep(tmp_path: Path) -> None:
    grid = load_sweep("sweep-tgs-tab11")
    point = Point(next(iter(grid.cells)), grid.sweep.tune.values[0] if grid.sweep.tune else None, 0)
    entry = tmp_path / f"{grid.directory(point)}.json"
    entry.parent.mkdir(parents=True)
    known = {"point": asdict(point), "settings": grid.settings(point), "error": None, "row": results()["rows"][0],
             "session": "x", "attempts": 1}  # fmt: skip
    table = command("sweep", "sweep-tgs-tab11", "--out", str(tmp_path), "--jobs", "0")
    examine(entry, files_of(known), lambda: Runs(grid, tmp_path, "x").entries())
    examine(entry, files_of(known), lambda: table(entry))


class TestWhatFuzzingFound:
    """One example of everything that was not one clear line before."""

    def test_numbers_beyond_a_double_in_metrics(self, tmp_path: Path) -> None:
        root = write_run(tmp_path / "run", steps=2)
        (root / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {"9" * 400}}}\n{{"step": 2, "loss": 1.0}}\n')
        steps, losses = read(root)["run"].metrics["loss"]  # type: ignore[union-attr]
        assert steps == (1, 2) and np.isnan(losses[0]) and losses[1] == 1.0

    def test_an_error_near_the_largest_double(self) -> None:
        data = as_measured(PROFILE).to_json()
        for row in data["sublayers"]:
            row["stream_out"]["token_correlation_se"] = 1e308
            row["stream_out"]["token_correlation"] = 0.01
        found = sp.compare(PROFILE, sp.Profile.from_json(data)).agreements
        assert found[1].quantity == "forward token correlation" and found[1].standard_error is not None

    @pytest.mark.parametrize(
        "changes",
        [
            {"removal": {"single": [{"layers": [2], "loss": ESTIMATE, "increase": ESTIMATE}]}},
            {"removal": {"single": [{"layers": [-1], "loss": ESTIMATE, "increase": ESTIMATE}]}},
            {"removal": {"single": [{"layers": [], "loss": ESTIMATE, "increase": ESTIMATE}]}},
            {"identity": {"cosine": [0.9], "angular": []}},
            {"identity": {"cosine": [0.9, 0.8], "angular": [], "jacobian": [ESTIMATE]}},
            {"casts": [{**DIAGNOSIS["casts"][0], "signal_to_noise": [1.0]}]},  # type: ignore[index,dict-item]
        ],
    )
    def test_diagnoses_of_other_layers(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=r"layers|at least 1 item"):
            Diagnosis.from_json({**DIAGNOSIS, **changes})


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("a: " + "[" * 100_000, "characters"),
            ("a: " + "[" * 200, "not YAML"),
            ("a: &x [1]\nb: *x\n", "aliases"),
            ("a: !!python/object/apply:os.system ['true']\n", "not YAML"),
            ("a: !!binary aGVsbG8=\n", "quotation marks"),
            ("a: 2026-01-01\n", "quotation marks"),
            ("a: 2026-13-01\n", "not YAML"),
            ("a: !!set {x}\n", "quotation marks"),
            ("a: 0x" + "f" * 5_000 + "\n", "not YAML"),
            ("a: " + "9" * 5_000 + "\n", "not YAML"),
            ('a: "\\ud800"\n', "not YAML"),
            ("a: " + "x" * 200_000, "characters"),
            ("? [1, 2]\n: 3\n", "not YAML"),
        ],
    )
    def test_what_no_recipe_holds(self, tmp_path: Path, text: str, says: str) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(text)
        with pytest.raises(InputError, match=says):
            load_recipe(file)

    @pytest.mark.parametrize("value", ["[" * 200, "9" * 5000, "2026-13-01", "*x", "!!python/name:os.system"])
    def test_values_of_settings(self, value: str) -> None:
        with pytest.raises(InputError, match="the value of --set"):
            load_recipe("gpt-small", [f"model.options={value}"])
