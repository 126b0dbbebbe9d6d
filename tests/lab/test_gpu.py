"""The command for a lent accelerator, rehearsed on the processor: packed, run, interrupted, moved, put on pages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks import page, results
from benchmarks.gpu import ceilings, overheads, wall
from benchmarks.gpu.__main__ import NOT_DONE, TIMED, TRAINED, main
from benchmarks.gpu.packing import pack
from benchmarks.gpu.pages import write
from benchmarks.gpu.trained import sweep_of

from signalprop.files.storage import read_json, write_json


@pytest.fixture(autouse=True)
def own_cache(monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))  # given back afterwards


def test_a_training_part_from_the_pack_to_its_page(tmp_path, monkeypatch, capsys) -> None:
    from benchmarks.gpu import packing

    monkeypatch.setattr(packing, "_pip", lambda *_: None)  # wheels are not what is tried here
    packed, out = tmp_path / "pack", tmp_path / "out"
    assert 0 < pack(packed, "3.12", rehearse=True) < packing.LARGEST
    tokens = {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")}
    assert tokens
    given = ["--rehearse", "--pack", str(packed), "--out"]
    assert main(["spa", *given, str(out), "--minutes", "0.0005"]) == NOT_DONE
    assert "run this again" in capsys.readouterr().err
    write_json(packed / "pack.json", {"revision": "abc", "python": "3.12"})
    assert main(["spa", *given, str(out)]) == 0
    assert {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")} == tokens
    first = read_json(out / "spa.json")
    rows = {entry["point"]["cell"]: entry["row"] for entry in first["entries"]}
    assert list(rows) and rows.keys() == set(sweep_of("spa", True).cells)
    assert all(row["status"] == "finished" and row["steps"] == 2 for row in rows.values())

    moved = tmp_path / "moved"  # to a machine that has the file, and one run less
    moved.mkdir()
    write_json(moved / "spa.json", first | {"entries": first["entries"][1:]})
    assert main(["spa", *given, str(moved)]) == 0
    again = {entry["point"]["cell"]: entry for entry in read_json(moved / "spa.json")["entries"]}
    same = [again[entry["point"]["cell"]] == entry for entry in first["entries"]]
    assert same == [False, *[True] * (len(same) - 1)]  # one of them was trained anew, to the same loss
    assert {cell: entry["row"]["eval_loss"] for cell, entry in again.items()} == {
        cell: row["eval_loss"] for cell, row in rows.items()
    }
    records, stored = tmp_path / "records", tmp_path / "stored"
    write(moved, records, stored)
    assert results.write_results_page(stored / "gpu-spa.json", stored / "gpu-spa.md")
    assert "Pre-LN / 108" in (stored / "gpu-spa.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["ceilings", pytest.param("wall", marks=pytest.mark.slow),
                                  pytest.param("overheads", marks=pytest.mark.slow)])  # fmt: skip
def test_a_timed_part_goes_on_where_it_was_and_is_refused_elsewhere(part, tmp_path, capsys) -> None:
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 0
    path = tmp_path / f"{part}.json"
    store = read_json(path)
    module = {"ceilings": ceilings, "wall": wall, "overheads": overheads}[part]
    assert [row["case"] for row in store["rows"]] == module.cases(True)
    kept = store["rows"][1:]
    write_json(path, store | {"rows": [*kept, {"case": store["rows"][0]["case"], "error": "out of memory"}]})
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 0
    rows = read_json(path)["rows"]
    assert rows[:-1] == kept and "error" not in rows[-1]  # only what failed was tried again
    write(tmp_path, tmp_path / "records", tmp_path / "stored")
    record = read_json(tmp_path / "records" / f"gpu.{part}.json")
    text = page.page({f"gpu.{part}": record})
    assert f"Machine: {record['where']}." in text and record["section"] in text
    assert "failed" not in text and len(record["section"].splitlines()) > len(rows)

    write_json(path, store | {"environment": store["environment"] | {"device": "another"}})
    capsys.readouterr()
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 2
    assert "rows of device 'another'" in capsys.readouterr().err


def test_deep_and_thin_is_held_against_shallow_and_wide_of_the_same_batch_and_mode() -> None:
    case = {"batch": 2, "tokens": 256, "mode": "eager", "small": False}
    times = {(12, 1024): 0.1, (48, 512): 0.11, (24, 1024): 0.2, (96, 512): 0.23}
    rows = [{"case": case | {"layers": n, "width": d}, "seconds": t, "memory": 2**30} for (n, d), t in times.items()]
    rows.append({"case": rows[0]["case"] | {"mode": "graph"}, "error": "RuntimeError: no"})
    lines = wall.section(rows).splitlines()
    assert [("+10.0 %" in line, "+15.0 %" in line) for line in lines[2:]] == [
        (False, False), (True, False), (False, False), (False, True), (False, False)]  # fmt: skip
    assert "RuntimeError: no" in lines[-1]


def test_every_part_has_its_sizes_and_its_words() -> None:
    """Six shapes at two sizes; 36, 72, 108 layers; five methods."""
    assert {case["layers"] * case["width"] ** 2 for case in wall.cases(False)} == {12 * 1024**2, 24 * 1024**2}
    assert len({(case["layers"], case["width"]) for case in wall.cases(False)}) == 6
    assert [len(sweep_of(part, False).cells) for part in TRAINED] == [6, 6, 5]
    assert all((Path(page.ROOT) / "benchmarks" / "gpu" / f"{part}.py").is_file() for part in TIMED)
    assert {f"gpu.{part}" for part in TIMED} == set(page.ON_A_GPU)
    assert json.dumps(overheads.cases(False))
