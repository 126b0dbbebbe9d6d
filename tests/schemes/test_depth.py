"""What schemes make of depth: the published formulas, branch by branch, on any architecture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given

from signalprop.network.architecture import Architecture
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import PLACEMENTS, ROLES, Parametrization
from signalprop.schemes import scheme
from signalprop.schemes.base import xavier_std
from strategies import architectures


class Row(NamedTuple):
    """A branch: its layer and its place in its stack, from 1; layers and branches of the stack; which one it is."""

    layer: int
    place: int
    layers: int
    branches: int
    stack: str  # "encoder" and "decoder" where there are two
    others: int  # layers of the other one


def rows(table: Parametrization) -> list[Row]:
    a, decodes = table.architecture, table.stack == table.stack[-1]
    two = a.kind == "encoder-decoder"
    second = a.n_decoder_layers or a.n_layers
    found = []
    for i, (layer, own) in enumerate(zip(table.layer, decodes, strict=True)):
        layers, others = (second, a.n_layers) if two and own else (a.n_layers, second)
        stack = ("decoder" if own else "encoder") if two else "alone"
        place = int((decodes[: i + 1] == own).sum())
        found.append(Row(int(layer) + 1, place, layers, int((decodes == own).sum()), stack, others))
    return found


def deepnorm(r: Row) -> tuple[float, float]:
    """Table 3 of DeepNet: factor of the skip, gain of values, outputs and feed-forwards."""
    if r.stack == "alone":
        return (2 * r.layers) ** 0.25, (8 * r.layers) ** -0.25
    if r.stack == "decoder":
        return (3 * r.layers) ** 0.25, (12 * r.layers) ** -0.25
    size = (r.layers**4 * r.others) ** (1 / 16)
    return 0.81 * size, 0.87 / size


def shared(k: float, alpha: float = 1.0) -> dict[str, Callable[[Row], float]]:
    """beta^2 = k / N^alpha, at most 1, and lambda^2 the rest."""
    return {
        "branch": lambda r: min(1, k / r.layers**alpha) ** 0.5, "skip": lambda r: max(0, 1 - k / r.layers**alpha) ** 0.5
    }  # fmt: skip


# name, options, and by column: what it is; of `gain`, the standard deviation over Xavier's
FORMULAS: list[tuple[str, dict[str, Any], dict[str, Callable[[Row], float]]]] = [
    ("deepscalelm-simple", {"k": 1.5, "alpha": 0.8}, shared(1.5, 0.8)),
    ("normalised-skip", {"k": 2.0}, shared(2.0)),
    ("stable-resnet", {}, {"branch": lambda r: r.branches**-0.5, "skip": lambda r: 1}),
    ("stable-resnet", {"decreasing": True}, {"branch": lambda r: 1 / (r.place**0.5 * math.log(r.place + 1))}),
    ("noci", {}, {"branch": lambda r: r.layers**-0.5}),
    ("ds-init", {"alpha": 0.5}, {"gain": lambda r: 0.5 * r.layer**-0.5}),
    ("lns", {}, {"norm_scale": lambda r: r.layer**-0.5, "placement": lambda r: PLACEMENTS.index("pre")}),
    ("mix-ln", {}, {"placement": lambda r: PLACEMENTS.index("post" if 4 * r.layer <= r.layers else "pre")}),
    ("running-mean", {}, {
        "branch": lambda r: (r.place + 1) ** -0.5, "skip": lambda r: (1 - 1 / (r.place + 1)) ** 0.5}),
    ("deepnorm", {}, {"skip": lambda r: deepnorm(r)[0], "branch": lambda r: 1, "gain": lambda r: deepnorm(r)[1]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "columns"), FORMULAS, ids=[name for name, *_ in FORMULAS])
@given(a=architectures(deepest=9))
def test_columns_are_the_formulas(name: str, options: dict[str, Any], columns: dict[str, Any], a: Architecture) -> None:
    table = scheme(name, **options)(a.replace(parallel=False, shared_norm=False))  # which several of these refuse
    for column, formula in columns.items():
        wanted = np.array([formula(row) for row in rows(table)], dtype=float)
        if column != "gain":
            np.testing.assert_allclose(getattr(table, column), wanted, rtol=1e-12)
            continue
        for role in ROLES:
            there = role_mask(table.architecture, role)
            gain = 1.0 if name == "deepnorm" and role in ("query", "key") else wanted[there]
            np.testing.assert_allclose(table.weights[role][there], gain * xavier_std(a, role), rtol=1e-12)
