"""What sweeps come to: numbers against NumPy, verdicts, and files that others read."""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from signalprop_lab.training.grid import Point, grid_of
from signalprop_lab.training.recipe import parse
from signalprop_lab.training.run_locks import Entry
from signalprop_lab.training.sweep_cells import pooled_variance, summaries
from signalprop_lab.training.sweep_definition import Check, Sweep
from signalprop_lab.training.tables import (
    as_csv,
    beside_the_paper,
    not_told_apart,
    results_table,
    store_of,
)
from signalprop_lab.training.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    CONTROL,
    INVISIBLE,
    NONE,
    OPEN,
    Judged,
    course_rows,
    overall,
    same_functions,
    verdicts,
)
from sweeping import BASE, CHANCE, SWEEP


def sweep_of(**fields) -> Sweep:
    return Sweep(**(copy.deepcopy(SWEEP) | {"tune": None} | fields))


def entry(sweep, cell, seed, loss, *, status="finished", rate=None, number=0, **more) -> Entry:
    row = {
        "status": status, "reason": None, "steps": 12, "train_loss": loss, "eval_loss": loss, "chance": CHANCE,
        "seconds": 2.0, "scores": {} if loss is None else {"accuracy": 1 / (1 + loss)}, "revision": "0123456789abcdef",
        "environment": {"versions": {"torch": "2"}, "machine": "Linux", "device": "cpu"},
    }  # fmt: skip
    return Entry(Point(cell, rate, seed), row=row | more)


