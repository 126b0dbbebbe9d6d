"""Nothing that has been learnt is destroyed: which weights count as fresh, and what `apply` does to others."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import signalprop as sp
from applied import IDS, MODELS, arguments_of, batch_of, loss_of, vanilla
from commandline import Command, result_of
from signalprop.attachment.anatomy import Anatomy, attach
from signalprop.attachment.mapping import Mapping
from signalprop.errors import InputError
from signalprop.repair.freshness import learnt, unlike_draws
from signalprop.schemes import SCHEMES


def trained(name: str, steps: int = 1, rate: float = 1e-3, optimizer: Any = torch.optim.AdamW) -> nn.Module:
    """A tiny model after a few steps on one batch."""
    model = vanilla(name)
    arguments, steps_of = arguments_of(model, batch_of(model)), optimizer(model.parameters(), lr=rate)
    for _ in range(steps):
        loss_of(model(**arguments).logits).backward()
        steps_of.step()
        steps_of.zero_grad()
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Fused maps, images, two stacks with padding, and norms of gains - 1; the others are slow tests.
UNLIKE = ("gpt2", "vit", "t5", "gemma")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in UNLIKE else pytest.mark.slow) for n in MODELS])
def test_fresh_models_are_fresh_and_one_step_is_seen(name: str) -> None:
    model = vanilla(name)
    before, seed = state(model), torch.get_rng_state()
    assert learnt(attach(model)) == ""
    assert same(state(model), before) and torch.equal(torch.get_rng_state(), seed)
    assert learnt(attach(model.to(torch.bfloat16))) == ""
    assert learnt(attach(trained(name)))
    assert learnt(attach(trained(name, rate=1e-2, optimizer=torch.optim.SGD)))


def test_biases_that_a_scheme_draws_are_fresh_and_larger_ones_are_not() -> None:
    model = vanilla("gpt2", 1)
    sp.apply(model, "pytorch", seed=1)
    sp.fold(model)
    bias = model.get_parameter("transformer.h.0.mlp.c_fc.bias")
    assert bias.any() and learnt(attach(model)) == ""
    with torch.no_grad():
        bias.mul_(3)
    assert learnt(attach(model)).startswith("transformer.h.0.mlp.c_fc.bias")


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("vit", "t5"))])
@pytest.mark.slow
def test_what_any_scheme_has_drawn_is_fresh(name: str) -> None:
    seen = 0
    for scheme in SCHEMES:
        model = vanilla(name, 1)
        try:
            sp.apply(model, scheme, seed=1)
            sp.fold(model)
        except InputError:  # a scheme for other families, or one that no weights can hold
            continue
        assert learnt(attach(model)) == "", scheme
        seen += 1
    assert seen >= 8


@given(
    st.sampled_from(["normal", "uniform", "cut", "orthogonal"]),
    st.tuples(st.integers(2, 80), st.integers(2, 80)),
    st.integers(0, 2**31),
    st.floats(1e-4, 10),
)
def test_draws_of_any_size_are_fresh_and_a_direction_in_them_is_not(
    kind: str, shape: tuple[int, int], seed: int, std: float
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    weight: Any = model[0].weight
    draw: Any = {
        "normal": nn.init.normal_,
        "uniform": nn.init.uniform_,
        "cut": nn.init.trunc_normal_,
        "orthogonal": nn.init.orthogonal_,
    }[kind]
    with torch.no_grad():
        draw(weight).sub_(0.5 if kind == "uniform" else 0.0).mul_(std)
        fixed = _unattached(model)
        assert learnt(fixed) == ""
        if min(shape) >= 16:
            size = 4 * float(torch.linalg.matrix_norm(weight, 2)) / math.sqrt(weight.numel())
            weight.add_(size * torch.randn(shape[0]).sign()[:, None] * torch.randn(shape[1]).sign())
            assert unlike_draws(weight)


def _unattached(model: nn.Module) -> Any:
    """A model of which nothing is known."""

    a = attach(vanilla("gpt2", 1)).mapping.architecture
    nothing = Mapping(a, ())
    return Anatomy(model, model, described=nothing, changed=())


def test_zeros_that_have_learnt_are_seen_where_there_is_nothing_but_matrices() -> None:
    """A design without gains and biases whose output maps start at 0."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(48, 48, bias=False), nn.Tanh(), nn.Linear(48, 48, bias=False))
    nn.init.zeros_(model[2].weight)
    assert learnt(_unattached(model)) == ""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(2, 16, 48)
    for _ in range(3):
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert learnt(_unattached(model)).startswith("2.weight")


