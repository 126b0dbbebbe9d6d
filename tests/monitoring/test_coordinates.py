"""The coordinate check: flat under muP for AdamW and Muon, not under others; its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.monitoring.coordinates import _slope, coordinates
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme

IDS = np.random.default_rng(0).integers(3, 60, (4, 17))
BATCH = Batch(tokens=IDS[:, :-1], targets=IDS[:, 1:])


def tables(name: str, widths: tuple[int, ...] = (32, 64, 128), **options: Any) -> list[Parametrization]:
    small = {"n_layers": 1, "vocab_size": 60, "seq_len": 16}
    a = sp.Architecture.preset("gpt2", **small).replace(d_model=32, n_heads=2, d_head=16, d_ff=64)
    return [scheme(name, **options)(a.replace(d_model=w)) for w in widths]


@pytest.mark.parametrize(
    ("name", "options", "optimizer", "flat"),
    [
        pytest.param("mup", {"base_width": 32}, "adamw", True, marks=pytest.mark.slow),
        ("mup", {"base_width": 32}, "muon", True),
        ("xavier", {}, "adamw", False), pytest.param("fixed", {}, "muon", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_which_parametrizations_are_flat(name: str, options: dict[str, Any], optimizer: Any, flat: bool) -> None:
    found = coordinates(tables(name, **options), optimizer=optimizer, steps=3, seeds=1 + flat, batch=BATCH)
    assert found.ok is flat, str(found)
    assert [c.name for c in found.probes] == [
        "layer 0 attention", "layer 0 feed-forward", "stream after layer 0", "logits",
    ]  # fmt: skip
    if not flat:
        assert max(c.slope for c in found.outside) > 0.4 and "outside" in str(found)


def test_slopes_are_those_of_least_squares() -> None:
    x, y = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.1, 0.9, 2.2, 2.8])
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert _slope(x, y) == pytest.approx((slope, covariance[0, 0] ** 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (32,)}, "expected two or more"), ({"widths": (32, 32)}, "expected two or more"),
        ({"seeds": 1, "widths": (32, 64)}, "three networks"), ({"steps": 0}, "steps are 0"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; expected one of adamw, muon, sgd"), ({"lr": -1.0}, "lr -1"),
        ({"lr": 1e30, "steps": 2}, "give a smaller lr="),
    ],
)  # fmt: skip
def test_bad_input(options: dict[str, Any], message: str) -> None:
    given = tables("xavier", options.pop("widths", (32, 64)))
    with pytest.raises(InputError, match=message):
        coordinates(given, batch=BATCH, **options)
