"""Reproductions in the report: checks and curves are those of the stored file, which has to be whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.report.html import document, read
from signalprop.report.sections import Document
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
