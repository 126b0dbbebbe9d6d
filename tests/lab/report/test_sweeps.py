"""Sweeps in the report: what it shows is what the tables of the sweep say, and nothing in a file leads elsewhere."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from reported import write_run
from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.report.html import document, read
from signalprop.report.sections import Chart, Document, Link
from signalprop_lab.report.sweeps import of_results
from signalprop_lab.training import tables
from signalprop_lab.training.sweep_cells import summaries

pytest.importorskip("plotly")
RATES, SEEDS, DEPTHS = (0.001, 0.01), (0, 1), ("4", "16")
METHODS = {"plain": "xavier", "scaled": "deepscalelm"}


def losses(method: str, depth: str, rate: float, seed: int) -> float | None:
    """Of a run; None: it diverged. The larger rate is best, where it does not diverge."""
    if (method, depth, rate) == ("plain", "16", 0.01):
        return None
    return 2.0 + (method == "plain") + 0.1 * (depth == "4") + 0.5 * (rate == 0.001) + 0.02 * seed


def results(**changes: Any) -> dict[str, Any]:
    """The stored results of a sweep of two methods at two depths, rates and seeds."""
    sweep: dict[str, Any] = {
        "schema": "signalprop/sweep/1",
        "name": "both",
        "title": "Two methods",
        "claim": "Scaled is better.",
        "description": "Models of [another sweep](other.md).",
        "base": {},
        "axes": {
            "method": {name: {"model.scheme": scheme} for name, scheme in METHODS.items()},
            "layers": {depth: {"model.architecture.n_layers": int(depth)} for depth in DEPTHS},
        },
        "tune": {"key": "optimizer.learning_rate", "values": list(RATES)},
        "seeds": list(SEEDS),
        "seeds_at": "all",
        "verdict": [
            {"claim": "Scaled trains", "trains": ["scaled / 4", "scaled / 16"]},
            {"claim": "Plain trains", "trains": ["plain / 4"]},
        ],
        **changes,
    }
    rows = []
    for method in METHODS:
        for depth in DEPTHS:
            for rate in RATES:
                for seed in SEEDS:
                    loss = losses(method, depth, rate, seed)
                    rows.append(
                        {
                            "cell": f"{method} / {depth}", "method": method, "layers": depth, "learning_rate": rate,
                            "seed": seed, "status": "finished" if loss is not None else "diverged", "score": loss,
                            "eval_loss": loss, "train_loss": loss, "chance": 5.0, "seconds": 1.5,
                            "directory": f"runs/{method} {depth}/lr={rate}/seed={seed}",
                        }
                    )  # fmt: skip
    return {
        "schema": "signalprop/results/1", "sweep": sweep, "base": {}, "environments": [], "rows": rows, "failed": [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a sweep whose best runs are there."""
    folder = tmp_path_factory.mktemp("sweeps") / "both"
    for method in METHODS:
        for depth in DEPTHS:
            at = folder / "runs" / f"{method} {depth}" / "lr=0.01"
            at.mkdir(parents=True)
            write_run(at / "seed=0", status="finished")
    (folder / "runs" / "scaled 4" / "lr=0.01" / "seed=0" / "report.html").write_text("<title>a run</title>")
    write_json(folder / "results.json", results())
    return folder


def blocks_of(content: Document, k: int) -> dict[str, Any]:
    """Blocks of a section by their titles."""
    return {block.title: block for block in content.sections[k].blocks}


def drawn(chart: Chart) -> dict[str, dict[str, float | None]]:
    """Heights of a chart by its labels and by the names of their points."""
    return {
        curve.label: {
            name: y if math.isfinite(y) else None
            for name, y in zip(curve.names or [f"step {x:g}" for x in curve.x], curve.y.tolist(), strict=True)
        }
        for curve in chart.curves
    }


