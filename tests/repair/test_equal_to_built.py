"""An applied model computes the function of the built one: logits and gradients, every scheme and family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import signalprop as sp
from applied import (
    WAYS,
    Pair,
    built_logits,
    distance,
    double_norms,
    logits_of,
    loss_of,
    pair,
    role_gradients,
    vanilla,
)
from signalprop.errors import InputError

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5")
# schemes that need other forward code, by the families that have it
WIRING = (
    "admin", "deepnorm", "keel", "mix-ln", "sandwich", "peri-ln", "running-mean", "normalised-gates",
    "depth-scaled-sandwich", "fixup", "rezero", "skipinit", "t-fixup",
)  # fmt: skip
SKIPLESS = ("e-spa", "u-spa", "value-skipinit")
POST = ("admin", "deepnorm", "keel")  # which BERT is


def refused(scheme: str, family: str) -> str:
    """Words of the one line that says so; '' where the scheme can be applied."""
    if scheme in SKIPLESS:
        return "one stack" if family == "t5" else r"forward code as it is; .* sp.build\(sp.scheme\("
    if scheme in WIRING:
        return "" if family == "bert" and scheme in POST else r"forward code as it is; .* sp.build\(sp.scheme\("
    return "needs norm placement 'pre'" if family == "bert" and scheme in ("bamboo", "lns") else ""


def errors(made: Pair) -> tuple[float, float]:
    """(largest difference of logits over the largest logit, relative distance of the gradients)."""
    mine, theirs = logits_of(made.applied, made.batch), built_logits(made)
    loss_of(mine).backward()
    loss_of(theirs).backward()
    largest = theirs.detach().abs().max()
    error = float((mine - theirs).detach().abs().max() / largest) if largest > 0 else float(mine.detach().abs().max())
    return error, distance(role_gradients(made.applied, made.table), role_gradients(made.built, made.table))


def compare(family: str, scheme: str, n_layers: int, dtype: torch.dtype, bound: float) -> None:
    if words := refused(scheme, family):
        with pytest.raises(InputError, match=words):
            pair(family, scheme, n_layers, dtype)
        return
    logits, gradients = errors(pair(family, scheme, n_layers, dtype, match_eps=True))
    assert logits <= bound
    assert gradients <= bound


# Every way and both refusals on a decoder, three on an encoder-decoder, one of a post-norm encoder.
FAST = {"gpt2": (*WAYS, "rezero", "e-spa"), "t5": ("deepscalelm", "layerscale", "e-spa"), "bert": ("admin",)}


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        pytest.param(s, f, marks=() if s in FAST.get(f, ()) else pytest.mark.slow)
        for s in sorted(sp.SCHEMES)
        for f in FAMILIES
    ],
)
class TestEveryScheme:
    def test_in_double_precision(self, scheme: str, family: str) -> None:
        with double_norms():
            compare(family, scheme, 4 if scheme == "mix-ln" else 3, torch.float64, 1e-10)  # a quarter of its layers

    @pytest.mark.slow
    @pytest.mark.parametrize("n_layers", [48, 192])
    def test_deep(self, scheme: str, family: str, n_layers: int) -> None:
        with double_norms():
            compare(family, scheme, n_layers, torch.float64, 1e-10)


@pytest.mark.parametrize(
    ("family", "scheme", "options"),
    [
        ("llama", "rezero", {}), ("llama", "e-spa", {"gamma": 0.2}), ("llama", "sandwich", {}), ("bert", "admin", {}),
        ("gpt2", "deepscalelm", {"k": 4.0}),
    ],
)  # fmt: skip
def test_the_line_that_refuses_other_wiring_names_a_call_that_builds_it(
    family: str, scheme: str, options: dict[str, float]
) -> None:
    model = vanilla(family, 4)
    with pytest.raises(InputError, match="forward code as it is") as refusal:
        sp.apply(model, scheme, **options)
    called = str(refusal.value).partition("build a new model with it: ")[2]
    made = eval(called, {"sp": sp, "model": model})
    assert made.parametrization == sp.scheme(scheme, **options)(sp.Architecture.from_hf(model))


@pytest.mark.parametrize(
    ("network", "columns", "says"),
    [
        ({}, {"skip": 1e-5}, r"layer 0 feed-forward: .* in the stream itself \(their product is 1e-10\)"),
        ({}, {"skip": -0.5}, "layer 0 attention: .* a skip multiplier of -0.5"),
        ({}, {"branch": 0.0}, "layer 0 attention: .* no branch"),
        ({"final_norm": False}, {"skip": 0.8}, r"in the stream itself \(it is read without a norm\)"),
        ({"norm_placement": "none"}, {"skip": 0.8}, "layer 0 attention reads it without a norm"),
    ],
)
def test_multipliers_that_no_branch_can_take_over_are_refused(
    network: dict[str, Any], columns: dict[str, float], says: str
) -> None:
    a = sp.Architecture(kind="decoder", n_layers=2, d_model=32, n_heads=2, vocab_size=50, seq_len=9, **network)
    table = sp.scheme("xavier")(a)
    with pytest.raises(InputError, match=says):
        sp.apply(sp.build(table, seed=0), table.with_columns(**columns), seed=0)
