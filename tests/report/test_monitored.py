"""The JSONL of a monitor as a page: what it holds, where two trainings part, and lines that nobody wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.report.html import document, read, write_report
from signalprop.report.monitored import Monitored, partings, read_monitored
from signalprop.report.sections import HeatMap


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