class TestResult:
    def test_means_and_errors_are_those_of_the_tables(self, root: Path) -> None:
        content = document(read(root))
        assert content.sections[0].lead == "Scaled is better. Models of another sweep."
        chart = blocks_of(content, 0)["Eval loss: means and errors"]
        by_name = {item.name: item for item in summaries(results())}
        assert {name for curve in chart.curves for name in curve.names} == by_name.keys()
        for curve in chart.curves:
            for name, y, high in zip(curve.names, curve.y, curve.high, strict=True):
                item = by_name[name]
                if name == "plain / 16":  # its best rate is the one that does not diverge
                    assert item.rate == 0.001
                assert y == pytest.approx(item.mean) and (high - y) / 2 == pytest.approx(item.error)
        assert chart.curves[0].x.tolist() == [4, 16]  # depths are drawn to scale
        assert [curve.label for curve in chart.curves] == ["plain", "scaled"]

    def test_tables_are_those_of_the_markdown(self, root: Path) -> None:
        found = blocks_of(document(read(root)), 0)
        markdown = tables.results_table(results()).replace("_", " ")  # columns in words
        for row in (found["Result"].header, *found["Result"].rows):
            assert any([cell.strip() for cell in line.split("|")[1:-1]] == row for line in markdown.splitlines())
        assert [row[:2] for row in found["Verdict on the claim"].rows] == [
            ["Scaled trains", "confirmed"],
            ["Plain trains", "confirmed"],
        ]

    @pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
    def test_rungs_are_the_scores_and_failed_ones_are_gaps(self, direction: str, sign: int) -> None:
        content = document({"s": of_results(results(direction=direction), Path("nowhere"))})
        curves = drawn(content.sections[1].blocks[0])  # type: ignore[arg-type]
        for name, curve in curves.items():
            for rate in RATES:
                found = [losses(*name.split(" / "), rate, seed) for seed in SEEDS]  # type: ignore[arg-type]
                known = [loss for loss in found if loss is not None]
                wanted = sum(known) / len(known) if known else None
                assert curve[f"{rate:g}"] == (None if wanted is None else pytest.approx(wanted))


class TestRuns:
    def test_the_curves_are_those_of_the_best_runs(self, root: Path) -> None:
        curves = drawn(blocks_of(document(read(root)), 1)["Loss of the best runs"])
        assert curves.keys() == {"plain / 4", "scaled / 4", "scaled / 16"}  # that of plain / 16 has gone
        assert curves["plain / 4"]["step 40"] == pytest.approx(10.0 / 40)

    def test_links_lead_from_the_report_to_the_runs(self, root: Path) -> None:
        for beside in (root, root.parent, root / "runs"):
            rows = blocks_of(document(read(root), beside=beside), 1)["All runs"].rows
            links = [row[-1] for row in rows if isinstance(row[-1], Link)]
            assert sorted(link.text for link in links) == ["files", "files", "files", "report"]
            assert all((beside / unquote(link.target)).exists() and " " not in link.target for link in links)
        rows = blocks_of(document(read(root)), 1)["All runs"].rows
        assert not [row for row in rows if isinstance(row[-1], Link)], "nobody knows where the report will be"

    @pytest.mark.parametrize("directory", ["../both", "/tmp", "..", "javascript:alert(1)", "runs/../..", "", None, 3])
    def test_nothing_leads_out_of_the_sweep(self, root: Path, directory: Any) -> None:
        data = results()
        for row in data["rows"]:
            row["directory"] = directory
        content = document({"s": of_results(data, root)}, beside=root)
        rows = blocks_of(content, 1)["All runs"].rows
        assert not [row for row in rows if isinstance(row[-1], Link)]
        assert not of_results(data, root).best

    def test_failed_runs_are_listed(self, root: Path) -> None:
        data = {**results(), "failed": [{"cell": "plain / 4", "rate": 0.1, "seed": 5, "error": "out of\nmemory"}]}
        content = document({"s": of_results(data, root)})
        row = blocks_of(content, 1)["All runs"].rows[-1]
        assert row[:4] == ["plain / 4", "0.1", "5", "failed: out of memory"]


class TestReading:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda d: d.pop("sweep"), lambda d: d.pop("rows"), lambda d: d["rows"].append(3),
            lambda d: d["rows"][0].pop("cell"), lambda d: d["rows"][0].pop("seed"),
            lambda d: d["rows"][3].update(score="low"), lambda d: d["rows"][3].pop("learning_rate"),
            lambda d: d["rows"][3].update(status=None), lambda d: d["rows"][3].update(eval_loss="low"),
            lambda d: d["rows"][3].update(seconds=10**400), lambda d: d.update(failed=3),
            lambda d: d["sweep"].update(axes={}), lambda d: d["sweep"].update(colour="red"),
            lambda d: d.update(sweep=[1]), lambda d: d["rows"][0].update(cell="other"),
            lambda d: d["rows"][0].update(cell=[]), lambda d: d["rows"][3].update(learning_rate=0),
            lambda d: d["rows"][3].update(scores="x"), lambda d: d["rows"][3].update(score=1e300),
        ],
    )  # fmt: skip
    def test_damage_is_one_line_with_the_files_name(self, tmp_path: Path, damage: Any) -> None:
        data = copy.deepcopy(results())
        damage(data)
        write_json(tmp_path / "results.json", data)
        for source in (tmp_path, tmp_path / "results.json"):
            with pytest.raises(InputError) as refused:
                read(source)
            assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)

    @pytest.mark.parametrize("changes", [{"seed": 7}, {"score": 0}, {"steps": 10**400}])
    def test_what_is_odd_is_shown_all_the_same(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        data = copy.deepcopy(results())
        data["rows"][3].update(changes)
        write_json(tmp_path / "results.json", data)
        document(list(read(tmp_path / "results.json").items()))
