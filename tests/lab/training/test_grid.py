"""What a sweep's YAML may say, and what it is refused for: always with one line, before anything runs."""

from __future__ import annotations

import copy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop_lab.training.grid import Point, grid_of, load_sweep, shipped_sweeps
from signalprop_lab.training.networks import sample_batch, table_of
from signalprop_lab.training.recipe import architecture_of
from signalprop_lab.training.sweep_definition import Sweep
from signalprop_lab.training.tasks import prepare
from sweeping import BASE, SWEEP


def changed(**fields):
    return copy.deepcopy(SWEEP) | fields


def written(tmp_path, data):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def test_cells_are_the_product_of_the_axes(tmp_path) -> None:
    grid = load_sweep(written(tmp_path, SWEEP))
    assert list(grid.cells) == ["plain / 2", "plain / 8", "scaled / 2", "scaled / 8"]
    recipe = grid.recipe(Point("scaled / 8", 0.03, 5))
    assert (recipe.model.scheme, recipe.model.architecture["n_layers"]) == ("deepscalelm", 8)
    assert (recipe.optimizer.learning_rate, recipe.seed) == (0.03, 5)
    assert grid.base == BASE  # cells are copies
    assert grid.directory(Point("scaled / 8", 0.03, 5)) == "runs/scaled__8/lr=0.03/seed=5"


def test_a_run_begins_from_the_model_of_its_own_seed() -> None:
    start = {"pretrained": "sweeps/first/runs/plain/seed={seed}/folded"}
    grid = grid_of(Sweep(**changed(axes={"clip": {"1": {"optimizer.clip": 1.0}}})), BASE | {"model": start})
    for seed in (0, 7):
        folder = f"sweeps/first/runs/plain/seed={seed}/folded"
        assert grid.recipe(Point("1", 0.03, seed)).model.pretrained == folder
    assert grid.base["model"] == start


REFUSED = {
    "unknown field": (changed(axis={}), "axis"),
    "no axes": (changed(axes={}), "axes"),
    "empty axis": (changed(axes={"method": {}}), "axis method has no values"),
    "unknown key": (changed(axes={"a": {"x": {"optimizer.learning_rat": 1.0}}}), "cell x"),
    "key into a number": (changed(axes={"a": {"x": {"seed.more": 1}}}, base=BASE | {"seed": 1}), "cell x: seed.more"),
    "unknown scheme": (changed(axes={"a": {"x": {"model.scheme": "deepscale"}}}), "cell x"),
    "unknown option": (changed(axes={"a": {"x": {"model.options": {"k": 2, "q": 1}}}}), "cell x"),
    "bad value": (changed(tune={"key": "budget.steps", "values": [0.5, 1.5]}), "cell plain / 2"),
    "unknown tuned key": (changed(tune={"key": "optimizer.rate", "values": [1.0]}), "cell plain / 2"),
    "descending": (changed(tune={"values": [1e-2, 1e-3]}), "ascend"),
    "negative": (changed(tune={"values": [-1.0, 1e-3]}), "above 0"),
    "no ladder": (changed(tune={"values": [1e-3], "extend": 1}), "two or more"),
    "no values": (changed(tune={"values": []}), "values"),
    "seed twice": (changed(seeds=[1, 1]), "twice"),
    "no seeds": (changed(seeds=[]), "seeds"),
    "negative seed": (changed(seeds=[-1]), "cell plain / 2"),
    "unknown axis left out": (changed(skip=[{"depth": "2"}]), "no axis 'depth'"),
    "unknown label left out": (changed(skip=[{"layers": "3"}]), "no value '3'"),
    "all left out": (changed(skip=[{}]), "every cell"),
    "unknown cell": (changed(reference={"label": "paper", "cells": {"plain": 1.0}}), "no cell 'plain'"),
    "unknown cell in the verdict": (changed(verdict=[{"trains": ["plain / 3"]}]), "no cell 'plain / 3'"),
    "two criteria": (changed(verdict=[{"trains": ["plain / 2"], "fails": ["plain / 8"]}]), "one of less"),
    "three compared": (changed(verdict=[{"less": ["plain / 2", "plain / 8", "scaled / 8"]}]), "two different"),
    "an axis named like a column": (changed(axes={"seed": {"x": {}}}), "cannot be named seed"),
    "an axis named like what is tuned": (changed(axes={"learning_rate": {"x": {}}}), "cannot be named learning_rate"),
    "a key set twice": (
        changed(axes={"a": {"x": {"model.scheme": "xavier"}}, "b": {"y": {"model.scheme": "gpt2"}}}),
        "axis b sets model.scheme",
    ),
    "a key hidden": (
        changed(axes={"a": {"x": {"budget.steps": 2}}, "b": {"y": {"budget": {"batch_size": 2}}}}),
        "axis b sets budget, which hides budget.steps",
    ),
    "the tuned key set": (changed(axes={"a": {"x": {"optimizer.learning_rate": 1.0}}}), "which tune sets"),
    "the seed set": (changed(axes={"a": {"x": {"seed": 1}}}), "which seeds sets"),
    "twins": (changed(axes={"a": {"x": {}, "y": {"model.scheme": "xavier"}}}), "same settings"),
    "one directory": (
        changed(axes={"a": {"x y": {}, "x?y": {"model.scheme": "deepscalelm"}}}),
        "same directory",
    ),
    "too many": (changed(axes={f"a{i}": {f"{j}": {} for j in range(50)} for i in range(4)}), "more than"),
    "a recipe": (BASE, "is not a sweep"),
    "no recipe": (changed(base="no-such-recipe"), "no-such-recipe"),
}


