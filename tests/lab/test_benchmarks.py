"""What the benchmarks compare does the same thing, and their page is that of their records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import prediction, recursion, scaling, timing
from benchmarks.environments import FOLDER, environment
from benchmarks.page import IN_A_BROWSER, MODULES, PAGE, RECORDS, page

from signalprop.files.storage import read_json

WRITTEN = [name for name in (*MODULES, *IN_A_BROWSER) if (RECORDS / f"{name}.json").is_file()]


# --- times ---------------------------------------------------------------------------------------------------------


def test_turns_change_order_and_ratios_are_of_one_round() -> None:
    now, order = 0.0, []

    def act(name: str, seconds: float) -> Any:
        def run() -> None:
            nonlocal now
            order.append(name)
            now += seconds * (1 + len(order))  # the machine gets slower and slower

        return run

    actions = {"one": act("one", 1.0), "two": act("two", 2.0), "three": act("three", 0.5)}
    seconds = timing.take_turns(actions, 40, clock=lambda: now, warm_up=2)
    assert order[:6] == ["one", "one", "two", "two", "three", "three"]
    rounds = [tuple(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert len(rounds) == 40 and all(set(turn) == set(actions) for turn in rounds)
    assert len(set(rounds)) == 6
    found = timing.ratios(seconds, "one")
    assert found["two"]["median"] == pytest.approx(2, rel=0.05) and found["two"]["n"] == 40
    assert found["three"]["median"] == pytest.approx(0.5, rel=0.05)


def test_a_summary_is_of_the_values() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.5, 4000).tolist()
    found = timing.summary(values)
    assert found["median"] == pytest.approx(np.median(values))
    assert [found["low"], found["high"]] == pytest.approx(np.quantile(values, [0.25, 0.75]).tolist(), rel=1e-3)
    assert found["standard_error"] == pytest.approx(1.2533 * 0.5 / 4000**0.5, rel=0.1)
    assert (
        timing.shown({"median": 1.0, "standard_error": 0.25, "low": 0.5, "high": 1.5}, 2) == "1.00 ± 0.25 [0.50, 1.50]"
    )


def test_a_table_has_the_ratios_of_its_variants() -> None:
    seconds = {"a": [1.0, 2.0, 4.0], "b": [2.0, 4.0, 8.0]}
    text = timing.compared("Title.", seconds, "a", more={"b": "x"})
    title, _, header, _, one, other = text.splitlines()
    assert title == "Title." and [cell.strip() for cell in header.split("|")][1:5] == [
        "variant",
        "time",
        "over *a*",
        "more",
    ]
    assert [cell.strip() for cell in one.split("|")][1:5] == ["a", "2.00 s", "", ""]
    assert [cell.strip() for cell in other.split("|")][1:5] == ["b", "4.00 s", "2.000 ± 0.000 [2.000, 2.000]", "x"]


def test_a_record_says_what_it_depends_on() -> None:
    record = timing.record("prediction", "| a |")
    assert record["section"] == "| a |" and record["command"] == "python -m benchmarks prediction"
    assert record["versions"]["numpy"] == np.__version__
    assert record["machine"]["cores"] >= 1 and record["machine"]["memory_gib"] > 0 and record["machine"]["processor"]


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.environments.FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match="cannot make the environment of peer"):
        environment("peer", ["./no-such-folder-of-a-package"])
    assert list(tmp_path.iterdir()) == []
    assert FOLDER.parts[-2:] == ("out", "environments")


# --- what is compared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [7, 40])
def test_dense_numpy_and_our_recursion_end_in_one_kernel(tokens: int) -> None:
    x = np.random.default_rng(tokens).normal(size=(tokens, recursion.WIDTH)) + 0.3
    kernel = x @ x.T / recursion.WIDTH
    table = recursion.network(3, tokens)
    np.testing.assert_allclose(recursion.ours(table, kernel)(), recursion.dense(3, kernel)(), rtol=1e-10)
    alone = recursion.our_feed_forwards(table, kernel)()
    np.testing.assert_allclose(alone, recursion.dense(3, kernel, attention=False)(), rtol=1e-10)
    assert np.abs(alone / recursion.ours(table, kernel)() - 1).max() > 0.01
    scored = recursion.ours(recursion.network(3, tokens, scores=1.0), kernel)()
    assert np.abs(scored / recursion.ours(table, kernel)() - 1).max() > 1e-4


def test_scores_have_the_variance_that_was_asked_for() -> None:
    from signalprop.sublayers.attention.moments import score_variances

    p = recursion.network(2, 8, scores=1.7)
    np.testing.assert_allclose(score_variances(p)[p.kind == 0], 1.7)


def test_calls_of_math_are_counted() -> None:
    import math

    assert prediction.math_calls(lambda: [math.log(2.0), math.exp(1.0), abs(-1), len("a")]) == 2


# --- the page ------------------------------------------------------------------------------------------------------


def test_a_page_has_the_sections_of_its_records() -> None:
    sections = {
        "prediction": f"{prediction.deep_model(4, 2)}\n\n{prediction.sweep(20, 4, 2)}",
        "scaling": scaling.curve("kernels, tokens", 2, [scaling._kernel("kernels, tokens", t, 2, t) for t in (8, 16)]),
    }
    text = page({name: json.loads(json.dumps(timing.record(name, found))) for name, found in sections.items()})
    for name, module in (("prediction", prediction), ("scaling", scaling)):
        assert f"\n## {module.TITLE}\n" in text and sections[name] in text
    assert "Deep model: 4 layers" in text and "20 members" in text and timing.machine()["processor"] in text
    columns = {line.count("|") for line in re.findall(r"^\|.*\|$", text, re.M)}
    assert len(columns) > 1 and "nan" not in text.lower().split()


@pytest.mark.skipif(not WRITTEN, reason="nothing has been measured")
def test_the_page_in_the_documentation_is_that_of_its_records() -> None:
    assert PAGE.read_text() == page({name: read_json(RECORDS / f"{name}.json") for name in WRITTEN})


@pytest.mark.parametrize("name", WRITTEN)
def test_a_stored_record_is_whole(name: str) -> None:
    record = read_json(RECORDS / f"{name}.json")
    assert {"machine", "versions", "date", "command", "seconds", "section"} <= set(record)
    assert record["section"] and record["command"] == f"python -m benchmarks {name}"
