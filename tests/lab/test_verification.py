"""The verification engine: what it reports, that it repeats, and that it can fail."""

from __future__ import annotations

import json

import pytest

from signalprop.errors import InputError
from signalprop.network.moments import Moments
from signalprop_lab.verification.components import Case
from signalprop_lab.verification.verify import COMPONENTS, EFFORTS, PAPER_TABLE_20, verify


@pytest.mark.parametrize("name", ["softmax", "relu", "attention"])
def test_quick_run_is_no_worse_than_the_papers_table(name: str) -> None:
    report = verify([name], effort="quick", seed=1)
    assert {row.quantity for row in report.rows} == set(COMPONENTS[name].quantities)
    for row in report.rows:
        assert row.configurations == (
            EFFORTS["quick"].attention_configurations if name == "attention" else EFFORTS["quick"].configurations
        )
        assert row.paper is not None
        assert row.percentiles[0] <= row.percentiles[1] <= row.percentiles[2]
        # the table is rounded to 0.1, and a perfect formula shows the simulation's own noise
        assert row.percentiles[1] <= row.paper[1] + 0.05 + 3 * row.standard_error, row
    json.dumps(report.as_json())


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name not in ("softmax", "relu", "attention")])
def test_every_component_agrees_with_its_formula(name: str) -> None:
    """A few configurations each: the 50th percentile within 1 % plus the noise."""
    effort = EFFORTS["quick"]._replace(configurations=4, attention_configurations=4, longest=300)
    EFFORTS["smoke"] = effort
    try:
        report = verify([name], effort="smoke", seed=2)
    finally:
        del EFFORTS["smoke"]
    for row in report.rows:
        assert row.percentiles[0] < 1.0 + 2 * row.standard_error, row


def test_same_seed_same_numbers() -> None:
    assert verify(["softmax"], effort="quick", seed=5) == verify(["softmax"], effort="quick", seed=5)
    assert verify(["softmax"], effort="quick", seed=5).rows != verify(["softmax"], effort="quick", seed=6).rows


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """TGS's own softmax backward has no factor 1 - r_g along the axis: it must show."""
    from signalprop_lab.verification.components import _predict_softmax

    def without_projection(case: Case) -> list[Moments]:
        forward, gradient = _predict_softmax(case)
        return [forward, Moments(0.0, gradient.variance / (1 - case["g_r"]))]

    monkeypatch.setitem(COMPONENTS, "softmax", COMPONENTS["softmax"]._replace(predict=without_projection))
    row = next(row for row in verify(["softmax"], effort="quick").rows if row.quantity == "gradient variance")
    assert row.percentiles[2] > 50


def test_progress_and_paper_table() -> None:
    lines: list[str] = []
    verify(["dropout"], effort="quick", progress=lines.append)
    assert len(lines) == 1 and lines[0].startswith("dropout: ")
    assert set(PAPER_TABLE_20) <= set(COMPONENTS)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="no component 'relus'; expected some of"):
        verify(["relus"])
    with pytest.raises(InputError, match="no effort 'fast'; expected one of"):
        verify(effort="fast")