@pytest.mark.parametrize(("data", "told"), REFUSED.values(), ids=REFUSED)
def test_bad_sweeps_are_refused_in_one_line(data, told, tmp_path) -> None:
    with pytest.raises(InputError) as caught:
        load_sweep(written(tmp_path, data))
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert len(message) < 1000


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from([*Sweep.model_fields, "schema", "extra"]), value=values)
def test_whatever_a_field_holds_there_is_a_grid_or_one_line(field, value) -> None:
    told = ""
    try:
        grid_of(Sweep(**(copy.deepcopy(SWEEP) | {field: value})), BASE)
    except InputError as error:
        told = str(error)
    assert "\n" not in told


def test_the_same_run_has_the_same_settings(tmp_path) -> None:
    grid = load_sweep(written(tmp_path, SWEEP))
    renamed = load_sweep(written(tmp_path, changed(base=BASE | {"name": "other", "description": "words"}, title="x")))
    longer = load_sweep(written(tmp_path, changed(base=BASE | {"budget": {"steps": 13, "batch_size": 4}})))
    spelled = load_sweep(written(tmp_path, changed(base=BASE | {"schedule": {"kind": "cosine"}})))  # the default
    points = [Point(cell, rate, seed) for cell in grid.cells for rate in (0.01, 0.03) for seed in (0, 1)]
    same = [grid.settings(point) for point in points]
    assert len({repr(one) for one in same}) == len(points)
    assert same == [renamed.settings(point) for point in points] == [spelled.settings(point) for point in points]
    assert not any(longer.settings(point) in same for point in points)


def test_sweeps_of_the_package_can_be_loaded() -> None:
    for name in shipped_sweeps():
        grid = load_sweep(name)
        assert f"sweep-{grid.sweep.name}" == name
        assert grid.sweep.title


@pytest.mark.slow
def test_every_cell_of_the_sweeps_of_the_package_has_a_network() -> None:
    """A scheme refuses some architectures: TAT a GELU, say, which stops one run after another."""
    refused = []
    for name in shipped_sweeps():
        grid, texts = load_sweep(name), {}
        rate = None if grid.sweep.tune is None else grid.sweep.tune.values[0]
        for cell in grid.cells:
            recipe = grid.recipe(Point(cell, rate, grid.sweep.seeds[0]))
            if recipe.model.architecture is None or recipe.model.scheme is None:
                continue
            data = recipe.data.model_dump_json()
            prepared = texts[data] = texts[data] if data in texts else prepare(recipe)
            architecture = architecture_of(recipe, prepared.facts)
            try:
                table_of(recipe.model, architecture, sample_batch(prepared, 32).statistics(architecture))
            except InputError as error:
                refused.append(f"{name}, {cell}: {error}")
    assert not refused
