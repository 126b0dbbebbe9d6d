"""A model is understood once: what a command looks up, and an Anatomy in the place of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import signalprop as sp
from applied import batch_of, vanilla
from own_model import own_model
from signalprop.attachment import anatomy as anatomies
from signalprop.attachment.anatomy import attach
from signalprop.results.profile import Profile

VERBS: dict[str, Callable[[Any], Any]] = {
    "measure": sp.measure,
    "predict": sp.predict,
    "check": lambda model: sp.check(model, "gpt2"),
    "compare": lambda model: sp.compare(model, seeds=2),
    "diagnose": lambda model: sp.diagnose(model, jacobian_sequences=0, trials=False),
    "read": sp.read_parametrization,
    "fit": sp.fit,
    "monitor": lambda model: sp.SignalMonitor(model).close(),
    "apply": lambda model: sp.apply(model, "stable-resnet", seed=0),
}


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sublayers that were looked up, in order, and -1 for the ends."""
    seen: list[int] = []
    row_of, ends_of = anatomies.row_of, anatomies.ends_of
    monkeypatch.setattr(anatomies, "row_of", lambda *a: seen.append(a[2]) or row_of(*a))
    monkeypatch.setattr(anatomies, "ends_of", lambda *a: seen.append(-1) or ends_of(*a))
    return seen


@pytest.mark.parametrize("verb", VERBS)
def test_a_command_looks_a_model_up_once_and_an_anatomy_never(verb: str, looked_up: list[int]) -> None:
    VERBS[verb](vanilla("gpt2"))
    assert looked_up == [0, 1, 2, 3, -1]
    understood = sp.anatomy(vanilla("gpt2"))
    assert len(understood.rows) == 4 and understood.ends.head is not None
    looked_up.clear()
    VERBS[verb](understood)
    assert looked_up == []


@pytest.mark.parametrize("verb", ["measure", "check", "compare"])
def test_an_applied_model_too(verb: str, looked_up: list[int]) -> None:
    model = vanilla("gpt2")
    sp.apply(model, "stable-resnet", seed=0)
    looked_up.clear()
    (VERBS | {"check": sp.check})[verb](model)
    assert looked_up == [0, 1, 2, 3, -1]


def same(one: Profile, other: Profile) -> bool:
    return all(
        np.array_equal(series.variance, other.forward[point].variance) for point, series in one.forward.items()
    ) and np.array_equal(one.gradient["branch"].variance, other.gradient["branch"].variance)


@pytest.mark.parametrize("make", [lambda: vanilla("gpt2"), own_model])
def test_it_follows_what_is_put_on_and_folded(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    understood, batch = sp.anatomy(model), batch_of(model)
    assert same(sp.measure(understood, batch), sp.measure(model, batch))
    plain = sp.measure(understood, batch)
    sp.apply(understood, "stable-resnet", seed=0)
    assert same(sp.measure(understood, batch), sp.measure(model, batch))
    assert sp.check(understood).ok and not same(sp.measure(understood, batch), plain)
    sp.fold(model)
    assert same(sp.measure(understood, batch), sp.measure(model, batch))
    with pytest.raises(sp.InputError, match="the model carries no scheme; name one"):
        sp.check(understood)


def test_what_is_done_to_an_applied_model_takes_an_anatomy(tmp_path: Path) -> None:
    one, other = vanilla("gpt2"), vanilla("gpt2")
    understood = sp.anatomy(one)
    for model in (understood, other):
        sp.apply(model, "mup", seed=0)
        sp.initialize(model, seed=1)
    groups = [sp.parameter_groups(model, lr=1e-3) for model in (understood, other)]
    assert [(g["names"], g["lr"]) for g in groups[0]] == [(g["names"], g["lr"]) for g in groups[1]]
    sp.save(understood, tmp_path)
    assert sp.check(sp.load(tmp_path)).ok
    assert sp.fold(understood) is one and sp.fold(other) is other
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_a_mapping_that_was_given_by_hand_holds_after_a_scheme_was_put_on_and_folded() -> None:
    model = own_model()
    mapping = model.signalprop_mapping()
    model.signalprop_mapping = None  # nobody else knows it
    by_hand = replace(mapping, notes=("by hand",))
    understood = attach(model, by_hand)
    sp.apply(understood, "deepscalelm", seed=0)
    assert attach(understood).mapping.notes == ("by hand",)
    sp.fold(understood)
    assert attach(understood).mapping == by_hand


def test_it_is_shown_without_a_pass_and_printed_with_one() -> None:
    model = vanilla("gpt2")
    understood = sp.anatomy(model)
    assert repr(understood) == "<Anatomy of GPT2LMHeadModel>"
    assert understood.proved and understood.model is model and str(understood).startswith("GPT2LMHeadModel\n")
    assert [row["sort"] for row in understood._rows()] == ["attention", "feed_forward"] * 2
    assert torch.equal(understood.ends.token.weight, model.transformer.wte.weight)
