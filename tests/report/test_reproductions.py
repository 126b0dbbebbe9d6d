"""Reproductions in the report: checks and curves are those of the stored file, which has to be whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.report.html import document, read, write_report
from signalprop.report.monitored import Monitored, partings, read_monitored
from signalprop.report.sections import Document, HeatMap
from signalprop_lab.reproductions.result import Check, Curve, Findings, Panel, Reproduction


def made(**changes: Any) -> Reproduction:
    """A reproduction with two checks and two panels."""
    x = np.arange(1.0, 6.0)
    curves = (
        Curve("xavier", x, 10.0**x),
        Curve("xavier", x, 10.0**x + 1, kind="measured", error=0.1 * x),
        Curve("printed", x, x, kind="paper"),
    )
    checks = (Check("slope", "about 1", 0.98, low=0.9, high=1.1, standard_error=0.01), Check("end", "5", 7.0, high=6.0))
    panels = (
        Panel("Growth", "layer", "variance", curves, log_y=True),
        Panel("Decay", "layer", "correlation", curves[2:]),
    )
    findings = Findings(checks, "less data", panels, notes=("A note.",))
    fields = {"id": "tgs-fig0", "title": "Growth", "source": "TGS Fig 0", "claim": "it grows", "scale": "small"}
    return Reproduction(**{**fields, "findings": findings, "seconds": 2.0, **changes})  # type: ignore[arg-type]


def shown(folder: Path, data: Any) -> Document:
    """The document of a stored value."""
    write_json(folder / "reproduction.json", data)
    return document(read(folder / "reproduction.json"))


class TestShown:
    def test_curves_are_those_of_the_file(self, tmp_path: Path) -> None:
        (section,) = shown(tmp_path, made().to_json()).sections
        growth, decay, checks = section.blocks
        assert [curve.label for curve in growth.curves] == ["xavier, theory", "xavier, measured", "printed, paper"]
        for drawn, curve in zip(growth.curves, made().findings.panels[0].curves, strict=True):  # type: ignore[union-attr]
            assert drawn.x == pytest.approx(curve.x) and drawn.y == pytest.approx(curve.y, rel=1e-4)
        measured = growth.curves[1]
        assert measured.high - measured.y == pytest.approx(0.2 * np.arange(1, 6), rel=1e-3)
        assert growth.log and not decay.log
        assert [row[-1] for row in checks.rows] == ["holds", "fails"]
        assert checks.rows[0][:4] == ["slope", "about 1", "0.9800 ± 0.01", "0.9 to 1.1"]

    def test_several_in_one_file_and_one_that_was_not_run(self, tmp_path: Path) -> None:
        other = made(id="tgs-fig00", findings=None, not_run="needs a GPU")
        several = {"schema": "signalprop/reproductions/1", "reproductions": [made().to_json(), other.to_json()]}
        content = shown(tmp_path, several)
        assert len(content.sections) == 2 and content.sections[1].blocks == []
        assert [card.texts for card in content.cards][1] == ["needs a GPU"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("claim"), lambda d: d["checks"].append(3), lambda d: d["checks"][0].pop("state"),
        lambda d: d["panels"][0].pop("curves"), lambda d: d["panels"][0]["curves"][0]["y"].pop(),
        lambda d: d["panels"][0]["curves"][1]["error"].append(1.0),
        lambda d: d["panels"][0]["curves"][0].update(kind="x"),
        lambda d: d["panels"][0]["curves"][0].update(y="high"), lambda d: d.update(panels=3),
        lambda d: d.update(seconds=10**400),
    ],
)  # fmt: skip
def test_damage_is_one_line_with_the_files_name(tmp_path: Path, damage: Any) -> None:
    data = made().to_json()
    damage(data)
    for value in (data, {"schema": "signalprop/reproductions/1", "reproductions": [data]}):
        with pytest.raises(InputError) as refused:
            shown(tmp_path, value)
        assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


# --- the JSONL of a monitor as a page: what it holds, where two trainings part, and lines that nobody wrote


def line(step: int, variance: list[float], warnings: tuple[str, ...] = (), **more: Any) -> str:
    numbers = {f"signal/layer_{k}/variance": v for k, v in enumerate(variance)} | {"signal/outside": len(warnings)}
    return json.dumps({"step": step, **numbers, "warnings": list(warnings), **more}) + "\n"


def jump(step: int) -> str:
    ring = {"step": [1, 2], "loss": [3.0, None], "gradient_norm": [[1.0, 1.0]] * 2, "update": [[0.1, 0.1], [0.1, 90.0]]}
    return json.dumps({"step": step, "jump": {"first_layer": 1, "ring": ring}, "warnings": ["it jumped"]}) + "\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(line(1, [1, 2]) + line(5, [1, 3]) + line(5, [1, 2]) + line(10, [1, 2]) + '{"step": 15, "sig')
    b.write_text(line(1, [1, 2]) + line(5, [1, 5], ("too much",)) + jump(7) + line(10, [9, 9]))
    return a, b


def test_what_a_file_holds(files: tuple[Path, Path]) -> None:
    a, b = map(read_monitored, files)
    assert a.steps == (1, 5, 10)  # of a step that is there twice the last; a line that was cut off is left out
    assert a.layers["variance"].tolist() == [[1, 2]] * 3 and a.whole["outside"].tolist() == [0, 0, 0]
    assert b.warnings == ((5, "too much"), (7, "it jumped")) and b.jumps[0][0] == 7


def test_where_two_part(files: tuple[Path, Path]) -> None:
    a, b = map(read_monitored, files)
    assert partings(a, b) == [("variance", 5, 1, 2.0, 5.0)]
    assert partings(a, a) == []
    one, two = (Monitored((1,), {"token_correlation": np.array([[0.001, v]])}, {}) for v in (0.5, 0.65))
    assert partings(one, two) == [("token_correlation", 1, 1, 0.5, 0.65)]


def test_the_page(files: tuple[Path, Path], tmp_path: Path) -> None:
    items = [item for path in files for item in read(path).items()]
    made = document(items)
    assert [(card.subject, card.severity) for card in made.cards] == [("b", "warning"), ("a", "good")]
    layers, steps = made.sections
    (chart,) = layers.blocks
    assert chart.frames == ["1", "5", "10"]
    at = {(curve.label, curve.frame): curve.y.tolist() for curve in chart.curves}
    assert at["b", "10"] == [9, 9] and at["a, step 1", None] == [1, 2]
    assert steps.blocks[-1].rows == [["variance", "5", "1", "2.000", "5.000"]]
    assert any(isinstance(block, HeatMap) for block in steps.blocks)
    assert "too much" in made.cards[0].texts
    write_report(tmp_path / "page.html", items)


def test_a_training_that_died_has_an_autopsy(tmp_path: Path) -> None:
    """Its card says what died, when, where it began and what to do; the events stand in a table, in their order."""
    grew = {"name": "variance out of its band", "text": "step 4: it grew", "layers": [1], "step": 4, "value": 90.0,
            "cause": "possible, not tested: large weights", "remedy": "a lower rate"}  # fmt: skip
    died = {"name": "not finite", "severity": "fault", "text": "layer 0: NaN", "layers": [0], "step": 6}
    path = tmp_path / "a.jsonl"
    path.write_text(line(4, [1, 2], ("step 4: it grew",), events=[grew]) + line(6, [1, 2], ("NaN",), events=[died]))
    made = document(list(read(path).items()))
    card, section = made.cards[0], made.sections[0]
    assert (card.severity, card.title) == ("fault", "died at step 6: variance out of its band in layer 1")
    assert list(card.texts) == ["layer 0: NaN", "it began with step 4: it grew", grew["cause"]]
    assert card.advice == "a lower rate" and section.title == "Autopsy of a"
    (events,) = section.blocks
    assert [row[:4] for row in events.rows] == [
        ["4", "variance out of its band", "layer 1", "90.00"], ["6", "not finite", "layer 0", "-"],
    ]  # fmt: skip
    path.write_text(line(4, [1, 2], ("step 4: it grew",), events=[grew]))
    assert [card.severity for card in document(list(read(path).items())).cards] == ["warning"]


@pytest.mark.parametrize(
    "text",
    ["[1]\n", "{}\n", '{"step": "1"}\n', '{"step": 1, "signal/x": NaN}\n', '{"step": 1, "jump": {}}\n', "x\n" * 2],
)
def test_lines_that_no_monitor_writes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line(1, [1]) + text)
    with pytest.raises(InputError, match="line 2: this is not a line of a SignalMonitor's file"):
        read(path)
    path.write_text(jump(3))
    with pytest.raises(InputError, match="no sampled step"):
        read(path)