def stored(losses, sweep=None, **fields):
    """A store in which a cell has these losses, one per seed; None: it has diverged."""
    n = max(len(values) for values in losses.values())
    sweep = sweep or sweep_of(seeds=list(range(n)), **fields)
    entries = [
        entry(sweep, cell, seed, loss, status="finished" if loss is not None else "diverged")
        for cell, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return json.loads(json.dumps(store_of(grid_of(sweep, BASE), entries)))


ONE, TWO, THREE, FOUR = "plain / 2", "scaled / 2", "plain / 8", "scaled / 8"


def kinds(losses, verdict, **fields) -> list[str]:
    return [one.kind for one in verdicts(stored(losses, verdict=verdict, **fields))]


@given(st.lists(st.lists(st.floats(0.1, 4.9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_means_and_errors_are_those_of_numpy(values) -> None:
    items = summaries(stored(dict(zip((ONE, TWO, THREE, FOUR), values, strict=False))))
    by_name = {item.name: item for item in items}
    for name, numbers in zip((ONE, TWO, THREE, FOUR), values, strict=False):
        assert by_name[name].mean == pytest.approx(np.mean(numbers))
        assert by_name[name].error == pytest.approx(np.std(numbers, ddof=1) / np.sqrt(3), abs=1e-12)
    pairs = [np.subtract(a, b) for a, b in itertools.combinations(values, 2) if a != b]
    if pairs:
        assert pooled_variance(items) == pytest.approx(np.mean([np.var(d, ddof=1) for d in pairs]), abs=1e-12)
    else:
        assert pooled_variance(items) is None


@given(
    pairs=st.lists(st.tuples(st.floats(1, 4), st.floats(1, 4)), min_size=2, max_size=4),
    by=st.one_of(st.just("spread"), st.floats(0, 1)),
)
def test_a_difference_counts_beyond_two_standard_errors_of_the_paired_one(pairs, by) -> None:
    one, other = [list(values) for values in zip(*pairs, strict=True)]
    error = math.sqrt(np.var(np.subtract(other, one), ddof=1) / len(one))
    assume(error > 1e-9)
    difference = float(np.mean(other) - np.mean(one))
    least = 2 * error if by == "spread" else max(2 * error, by)
    for edge in (2 * error, least):
        assume(abs(abs(difference) - edge) > 1e-9)
    losses = {ONE: one, TWO: other}
    found = kinds(losses, [{"less": [ONE, TWO], "by": by}, {"less": [TWO, ONE], "by": by}])
    if difference > least:
        assert found == [CONFIRMED, CONTRADICTED]
    elif difference < -least:
        assert found == [CONTRADICTED, CONFIRMED]
    else:
        assert CONFIRMED not in found
        if by == "spread":
            assert found == [INVISIBLE, INVISIBLE]
    close = not_told_apart(stored(losses))
    assert bool(close) is (abs(difference) <= 2 * error)


def test_a_control_that_does_not_train_voids_what_others_show_by_not_training() -> None:
    losses = {ONE: [5.0, 5.1], TWO: [2.0, 2.1], THREE: [5.2, 5.1], FOUR: [2.5, 2.6]}
    checks = [{"less": [FOUR, THREE]}, {"fails": [THREE]}, {"less": [TWO, FOUR]}, {"trains": [ONE]}]
    assert kinds(losses, checks) == [CONFIRMED, CONFIRMED, CONFIRMED, CONTRADICTED]
    assert kinds(losses, checks, controls=[ONE]) == [CONTROL, CONTROL, CONFIRMED, CONTRADICTED]
    assert kinds(losses | {ONE: [3.0, 3.1]}, checks[:2], controls=[ONE]) == [CONFIRMED, CONFIRMED]


def test_depth_has_to_help_somebody_where_a_part_needs_it() -> None:
    losses = {ONE: [2.0, 2.1], TWO: [2.5, 2.6], THREE: [3.0, 3.2], FOUR: [2.7, 2.9]}
    part = {"less": [FOUR, TWO]}
    assert kinds(losses, [part, part | {"needs": [ONE, THREE]}]) == [CONTRADICTED, CONTRADICTED]
    assert kinds(losses, [part | {"needs": [THREE, ONE]}]) == [CONTROL]


def test_validation_examples_that_all_seeds_share_add_to_the_error() -> None:
    losses, part = {ONE: [2.0, 2.1], TWO: [2.5, 2.58]}, {"less": [ONE, TWO]}
    assert kinds(losses, [part]) == [CONFIRMED]
    (one,) = verdicts(stored(losses, verdict=[part], shared_error=0.25))
    assert one.kind == INVISIBLE
    assert f"standard error {math.hypot(0.01, 0.25):.4f}" in one.told


def test_a_lead_is_followed_over_the_steps() -> None:
    rng = np.random.default_rng(0)
    courses = {cell: rng.uniform(1, 3, (4, 5)) for cell in (ONE, TWO)}
    sweep = sweep_of(seeds=[0, 1, 2, 3], verdict=[{"less": [TWO, ONE]}, {"trains": [ONE]}])
    entries = [
        entry(sweep, cell, seed, 2.0, course=courses[cell][seed].tolist()) for cell in (ONE, TWO) for seed in range(4)
    ]
    store = store_of(grid_of(sweep, BASE), entries)
    items = {item.name: item for item in summaries(store)}
    (row,) = course_rows(sweep, items)
    difference = courses[ONE] - courses[TWO]
    means, errors = difference.mean(0), difference.std(0, ddof=1) / 2
    assert row == [f"{TWO} ends below {ONE}", *(f"{m:+.4f} ± {e:.4f}" for m, e in zip(means, errors, strict=True))]
    assert "course" not in as_csv(store["rows"])
    (turned,) = course_rows(sweep.model_copy(update={"direction": "maximize"}), items)  # a low accuracy is a high loss
    assert turned[1] == f"{-means[0]:+.4f} ± {errors[0]:.4f}"


def test_one_function_under_two_names_is_named() -> None:
    same = {ONE: [2.0, 2.2], TWO: [2.0, 2.2], THREE: [2.0, 2.3]}
    assert same_functions(summaries(stored(same))) == [f"{ONE} and {TWO}"]
    assert same_functions(summaries(stored({ONE: [2.0, 2.2], TWO: [2.0, 2.3]}))) == []


def test_the_worse_one_at_the_edge_of_its_ladder_may_be_better_beyond(tuned) -> None:
    grid, entries = tuned
    store = json.loads(json.dumps(store_of(grid, entries)))
    store["sweep"]["verdict"] = [{"less": [TWO, ONE]}, {"less": [ONE, THREE]}]
    better, worse = verdicts(store)
    assert better.kind == CONFIRMED  # it is the better one whose best value is the outermost
    assert worse.kind == NONE and "0.01, the best of plain / 8, is the outermost that was tried" in worse.told


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ([2.0, 2.1], [None, None], CONFIRMED),
        ([2.0, 2.1], [2.0, None], CONFIRMED),
        ([None, None], [2.0, 2.1], CONTRADICTED),
        ([None, None], [None, 2.0], NONE),
        ([4.99, 4.991], [5.2, 5.21], NONE),
        ([2.0, 2.1], [5.0, 5.0], CONFIRMED),
        ([2.0], [3.0], NONE),
    ],
)
def test_runs_that_fail_are_the_worst(one, other, kind) -> None:
    assert kinds({ONE: one, TWO: other}, [{"less": [ONE, TWO]}]) == [kind]


def test_what_trains_and_what_does_not() -> None:
    losses = {ONE: [2.0, 4.97], TWO: [2.0, 4.985], THREE: [None, 5.1], FOUR: [None, 2.0]}
    names = (ONE, TWO, THREE, FOUR)
    assert kinds(losses, [{"trains": [n]} for n in names]) == [CONFIRMED, CONTRADICTED, CONTRADICTED, CONTRADICTED]
    assert kinds(losses, [{"fails": [n]} for n in names]) == [CONTRADICTED, CONTRADICTED, CONFIRMED, CONTRADICTED]
    assert kinds(losses, [{"trains": [ONE, TWO]}]) == [CONTRADICTED]
    text = results_table(stored(losses))
    stays = "1 of 2 on the plateau after 12 steps"
    for word in (stays, f"diverged, {stays}", "1 of 2 diverged"):
        assert word.replace("diverged, ", "1 of 2 diverged, ") in text
    store = stored(losses)
    for row in store["rows"]:
        row.pop("steps")
    assert "1 of 2 on the plateau" in results_table(store)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([], NONE),
        ([NONE, NONE], NONE),
        ([CONFIRMED], CONFIRMED),
        ([CONFIRMED, OPEN], OPEN),
        ([INVISIBLE, INVISIBLE], INVISIBLE),
        ([CONFIRMED, CONTRADICTED, CONFIRMED], f"2 of 3 {CONFIRMED}, 1 of 3 {CONTRADICTED}"),
    ],
)
def test_the_whole_claim(found, told) -> None:
    check = Check(trains=(ONE,))
    assert overall([Judged(check, kind, "") for kind in found]) == told
    if found and told != OPEN:
        far = overall([Judged(check, kind, "", (0.02 / (i + 1),)) for i, kind in enumerate(found)])
        expected = f"at 1/{50 * len(found)} of the paper's tokens per parameter"
        assert far == (NONE if {*found} == {NONE} else f"{told}, {expected}")


@given(st.floats(1e-4, 1e4))
def test_far_from_the_papers_budget_a_claim_is_neither_confirmed_nor_contradicted(share) -> None:
    assume(min(abs(math.log(share / edge)) for edge in (0.2, 1.0, 5.0)) > 1e-6)
    store = stored({ONE: [2.0, 2.1], TWO: [3.0, 3.1]})
    read = 12 * 4 * parse(BASE).data.seq_len
    for row in store["rows"]:
        row |= {"parameters": 100, "unit": "tokens"}
    paper = {"variant": "v", "warm_up": "1 %", "rates": "3e-4", "per_parameter": read / 100 / share}
    store["sweep"] |= {"verdict": [{"less": [ONE, TWO]}, {"less": [TWO, ONE]}, {"trains": [ONE]}], "paper": paper}
    found = verdicts(store)
    close = 0.2 < share < 5
    assert [one.kind for one in found] == (
        [CONFIRMED, CONTRADICTED, CONFIRMED] if close else ["for the claim", "against the claim", "for the claim"]
    )
    header, (variant, _, _, per_parameter) = beside_the_paper(store)
    assert (header[1:], variant[1], float(per_parameter[1])) == (
        ["paper", "here"], "v", pytest.approx(paper["per_parameter"], rel=1e-4)
    )  # fmt: skip
    for one in found:
        assert one.shares == pytest.approx([share] * len(one.check.cells))
        printed = re.search(r", at (1/)?([\d.,]+) (?:of|times) the paper's tokens per parameter$", one.words)
        value = float(printed[2].replace(",", ""))
        assert (1 / value if printed[1] else value) == pytest.approx(share, rel=0.06)
    assert f"{ONE}: xavier, warm-up " in found[0].told


@pytest.fixture
def tuned():
    """One cell bracketed, one on the edge, one diverged, one of which a rung failed."""
    sweep = sweep_of(
        tune={"values": [0.01, 0.03, 0.1], "extend": 0},
        reference={"label": "published, perplexity", "cells": {ONE: 12.9, FOUR: "diverges"}},
        title="Four | parabolas",
        claim="Scaled ends lower.",
        verdict=[{"claim": "Scaled ends lower.", "less": [TWO, ONE]}, {"fails": [FOUR]}],
    )
    table = {
        ONE: {0.01: [3.0], 0.03: [2.0, 2.2], 0.1: [2.5]},
        TWO: {0.01: [3.0], 0.03: [2.0], 0.1: [1.5, 1.6]},
        THREE: {0.01: [4.0, 4.1], 0.03: [None], 0.1: [None]},
        FOUR: {0.01: [None, None], 0.03: [None], 0.1: [None]},
    }
    entries = []
    for cell, rates in table.items():
        for rate, losses in rates.items():
            for seed, loss in enumerate(losses):
                status = "diverged" if loss is None else "finished"
                entries.append(entry(sweep, cell, seed, loss, status=status, rate=rate))
    return grid_of(sweep, BASE), entries


def test_the_table_says_what_was_tuned(tuned) -> None:
    store = store_of(*tuned)
    lines = {
        line.split("|")[1].strip() + line.split("|")[2].strip(): line for line in results_table(store).splitlines()
    }
    assert "0.03 " in lines["plain2"] and "2.1000 ± 0.1000" in lines["plain2"] and "12.9" in lines["plain2"]
    assert "0.1 (edge)" in lines["scaled2"] and "| best" in lines["scaled2"]
    assert "+0.5500" in lines["plain2"] and "≈" not in lines["plain2"]
    assert "0.01 (edge)" in lines["plain8"] and "4.0500 ± 0.0500" in lines["plain8"]
    assert "| diverged" in lines["scaled8"] and "diverges" in lines["scaled8"]


def test_csv_holds_every_run(tuned) -> None:
    grid, entries = tuned
    rows = store_of(grid, entries)["rows"]
    assert len(rows) == len(entries)
    lines = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [(x["cell"], x["learning_rate"], x["seed"], x["method"], x["layers"]) for x in lines] == [
        (x["cell"], str(x["learning_rate"]), str(x["seed"]), x["method"], x["layers"]) for x in rows
    ]
    assert [x["eval_loss"] for x in lines] == ["" if x["eval_loss"] is None else repr(x["eval_loss"]) for x in rows]
    assert "score_accuracy" in lines[0]