@pytest.mark.parametrize("axis", [0, 1])
def test_ramps_that_layers_share_are_constants_until_one_moves(axis: int) -> None:
    """Decay rates: log 1 to log 8 in every channel of every layer; a matrix of other numbers is no such thing."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    ramp = torch.arange(1.0, 9.0).log().expand(16, 8)
    for layer in layers:
        layer.decay = nn.Parameter((ramp if axis else ramp.mT).clone())
        layer.rate = nn.Parameter(torch.linspace(-6, -1, 16))
    model = nn.Sequential(*layers)
    assert learnt(_unattached(model)) == ""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.get_parameter("1.rate")[3] += 1e-4
    assert "rate (its entries differ)" in learnt(_unattached(moved))
    with torch.no_grad():
        for layer in layers:
            layer.decay[0, 0] += 1.0
    assert "decay" in learnt(_unattached(model))


def test_learnt_weights_are_kept_where_the_scheme_leaves_their_function() -> None:
    model = trained("gpt2", 5)
    before, logits = state(model), model.eval()(input_ids=IDS).logits
    with pytest.warns(UserWarning, match=r"the weights stay, because they look trained: transformer\."):
        sp.apply(model, "gpt2")
    assert same(state(model), before) and torch.equal(model(input_ids=IDS).logits, logits)
    assert sp.check(model).ok


def test_a_scheme_that_would_change_them_says_by_how_much_and_asks() -> None:
    model = trained("gpt2", 5).eval()
    data = {"input_ids": IDS}
    before, logits = state(model), model(**data).logits
    for keep in (False, True):
        with pytest.raises(InputError, match="changes what they compute: logits by up to") as refused:
            sp.apply(model, "lns", data=data, initialize=keep)
        assert "change_function=True" in str(refused.value) and "redraw=True" in str(refused.value)
        assert same(state(model), before) and type(model).__name__ == "GPT2LMHeadModel"
        assert torch.equal(model(**data).logits, logits)
    sp.apply(model, "lns", data=data, initialize=False, change_function=True)
    moved = float((model(**data).logits - logits).detach().abs().max())
    said = re.search(r"logits by up to (\S+),", str(refused.value))
    assert said is not None and float(said[1]) == pytest.approx(moved, rel=1e-2)
    assert same(state(model), before) and moved > 0.01


def test_redraw_draws_what_a_fresh_model_gets() -> None:
    model, fresh = trained("gpt2", 5), vanilla("gpt2")
    sp.apply(model, "lns", seed=4, redraw=True)
    sp.apply(fresh, "lns", seed=4)
    assert same(state(model), state(fresh))
    with pytest.raises(InputError, match="redraw=True draws new weights and initialize=False"):
        sp.apply(vanilla("gpt2"), "lns", redraw=True, initialize=False)


def test_a_folded_scheme_goes_on_being_fresh_until_it_trains() -> None:
    model = vanilla("gpt2")
    sp.apply(model, "stable-resnet", seed=0)
    sp.fold(model)
    sp.apply(copy.deepcopy(model), "lns", seed=1)  # drawn anew, without a warning
    with torch.no_grad():
        dict(model.named_parameters())["transformer.ln_f.weight"][0] += 1e-3
    assert learnt(attach(model)).startswith("transformer.ln_f.weight")


def test_on_the_command_line(command: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "trained", tmp_path / "out"
    trained("gpt2", 5).save_pretrained(source)  # type: ignore[operator]
    status, text, err = command("apply", source, "--scheme", "lns", "--out", out)
    assert (status, text) == (2, "") and not out.exists() and len(err.splitlines()) == 1
    assert "logits by up to" in err and "--change-function" in err and "--redraw" in err
    kept = result_of(command, "apply", str(source), "--scheme", "gpt2", "--out", str(tmp_path / "a"))
    assert kept["weights"] == "kept" and kept["function_changed"] == ""
    changed = result_of(
        command, "apply", str(source), "--scheme", "lns", "--change-function", "--out", str(tmp_path / "b")
    )
    assert changed["weights"] == "kept" and changed["function_changed"].startswith("logits by up to")
    drawn = result_of(command, "apply", str(source), "--scheme", "lns", "--redraw", "--out", str(tmp_path / "c"))
    assert drawn["weights"] == "drawn" and drawn["function_changed"] == ""
    weights = {name: sp.load(tmp_path / name).state_dict()["transformer.wte.weight"] for name in "abc"}
    mine = trained("gpt2", 5).state_dict()["transformer.wte.weight"]
    assert torch.equal(weights["a"], mine) and torch.equal(weights["b"], mine) and not torch.equal(weights["c"], mine)
