"""Sweeps as they run: every run once, whoever does it and however often it is interrupted."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop_lab.training import sweep as sweep_module
from signalprop_lab.training.grid import Point, load_sweep
from signalprop_lab.training.run_locks import Runs
from signalprop_lab.training.sweep import (
    open_points,
    own_device,
    prepare,
    sweep,
    work,
)
from signalprop_lab.training.tables import store_of, stored_entries
from sweeping import BASE, SWEEP, curvature, descend

TESTS = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path):
    """Write a sweep, with other fields; its path."""

    def write(**fields) -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(copy.deepcopy(SWEEP) | fields, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(sweep_module, "POLL", 0.05)


def go(path, out):
    return sweep(path, out, train=descend)


def starts(out: Path) -> dict[str, list[int]]:
    """At which steps each run was started, by directory."""
    found = sorted(out.glob("runs/**/started.txt"))
    return {
        f"{file.parent.relative_to(out)}": [int(line.split()[0]) for line in file.read_text().splitlines()]
        for file in found
    }


def done(entries):
    return [entry for entry in entries if entry.row is not None]


SMALL = {"axes": {"layers": SWEEP["axes"]["layers"]}, "tune": {"values": [0.03, 0.1, 0.3], "extend": 2}}


def test_every_run_is_done_once_and_the_best_rate_is_bracketed(written, tmp_path, capsys) -> None:
    path, out = written(), tmp_path / "out"
    entries = go(path, out)
    grid = load_sweep(path)
    assert all(entry.row is not None for entry in entries)
    assert len({entry.point for entry in entries}) == len(entries)
    assert set(starts(out)) == {grid.directory(entry.point) for entry in entries}
    assert all(at == [0] for at in starts(out).values())
    for cell in grid.cells:
        rates = sorted({entry.point.rate for entry in entries if entry.point.cell == cell})
        optimum = 1 / curvature(grid.recipe(Point(cell, 0.1, 0)))
        by_rate = {e.point.rate: e.row["eval_loss"] for e in entries if e.point.cell == cell and e.point.seed == 0}
        best = min(by_rate, key=lambda rate: by_rate[rate] if by_rate[rate] is not None else math.inf)
        assert rates[0] < best < rates[-1]
        assert best == min(rates, key=lambda rate: abs(rate - optimum))  # of a parabola: the ratio is (1 - rate h)^2
        assert {entry.point.rate for entry in entries if entry.point.cell == cell and entry.point.seed == 1} == {best}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(entries)
    assert said[-1].startswith(f"sweep: {len(entries)}/{len(entries)} runs: ")


def test_what_happened_is_found_again_in_the_runs_directories(written, tmp_path) -> None:
    out = tmp_path / "out"
    before = {entry.point: entry.row["eval_loss"] for entry in go(written(**SMALL), out)}
    for file in out.glob("runs/*/*/seed=*.json"):
        file.unlink()
    after = {entry.point: entry.row["eval_loss"] for entry in go(written(**SMALL), out)}
    assert after == before
    assert all(at[1:] in ([12], [at[1]]) for at in starts(out).values())  # from its last state: no step was done again


def test_other_settings_are_refused(written, tmp_path) -> None:
    out = tmp_path / "out"
    go(written(**SMALL), out)
    with pytest.raises(InputError, match=r"budget\.steps was 12, is 13.*another directory"):
        go(written(**SMALL, base=BASE | {"budget": {"steps": 13, "batch_size": 4}}), out)


def test_a_damaged_file_is_named(written, tmp_path) -> None:
    out = tmp_path / "out"
    go(written(**SMALL), out)
    file = next(out.glob("runs/*/*/seed=0.json"))
    for content in ("nonsense", "{}", "[]", '{"point": {}, "curve": []}'):
        file.write_text(content)
        with pytest.raises(InputError, match=r"seed=0\.json"):
            go(written(**SMALL), out)


def test_stored_runs_are_not_run_again(written, tmp_path) -> None:
    """Part of a sweep is stored; in another directory the rest runs, and the whole is as if run in one."""
    path, whole, file = written(**SMALL), tmp_path / "whole", tmp_path / "results.json"
    grid = load_sweep(path)
    store = store_of(grid, go(path, whole))
    some = store | {"rows": store["rows"][::2], "environments": [{"machine": "one"}, {"machine": "other"}]}
    for i, row in enumerate(some["rows"]):
        row["environment"] = i % 2
    write_json(file, some)
    runs = prepare(grid, tmp_path / "new")
    entries = stored_entries(grid, file)
    assert len(entries) == len(some["rows"]) and all(map(runs.put, entries)) and not any(map(runs.put, entries))
    assert store_of(grid, runs.entries())["rows"] == some["rows"]
    again = store_of(grid, go(path, tmp_path / "new"))
    assert [row["cell"] for row in again["rows"]] == [row["cell"] for row in store["rows"]]
    assert [row["eval_loss"] for row in again["rows"]] == [row["eval_loss"] for row in store["rows"]]
    assert again["environments"] == some["environments"]
    assert set(starts(tmp_path / "new")) == {row["directory"] for row in store["rows"][1::2]}


def test_stored_runs_of_other_settings_are_refused(written, tmp_path) -> None:
    file = tmp_path / "results.json"
    path = written(**SMALL)
    write_json(file, store_of(load_sweep(path), go(path, tmp_path / "out")))
    other = load_sweep(written(**SMALL, base=BASE | {"budget": {"steps": 13, "batch_size": 4}}))
    with pytest.raises(InputError, match=r"results\.json holds runs of other settings .*budget\.steps was 12, is 13"):
        stored_entries(other, file)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="holds no results of a sweep"):
        stored_entries(other, file)


def test_runs_that_raise_are_told_and_the_others_done(written, tmp_path) -> None:
    axes = {"decay": {"none": {}, "half": {"optimizer.weight_decay": 0.5}}}
    out = tmp_path / "out"
    entries = go(written(axes=axes), out)
    failed = [entry for entry in entries if entry.error]
    assert {entry.point.cell for entry in failed} == {"half"}
    assert len(failed) == 3  # once each in one call; no seeds of no best rate
    assert all("this decay is refused" in entry.error for entry in failed)
    assert done(entries)
    assert not [entry for entry in entries if entry.point.cell == "none" and entry.row is None]
    again = go(written(axes=axes), out)
    assert [entry for entry in again if entry.error and entry.session == failed[0].session] == []  # it tries again
    assert len(done(again)) == len(done(entries))


def test_two_processes_never_have_the_same_run(written, tmp_path) -> None:
    grid = load_sweep(written())
    prepare(grid, tmp_path / "out")
    points = open_points(grid, {cell: {} for cell in grid.cells})
    barrier = threading.Barrier(2)
    found: list[Point] = []
    claims = []

    def all_of(runs) -> None:
        barrier.wait()
        for point in points:
            if (claim := runs.take(point)) is not None:
                found.append(point)
                claims.append(claim)

    threads = [threading.Thread(target=all_of, args=(Runs(grid, tmp_path / "out", "s"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(found) == Counter(points)


def test_a_living_process_keeps_its_run(written, tmp_path) -> None:
    grid = load_sweep(written())
    one, other = prepare(grid, tmp_path / "out"), prepare(grid, tmp_path / "out")
    point = Point("plain / 2", 0.03, 0)
    claim = one.take(point)
    assert claim is not None and claim.entry.attempts == 1
    assert one.take(point) is None and other.take(point) is None
    claim.release()  # as when its process has gone: the file is closed
    taken = other.take(point)
    taken.write(row={"status": "finished"})
    taken.release()
    assert one.take(point) is None


def test_a_run_that_kills_its_process_is_tried_twice(written, tmp_path) -> None:
    grid = load_sweep(written(**SMALL))
    runs = prepare(grid, tmp_path / "out")
    point = Point("2", 0.1, 0)
    for _ in range(2):
        claim = runs.take(point)
        claim.release()
    work(runs, descend)
    left = [entry for entry in runs.entries() if entry.row is None]
    assert [(entry.point, entry.error) for entry in left] == [(point, "its process died 2 times")]
    assert done(runs.entries())
    assert point in {entry.point for entry in done(go(grid, tmp_path / "out"))}  # the next call


def test_an_interrupted_run_goes_on(written, tmp_path, capsys) -> None:
    out, calls = tmp_path / "out", itertools.count()

    def interrupted(recipe, out, **options):
        return descend(recipe, out, interrupted_at=5 if next(calls) == 2 else None, **options)

    with pytest.raises(KeyboardInterrupt):
        sweep(written(**SMALL), out, train=interrupted)
    assert capsys.readouterr().err.count("\n") == 2
    entries = go(written(**SMALL), out)
    assert sorted(Counter(tuple(at) for at in starts(out).values()).items())[-1] == ((0, 5), 1)
    whole = {e.point: e.row["eval_loss"] for e in go(written(**SMALL), tmp_path / "whole")}
    assert {e.point: e.row["eval_loss"] for e in done(entries)} == whole


def process(path, out, jobs=1, pause="0.05") -> subprocess.Popen[str]:
    """A sweep in a process (group) of its own."""
    code = (
        "from pathlib import Path; from signalprop_lab.training.sweep import sweep; from sweeping import descend\n"
        f"if __name__ == '__main__': sweep({str(path)!r}, Path({str(out)!r}), jobs={jobs},"
        " train=descend)"
    )
    script = out.with_suffix(".py")
    script.write_text(code)
    search = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": search, "PAUSE": pause}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this takes too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["parent by its terminal", "parent", "a worker", "parent with -9"])
def test_several_processes_end_together_or_carry_on(whom, written, tmp_path) -> None:
    path, out = written(**SMALL), tmp_path / "out"
    running = process(path, out, jobs=2, pause="0.1")
    wait_for(lambda: len(list(out.glob("runs/**/state.json"))) == 2)
    pids = {int(line.split()[1]) for f in out.glob("runs/**/started.txt") for line in f.read_text().splitlines()}
    assert len(pids) == 2 and running.pid not in pids
    if whom == "parent by its terminal":
        os.killpg(running.pid, signal.SIGINT)
    elif whom == "parent":
        os.kill(running.pid, signal.SIGINT)
    elif whom == "parent with -9":
        os.kill(running.pid, signal.SIGKILL)
    else:
        os.kill(min(pids), signal.SIGKILL)
    _, text = running.communicate(timeout=120)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    runs = Runs(load_sweep(path), out, "look")
    if whom == "a worker":  # the other one has done everything
        assert running.returncode == 0
        assert "1 of 2 processes ended" in text
        before = starts(out)
        go(path, out)
        assert starts(out) == before
        assert sorted(len(at) for at in before.values())[-2:] == [1, 2]
    else:
        assert running.returncode != 0
        assert len(done(runs.entries())) < len(done(go(path, out)))


def test_every_process_has_a_gpu_of_its_own(monkeypatch) -> None:
    given = []
    for i in range(4):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
        own_device(i)
        given.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert given == ["3", "5", "7", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    own_device(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
