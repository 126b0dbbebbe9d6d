"""Parts that train: sweeps of the laboratory, `PART.yaml` beside this file, whose runs go into one JSON file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.timed import begun, here
from signalprop.files.storage import make_folder, write_json
from signalprop_lab.training.grid import Grid, Point, grid_of, load_sweep
from signalprop_lab.training.recipe_files import put, read_yaml
from signalprop_lab.training.sweep import prepare, to_stderr, work
from signalprop_lab.training.sweep import real_train as train_run
from signalprop_lab.training.sweep_definition import Sweep

HERE = Path(__file__).parent
TINY = {"d_model": 32, "n_heads": 2, "d_ff": 64}
REHEARSED: dict[str, Any] = {
    "precision": "fp32",
    "budget": {"steps": 2, "batch_size": 2},
    "cadence.validation_examples": 4,
    "data.tokenizer": {"kind": "bytes"},
    "data.seq_len": 16,
    "data.limit": 8,
    "data.validation": 0.3,
}


def sweep_of(part: str, rehearse: bool) -> Grid:
    """The sweep of a part; at a rehearsal, of tiny models that read little for a few steps."""
    path = HERE / f"{part}.yaml"
    if not rehearse:
        return load_sweep(path)
    data = read_yaml(path)
    for key, value in REHEARSED.items():
        put(data["base"], key, value)
    shrink(data["base"]["model"]["architecture"], 2)
    for axis in data["axes"].values():
        for i, settings in enumerate(axis.values()):
            shrink(settings, 2 + i)  # depths stay different ones
    return grid_of(Sweep(**data), data["base"])


def shrink(settings: dict[str, Any], layers: int) -> None:
    """Make the sizes among these settings tiny, in place."""
    for key in settings:
        name = key.rpartition(".")[2]
        settings[key] = {**TINY, "n_layers": layers}.get(name, settings[key])


def measure(part: str, out: Path, pack: Path, rehearse: bool) -> int:
    """Train the runs that DIR/PART.json lacks; how many failed. An interrupted run goes on from DIR/runs/PART.

    Raises:
        InputError: the file or the folder holds runs of another device, version or sweep.
    """
    grid, path = sweep_of(part, rehearse), out / f"{part}.json"
    make_folder(out)
    store = begun(path, {"part": part, "rehearsed": rehearse, "environment": here(pack), "entries": []})
    runs = prepare(grid, out / "runs" / part)
    for entry in store["entries"]:  # of a machine that is no more
        place = runs.out / f"{grid.directory(Point(**entry['point']))}.json"
        if not place.exists():
            make_folder(place.parent)
            write_json(place, entry)

    def keep() -> None:
        entries = [asdict(entry) for entry in runs.entries() if entry.row is not None]
        for entry in entries:
            entry["row"]["revision"] = entry["row"]["revision"] or store["environment"]["git"]
        write_json(path, store | {"entries": entries})

    def log(line: str) -> None:
        to_stderr(line)
        keep()

    work(runs, train_run, log)
    keep()
    return sum(entry.row is None for entry in runs.entries())
