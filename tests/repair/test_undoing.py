"""A repair that is interrupted: the model is bit by bit what it was, whatever ended it and wherever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from applied import batch_of, vanilla
from own_model import own_model
from signalprop.repair import applying, folds, initialisation, installation, saved_models, undoing, weight_changes
from signalprop.repair.saving import RECORD


class Stop(BaseException):
    """As KeyboardInterrupt, which no `except Exception` sees."""


def after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is interrupted after so many calls, in the midst of what it does."""
    done = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done > calls:
            for value in args:  # half written
                if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
                    value.view(-1)[: value.numel() // 2].fill_(7.0)
            raise Stop
        return function(*args, **kwargs)

    return counted


def state(model: nn.Module) -> Any:
    """All that a model is: numbers, classes, attributes, hooks, configuration."""
    numbers = {
        name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # also those that are not stored
    modules = {}
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, bool))}
        held = {key: list(value) for key, value in vars(module).items() if isinstance(value, (dict, set))}
        modules[name] = type(module), plain, held, sorted(vars(module))
    marks = {name: sorted(vars(q)) for name, q in model.named_parameters()}
    config = model.config.to_dict() if hasattr(model, "config") else None
    names = {name: id(q) for name, q in model.named_parameters(remove_duplicate=False)}
    return numbers, buffers, modules, marks, copy.deepcopy(config), names


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# where it is interrupted: the module and name of a function that is called over and over
PLACES: dict[str, tuple[Any, str]] = {
    "a splice": (installation, "splice"),
    "a draw": (initialisation, "draw"),
    "a fill": (initialisation, "fill"),
    "the model's own initialisation": (initialisation, "reset_others"),
    "the multipliers": (initialisation, "set_multipliers"),
}
SCHEMES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "deepscalelm", {"k": 0.8}),
    ("llama", "layerscale", {"match_eps": True}),
    ("llama", "mup", {}),
    ("bert", "deepnorm", {}),
    ("gpt2", "stable-resnet", {}),
]


# Every scheme at one of the places, every place under one of the schemes.
CASES = [(*made, place) for i, made in enumerate(SCHEMES) for j, place in enumerate(PLACES) if (i + j) % 5 == 0]


@pytest.mark.parametrize(("family", "scheme", "options", "place"), CASES)
def test_an_interrupted_apply(
    family: str, scheme: str, options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name = PLACES[place]
    function = getattr(where, name)
    interrupted = 0
    for calls in (0, 3):
        model = vanilla(family, 2)
        before = state(model)
        monkeypatch.setattr(where, name, after(calls, function))
        try:
            sp.apply(model, scheme, seed=1, **options)
        except Stop:
            interrupted += 1
            assert same(state(model), before)
            monkeypatch.setattr(where, name, function)
            sp.apply(model, scheme, seed=1, **options)
        monkeypatch.setattr(where, name, function)
        whole = vanilla(family, 2)
        sp.apply(whole, scheme, seed=1, **options)
        assert all(
            torch.equal(x, y) for x, y in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
        )
    assert interrupted


def test_an_interrupted_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vanilla("bert", 2).train()
    before = state(model)
    monkeypatch.setattr(applying, "measure", after(0, applying.measure))
    with pytest.raises(Stop):
        sp.apply(model, "admin", data=batch_of(model), seed=1, trainable="fixed")
    assert same(state(model), before)


@pytest.mark.parametrize("calls", [0, 3])
def test_an_interrupted_initialize(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vanilla("gpt2", 2)
    sp.apply(model, "layerscale", seed=1)
    before = state(model)
    monkeypatch.setattr(initialisation, "fill", after(calls, initialisation.fill))
    with pytest.raises(Stop):
        sp.initialize(model, seed=2)
    assert same(state(model), before)


@pytest.mark.parametrize("calls", [0, 2])
def test_an_interrupted_fold(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vanilla("gpt2", 2)
    sp.apply(model, "layerscale", seed=1)
    before = state(model)
    monkeypatch.setattr(weight_changes.Change, "value", after(2 * calls + 4, weight_changes.Change.value))
    with pytest.raises(Stop):
        sp.fold(model)
    assert same(state(model), before)
    monkeypatch.undo()
    monkeypatch.setattr(folds, "take_off", after(0, folds.take_off))
    with pytest.raises(Stop):
        sp.fold(model)
    assert same(state(model), before)


def test_weights_that_do_not_fit_leave_a_model_of_your_own_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = own_model()
    sp.apply(saved, "layerscale", seed=1)
    sp.save(saved, tmp_path)
    assert (tmp_path / RECORD).is_file()
    model = own_model()
    before = state(model)
    monkeypatch.setattr(saved_models, "_fill_added", after(0, saved_models._fill_added))
    with pytest.raises(Stop):
        sp.load(tmp_path, model)
    assert same(state(model), before)


def test_nothing_is_copied_that_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there is nothing to keep, and installed multipliers overwrite no weight."""
    copied: list[int] = []
    copies = undoing._copies

    def counted(tensors: list[Tensor]) -> list[Tensor]:
        copied.append(sum(tensor.nbytes for tensor in tensors))
        return copies(tensors)

    monkeypatch.setattr(undoing, "_copies", counted)
    with torch.device("meta"):
        model = vanilla("llama", 2)
    sp.apply(model, "deepscalelm", k=0.8)
    sp.initialize(model.to_empty(device="cpu"), seed=0)
    sp.apply(vanilla("llama", 2), "deepscalelm", k=0.8, initialize=False)
    assert copied and max(copied) == 0
    drawn = vanilla("llama", 2)
    sp.apply(drawn, "deepscalelm", k=0.8, seed=0)
    assert max(copied) == sum(t.nbytes for t in (*drawn.parameters(), *drawn.buffers()))


def test_no_room_for_a_copy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undoing, "memory_free", lambda: 0)
    with pytest.warns(UserWarning, match=r"no memory for a copy of the weights that are overwritten \(0\.0 GB\)"):
        sp.apply(vanilla("llama", 2), "deepscalelm", k=0.8, seed=0)
