"""The registry of schemes: names, options, new ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from commandline import refusal_of
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import ROLES, Parametrization
from signalprop.prediction import predict
from signalprop.schemes import SCHEMES, Scheme, register, scheme
from signalprop.schemes.base import fill, xavier_std
from signalprop.schemes.options import Positive
from signalprop.schemes.vanilla import small_logits_head, unit_embedding

START_AT_ZERO = {("fixup", "output"), ("fixup", "down"), ("e-spa", "query"), ("u-spa", "query")}
SMALL = Architecture(n_layers=2, d_model=16, seq_len=8, family="bert")


@pytest.fixture
def registry() -> Iterator[None]:
    """Leaves the registry as it was."""
    before = dict(SCHEMES)
    yield
    SCHEMES.clear()
    SCHEMES.update(before)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_says_what_it_is(name: str) -> None:
    cls = SCHEMES[name]
    assert cls.name == name and cls.paper and cls.summary and "\n" not in cls.summary and cls.__doc__
    made, a = scheme(name), SMALL.replace(kind="decoder") if name in ("e-spa", "u-spa") else SMALL
    table = made(a)
    assert table.scheme == name and dict(table.options) == made.options()
    for role in ROLES:
        present = role_mask(a, role)
        assert ((table.weights[role][present] > 0) == ((name, role) not in START_AT_ZERO)).all()
        assert not table.weights[role][~present].any()


def test_options_reach_the_table() -> None:
    made = scheme("xavier", gain=2, qk_gain=3.0)
    assert made.options() == {"gain": 2, "qk_gain": 3.0, "value_per_head": False} and made == scheme(
        "xavier", qk_gain=3.0, gain=2
    )
    assert dict(made(SMALL).options) == made.options()


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("xavir", {}, "unknown scheme 'xavir'; did you mean xavier? 36 schemes are known"),
        (None, {}, "unknown scheme"),
        (["xavier"], {}, "unknown scheme"),
        ("xavier", {"gian": 2.0}, "no option 'gian'; options: gain, qk_gain, value_per_head"),
        ("huggingface", {"std": 0.1}, "options: none"),
        ("xavier", {"gain": "2"}, "gain of scheme 'xavier' is '2'; expected a number"),
        ("xavier", {"gain": True}, "expected a number"),
        ("xavier", {"gain": None}, "expected a number"),
        ("xavier", {"gain": 0}, "expected a positive number"),
        ("xavier", {"qk_gain": -1.0}, "qk_gain"),
        ("fixed", {"std": float("nan")}, "std"),
        ("gpt2", {"std": 10**400}, "std"),
        ("deepscalelm", {"k": 0.0}, "k of scheme"),
        ("deepscalelm", {"alpha": -0.1}, "alpha"),
        ("deepscalelm-simple", {"alpha": "1"}, "alpha"),
    ],
)
def test_what_does_not_exist(name: Any, options: dict[str, Any], part: str) -> None:
    assert part in refusal_of(lambda: scheme(name, **options))


def test_a_new_scheme_is_one_class(registry: None) -> None:
    @register
    @dataclass(frozen=True)
    class Halving(Scheme):
        """Branch multipliers that fall with depth."""

        name: ClassVar[str] = "halving"
        paper: ClassVar[str] = "this test"
        summary: ClassVar[str] = "branch = first / (layer + 1)"
        first: Positive = 1.0

        def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
            table = fill(architecture, self, {role: xavier_std(architecture, role) for role in ROLES})
            embedding = unit_embedding(architecture)
            table = replace(table, embedding=embedding, head=small_logits_head(architecture, embedding))
            return table.with_columns(branch=self.first / (1.0 + table.layer))

    table = scheme("halving", first=0.5)(SMALL)
    assert table.branch.tolist() == [0.5, 0.5, 0.25, 0.25]
    assert Parametrization.from_json(table.to_json()) == table
    grown = predict(table, fidelity="moments").forward["stream_out"].variance[-1]
    assert grown < predict(scheme("xavier")(SMALL), fidelity="moments").forward["stream_out"].variance[-1]
    assert "first" in refusal_of(lambda: scheme("halving", first=0))


def test_names_are_unique_but_a_class_may_be_defined_again(registry: None) -> None:
    def define(qualname: str) -> None:
        made = type("Again", (SCHEMES["fixed"],), {"name": "again", "__qualname__": qualname})
        register(made)

    define("Again")
    first = SCHEMES["again"]
    define("Again")  # a notebook cell that is run twice
    assert SCHEMES["again"] is not first
    assert "two schemes named 'again'" in refusal_of(lambda: define("Other"))


def test_columns_of_fill() -> None:
    table = fill(
        SMALL,
        scheme("fixed"),
        dict.fromkeys(("key", "value", "output", "down"), 0.0) | {"query": 0.5, "up": np.array([9.0, 1.0, 9.0, 2.0])},
        skip=0.25,
    )
    assert table.weights["query"].tolist() == [0.5, 0.0, 0.5, 0.0]
    assert table.weights["up"].tolist() == [0.0, 1.0, 0.0, 2.0]
    assert not table.weights["down"].any() and (table.skip == 0.25).all()
