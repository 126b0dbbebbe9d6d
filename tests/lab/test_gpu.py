"""The command for a lent accelerator, rehearsed on the processor: packed, run, gone on with, put on the page."""

from __future__ import annotations

import os

import pytest
import yaml
from benchmarks import page
from benchmarks.gpu import ceilings, overheads, packing, wall
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.timed import write_records

from signalprop.files.storage import read_json, write_json
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.tasks import prepare
from sweeping import SWEEP


@pytest.mark.slow
def test_the_pack_has_the_texts_of_the_sweeps_as_tokens(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "kept")
    monkeypatch.setattr(packing, "_pip", lambda *_: None)  # wheels are not what is tried here
    monkeypatch.setattr(packing, "SWEEPS", (tmp_path / "tiny.yaml",))
    sweep = {key: value for key, value in SWEEP.items() if key != "tune"}
    sweep["base"] = SWEEP["base"] | {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sweep))
    packed = tmp_path / "pack"
    assert 0 < packing.pack(packed, "3.12") < packing.LARGEST
    tokens = {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")}
    assert len(tokens) == 1 and os.environ["XDG_CACHE_HOME"] == "kept"
    monkeypatch.setenv("XDG_CACHE_HOME", str(packed / "cache"))
    grid = load_sweep(tmp_path / "tiny.yaml")
    prepare(grid.recipe(Point(list(grid.cells)[-1], None, 1)))
    assert {file: file.stat().st_mtime_ns for file in packed.rglob("*.safetensors")} == tokens


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
    write_records(tmp_path, tmp_path / "records")
    record = read_json(tmp_path / "records" / f"gpu.{part}.json")
    text = page.page({f"gpu.{part}": record})
    assert f"Machine: {record['where']}." in text and record["section"] in text
    assert "failed" not in text and len(record["section"].splitlines()) > len(rows)

    write_json(path, store | {"environment": store["environment"] | {"device": "another"}})
    capsys.readouterr()
    assert main([part, "--rehearse", "--out", str(tmp_path)]) == 2
    assert "rows of device 'another'" in capsys.readouterr().err
