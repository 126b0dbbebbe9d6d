"""Commands that are killed or stopped: nothing half written has a final name, and the next call gives the same."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

import killing
from killing import Case, Moment
from signalprop import cli


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("killed") / "given"
    killing.prepare(folder, trained_run=False)
    return folder


@pytest.fixture(scope="module")
def quick(given: Path) -> dict[str, Case]:
    """`fold`, and a report of one profile."""
    cases = killing.cases(given)
    return {
        "fold": cases["fold"],
        "report": Case("report", ("report", str(given / "p.json"), "--out", "r.html"), ("r.html",)),
    }


@pytest.mark.parametrize("name", ["fold", "report"])
def test_killed_in_place_of_a_change(name: str, quick: dict[str, Case], given: Path, tmp_path: Path) -> None:
    """Killed as it begins to write, as it gives a file its name, and in between."""
    case, whole = quick[name], tmp_path / "whole"
    undisturbed = killing.run(case.arguments, whole)
    assert undisturbed.status == 0 and killing.broken(whole) == []
    n = len(undisturbed.changes)
    assert n >= 2 and undisturbed.changes[-1][1] == "os.rename"
    for change in sorted({2, (n + 1) // 2, n}):
        folder = tmp_path / f"killed-{change}"
        ended = killing.run(case.arguments, folder, Moment(change))
        assert ended.killed and len(ended.changes) == change
        assert killing.leftovers(folder) or change == (n + 1) // 2
        assert killing.broken(folder) == [] and killing.said(ended) == []
        done = [item for item in case.written if (folder / item).exists()]
        assert killing.different(whole, folder, done) == []
        again = killing.remade(case, folder)
        assert again.status == 0, again.err
        assert killing.different(whole, folder, case.written) == []


@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGTERM, 143, "terminated"),
                                                        (signal.SIGINT, 130, "interrupted")])  # fmt: skip
def test_stopped_nothing_stays_behind(
    number: signal.Signals, status: int, word: str, quick: dict[str, Case], tmp_path: Path
) -> None:
    folder = tmp_path / "stopped"
    ended = killing.run(quick["fold"].arguments, folder, Moment(3, number=number))
    assert (ended.status, ended.out) == (status, "")
    assert ended.err.splitlines()[-1] == f"signalprop: {word}" and "Traceback" not in ended.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (ValueError(), 1)])
def test_stopped_while_a_library_makes_a_class(
    stop: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 makes a RuntimeError of what is raised in __set_name__, as when a signal comes while one imports."""

    class Member:
        def __set_name__(self, owner: type, name: str) -> None:
            raise stop

    def command(**_: object) -> None:
        try:
            type("Owner", (), {"member": Member()})
        except RuntimeError:
            raise
        except BaseException as error:  # as later versions of Python leave it
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(cli, "app", command)
    assert cli.run([]) == status
    assert capsys.readouterr().err.count("\n") == 1


class TestTheLookItself:
    """What the other tests rely on: half of a file is seen."""

    def test_half_a_file_is_broken(self, given: Path, tmp_path: Path) -> None:
        weights = (given / "plain" / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "p.json").write_bytes((given / "p.json").read_bytes())
        assert killing.broken(tmp_path) == []
        (tmp_path / "model.safetensors").write_bytes(weights[:-1])
        (tmp_path / "p.json").write_text("{")
        (tmp_path / "unknown.xyz").write_text("")
        assert [line.partition(":")[0] for line in killing.broken(tmp_path)] == [
            "model.safetensors", "p.json", "unknown.xyz",
        ]  # fmt: skip

    def test_another_weight_is_a_difference(self, given: Path, tmp_path: Path) -> None:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes((given / "plain" / "model.safetensors").read_bytes())
        assert killing.different(tmp_path / "one", tmp_path / "other", ["model.safetensors"]) == []
        with (tmp_path / "other" / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
        assert killing.different(tmp_path / "one", tmp_path / "other", ["model.safetensors"]) == ["model.safetensors"]
        assert killing.different(tmp_path / "one", tmp_path / "other", ["missing"]) == ["missing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "sweep", "diagnose", "fold", "apply", "report", "reproduce", "kernel"])
def test_killed_at_random_moments(name: str, given: Path, tmp_path: Path) -> None:
    if not (given / "run").exists():
        assert killing.run(("train", "tiny.yaml", "--out", "run"), given).status == 0
    case, whole, chance = killing.cases(given)[name], tmp_path / "whole", random.Random(7)
    undisturbed = killing.run(case.arguments, whole)
    assert undisturbed.status == 0, undisturbed.err
    for i in range(6):
        folder, reported = tmp_path / f"killed-{i}", set()
        for _ in range(2):
            ended = killing.run(case.arguments, folder, killing.some_moment(chance, undisturbed))
            assert killing.broken(folder) == []
            assert reported & killing.runs_said(ended) == set()
            reported |= killing.runs_said(ended)
            assert all((folder / path).exists() for path in killing.said(ended))
        again = killing.remade(case, folder)
        assert again.status == 0, again.err
        assert reported & killing.runs_said(again) == set()
        assert killing.different(whole, folder, case.written) == []


@pytest.mark.slow
def test_a_sweep_of_two_processes_is_stopped(given: Path, tmp_path: Path) -> None:
    case, folder = killing.cases(given)["sweep"], tmp_path / "stopped"
    running = killing.start((*case.arguments, "--jobs", "2"), folder)
    while not list(folder.glob("sweep/runs/*/*/metrics.jsonl")):
        assert running.process.is_alive()
        running.process.join(0.02)
    assert running.process.pid is not None
    running.process.terminate()
    ended = running.end()
    assert ended.status == 143 and ended.err.splitlines()[-1] == "signalprop: terminated"
    assert "Traceback" not in ended.err and killing.broken(folder) == []
    again = killing.run(case.arguments, folder)
    assert again.status == 0 and killing.runs_said(ended) & killing.runs_said(again) == set()
    assert killing.run(case.arguments, tmp_path / "whole").status == 0
    assert killing.different(tmp_path / "whole", folder, case.written) == []
