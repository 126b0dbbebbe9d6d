"""The table of a network: JSON both ways, replaced columns, sweeps, and damaged files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandline import refusal_of
from signalprop.network.architecture import Architecture
from signalprop.network.layout import STACKS, role_mask
from signalprop.network.parametrization import KINDS, Embedding, Head, Parametrization, fan, layout
from signalprop.schemes import scheme
from strategies import architectures, schemes, statistics, table_or_none

TINY = Architecture(n_layers=2, d_model=8)


def table(**changes: Any) -> Parametrization:
    return scheme("xavier")(Architecture(**{"n_layers": 2, "d_model": 8, **changes}))


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "schema": lambda d: d.update(schema="signalprop/parametrization/2"),
    "expected schema": lambda d: d.pop("schema"),
    "head: Field required": lambda d: d.pop("head"),
    "did you mean scheme": lambda d: d.update(shceme="xavier"),
    "3 rows; the architecture has 4": lambda d: d["sublayers"].pop(),
    "sublayers: Input should be a valid list": lambda d: d.update(sublayers={}),
    "sublayers.0": lambda d: d["sublayers"].__setitem__(0, 3),
    "sublayers.1.brach": lambda d: d["sublayers"][1].update(brach=1.0),
    "sublayers.1.branch": lambda d: d["sublayers"][1].update(branch="1.0"),
    "sublayers.1.skip": lambda d: d["sublayers"][1].update(skip=None),
    "sublayers.1.norm": lambda d: d["sublayers"][1].update(norm="middle"),
    "sublayers.1.norm_gain": lambda d: d["sublayers"][1].update(norm_gain=True),
    "the architecture has (1, 'encoder', 0, 'feed_forward'": lambda d: d["sublayers"][1].update(kind="attention"),
    "the architecture has (0, 'encoder', 0, 'attention'": lambda d: d["sublayers"].reverse(),
    "sublayer 0 has weights": lambda d: d["sublayers"][0]["weights"].pop("query"),
    "sublayer 1 has weights": lambda d: d["sublayers"][1]["weights"].update(query=1.0),
    "and biases": lambda d: d["sublayers"][1].update(biases={"query": 1.0}),
    "'quer'": lambda d: d["sublayers"][0]["weights"].update(quer=1.0),
    "weight.query of sublayer 0 is -1.0": lambda d: d["sublayers"][0]["weights"].update(query=-1.0),
    "weight.key of sublayer 0 is 1e+300": lambda d: d["sublayers"][0]["weights"].update(key=1e300),
    "sublayers.0.weights.key": lambda d: d["sublayers"][0]["weights"].update(key=float("nan")),
    "sublayers.0.weights.value": lambda d: d["sublayers"][0]["weights"].update(value=10**400),
    "architecture": lambda d: d.update(architecture=[]),
    "n_layers": lambda d: d["architecture"].update(n_layers="2"),
    "embedding": lambda d: d["embedding"].update(token=-1.0),
    "distribution.query": lambda d: d["distribution"].update(query="cauchy"),
    "distribution": lambda d: d.update(distribution={}),
    "branch_trainable": lambda d: d.update(branch_trainable="yes"),
    "options": lambda d: d.update(options=[1]),
}


class TestLayout:
    def test_encoder(self) -> None:
        rows = layout(TINY)
        assert [KINDS[k] for k in rows.kind] == ["attention", "feed_forward"] * 2
        assert rows.layer.tolist() == [0, 0, 1, 1] and {STACKS[s] for s in rows.stack} == {"encoder"}

    def test_decoder_and_parallel(self) -> None:
        rows = layout(TINY.replace(kind="decoder", parallel=True))
        assert {STACKS[s] for s in rows.stack} == {"decoder"}
        assert rows.parallel.tolist() == [False, True] * 2

    def test_encoder_decoder(self) -> None:
        a = Architecture(
            n_layers=1, n_decoder_layers=2, d_model=8, kind="encoder-decoder", norm_placement=("pre", "post", "none")
        )
        rows = layout(a)
        attention, across, feed = (KINDS.index(name) for name in ("attention", "cross_attention", "feed_forward"))
        assert rows.kind.tolist() == [attention, feed, attention, across, feed, attention, across, feed]
        assert rows.layer.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
        assert rows.stack.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
        assert rows.placement.tolist() == [0, 0, 1, 1, 1, 3, 3, 3]

    def test_roles_and_fans(self) -> None:
        a = Architecture(n_layers=1, d_model=12, n_heads=4, n_kv_heads=2, d_head=5, d_ff=7)
        assert fan(a, "query") == (12, 20) and fan(a, "key") == fan(a, "value") == (12, 10)
        assert fan(a, "output") == (20, 12) and fan(a, "up") == (12, 7) and fan(a, "down") == (7, 12)
        assert role_mask(a, "value").tolist() == [True, False] and role_mask(a, "up").tolist() == [False, True]
        assert not role_mask(a, "gate").any() and role_mask(a.replace(gated=True), "gate").tolist() == [False, True]


class TestJson:
    @given(st.data())
    def test_it_gives_the_same_table_back(self, data: st.DataObject) -> None:
        a = data.draw(architectures())
        made_by, inputs = data.draw(schemes()), data.draw(statistics(a))
        p = table_or_none(made_by, a, inputs)
        if p is None:
            shaped = made_by.name in ("e-spa", "u-spa")  # which refuse options too: tests/schemes/test_shaped.py
            skipless = shaped or (made_by.name == "value-skipinit" and a.kind == "encoder-decoder")
            extreme = made_by.name == "admin" and inputs.variance >= 1e30  # its skips would be numbers of that size
            assert made_by.name in ("huggingface", "deepscalelm") or a.parallel or skipless or extreme
            return
        columns = {
            name.replace(".", "__"): data.draw(st.floats(0, 1e30))
            for name in data.draw(st.sets(st.sampled_from(sorted(p.columns())), max_size=4))
            if name != "norm_bias"  # refused where the norm does not stand on the stream
        }
        p = replace(
            p.with_columns(**columns), branch_trainable=data.draw(st.sampled_from(["fixed", "scalar", "channel"]))
        )
        assert Parametrization.from_json(json.loads(json.dumps(p.to_json(), allow_nan=False))) == p

    def test_files(self, tmp_path: Path) -> None:
        p = table(norm_placement="sandwich").with_columns(branch=[0.1, 0.2, 1 / 3, 5e-324])
        p.save(tmp_path / "p.json")
        assert Parametrization.load(tmp_path / "p.json") == p
        assert "No such file" in refusal_of(lambda: Parametrization.load(tmp_path / "none.json"))
        assert "cannot write" in refusal_of(lambda: p.save(tmp_path))

    @pytest.mark.parametrize("part", DAMAGE)
    def test_damage_gets_one_line(self, part: str) -> None:
        document = copy.deepcopy(table().to_json())
        DAMAGE[part](document)
        assert part in refusal_of(lambda: Parametrization.from_json(document))


class TestColumns:
    def test_a_weight_stays_zero_where_its_role_is_absent(self) -> None:
        p = table().with_columns(weight__query=0.5, bias__up=0.25, weight__gate=9.0)
        assert p.weights["query"].tolist() == [0.5, 0.0] * 2 and p.biases["up"].tolist() == [0.0, 0.25] * 2
        assert not p.weights["gate"].any()

    def test_a_leading_axis_makes_a_sweep(self) -> None:
        p = table().with_columns(branch=np.array([[0.5], [0.25], [0.125]]))
        assert p.skip.shape == p.branch.shape == p.weights["query"].shape == (3, 4)
        assert str(p) == "sweep (3,) of xavier"
        assert "sweep" in refusal_of(p.to_json) and "sweep" in refusal_of(p.table)

    def test_a_sweep_of_tables(self) -> None:
        one, two = table(), scheme("xavier", gain=2.0)(TINY)
        p = Parametrization.sweep([one, two])
        assert np.array_equal(p.weights["up"], np.stack([one.weights["up"], two.weights["up"]]))
        assert "at least one" in refusal_of(lambda: Parametrization.sweep([]))
        assert "one architecture" in refusal_of(lambda: Parametrization.sweep([one, table(n_layers=3)]))
        other = replace(one, head=Head(weight=3.0))
        assert "one head" in refusal_of(lambda: Parametrization.sweep([one, other]))

    @pytest.mark.parametrize(
        ("columns", "part"),
        [
            ({"brach": 1}, "no column 'brach'; columns: weight.query"),
            ({"weight__foo": 1}, "no column"),
            ({"skip": "a"}, "must be numbers"),
            ({"skip": [1.0, 2.0]}, "4 each"),
            ({"skip": [[1.0], [1.0, 2.0]]}, "must be numbers"),
            ({"skip": float("nan")}, "skip of sublayer 0 is nan"),
            ({"skip": [1.0, 1.0, 1.0, -1e31]}, "skip of sublayer 3"),
            ({"weight__query": -0.1}, "weight.query of sublayer 0 is -0.1"),
        ],
    )
    def test_bad_columns(self, columns: dict[str, Any], part: str) -> None:
        assert part in refusal_of(lambda: table().with_columns(**columns))


class TestText:
    def test_equal_layers_share_lines(self) -> None:
        text = table(n_layers=100).table()
        assert text.count("\n") == 6 and "0-99" in text and str(table(n_layers=100)) == text

    def test_a_screen_shows_both_ends(self) -> None:
        """`print` of the table of many different layers fits a screen; `table()` has all rows."""
        a = Architecture.preset("tgs", n_layers=192)
        p = scheme("deepscalelm")(a)
        shown, whole = str(p).splitlines(), p.table().splitlines()
        assert len(shown) <= 24 and max(map(len, [*shown, *whole])) <= 80
        assert sum(line.startswith("encoder ") for line in whole) == 384
        assert "encoder 0 attention " in str(p) and "encoder 191 feed_forward " in str(p)
        left_out = len([line for line in whole if not line.startswith(" ")]) - len(
            [line for line in shown if not line.startswith((" ", "("))]
        )
        assert f"({left_out} rows left out; " in str(p)

    def test_different_layers_do_not(self) -> None:
        p = table(n_layers=4).with_columns(branch=[1, 1, 1, 1, 0.5, 0.5, 1, 1])
        assert [name in p.table() for name in (" 0-1 ", " 2 ", " 3 ")] == [True] * 3


@pytest.mark.parametrize(("made", "bad"), [(Embedding, {"token": -1.0}), (Head, {"weight": "a"}), (Head, {})])
def test_bad_ends(made: Any, bad: dict[str, Any]) -> None:
    refusal_of(lambda: made(**bad))
