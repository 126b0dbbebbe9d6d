"""The reference transformer: what a sublayer computes, what is drawn, what a Parametrization's numbers do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalprop import read_parametrization
from signalprop.errors import InputError
from signalprop.models import build
from signalprop.models.activations import TORCH_FUNCTIONS, torch_activation
from signalprop.models.ends import sinusoidal_table
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import draw
from signalprop.network import activations
from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Distribution
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import Embedding, Parametrization
from signalprop.schemes import scheme

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 30, "seq_len": 8}
TOKENS = torch.tensor([[3, 7, 7, 1, 9, 3, 2, 8], [5, 5, 1, 4, 9, 8, 3, 2]])


def table(**changes: Any) -> Parametrization:
    return scheme("xavier")(Architecture(**{**SMALL, **changes}))


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["normal", "uniform", "truncated_normal", "measured"])
def test_drawn_weights_have_the_asked_standard_deviation(distribution: Distribution) -> None:
    tensor = torch.empty(400, 500)
    draw(tensor, 0.3, distribution, 0, "place", "role")
    # standard error of a standard deviation: at most std / sqrt(2 n)
    assert float(tensor.std()) == pytest.approx(0.3, abs=4 * 0.3 / math.sqrt(2 * 200_000))
    assert float(tensor.mean()) == pytest.approx(0.0, abs=4 * 0.3 / math.sqrt(200_000))
    largest = {"uniform": 0.3 * math.sqrt(3), "truncated_normal": 2 * 0.3 / 0.8796256610342398}
    if distribution in largest:
        assert float(tensor.abs().max()) == pytest.approx(largest[distribution], rel=1e-3)


def test_weights_differ_by_place_role_and_seed_and_not_by_precision() -> None:
    def drawn(dtype: torch.dtype, *where: Any) -> torch.Tensor:
        tensor = torch.empty(4, 5, dtype=dtype)
        draw(tensor, 1.0, "normal", *where)
        return tensor

    first = drawn(torch.float32, 0, "1", "up")
    assert torch.equal(first.double(), drawn(torch.float64, 0, "1", "up"))
    assert torch.equal(first.bfloat16(), drawn(torch.bfloat16, 0, "1", "up"))
    for other in ((1, "1", "up"), (0, "2", "up"), (0, "1", "down")):
        assert not torch.equal(first, drawn(torch.float32, *other))


def test_every_role_gets_its_column() -> None:
    p = table(gated=True, d_model=64, d_ff=128, n_kv_heads=1, bias=True)
    rng = np.random.default_rng(0)
    weights = {f"weight__{role}": rng.uniform(0.5, 2, p.n_sublayers) * (std > 0) for role, std in p.weights.items()}
    biases = {f"bias__{role}": np.where(std > 0, 0.5, 0.0) for role, std in p.weights.items()}
    p = p.with_columns(**weights, **biases, norm_gain=0.7)
    model = build(p, seed=0)
    for i, sublayer in enumerate(model.sublayers()):
        assert torch.equal(sublayer.norm.weight, torch.full((64,), 0.7))
        for role, linear in sublayer.branch.function.named_children():
            for values, std in ((linear.weight.detach(), p.weights[role][i]), (linear.bias.detach(), 0.5)):
                error = std / math.sqrt(2 * values.numel())
                assert float(values.std()) == pytest.approx(std, abs=4 * error), (i, role)


def test_seed_decides_everything_and_its_default_comes_from_pytorch() -> None:
    p = table(dropout=0.0)
    one, same, other = (build(p, seed=seed)(TOKENS).logits for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    torch.manual_seed(4)
    first = build(p)(TOKENS).logits
    second = build(p)(TOKENS).logits
    torch.manual_seed(4)
    assert torch.equal(first, build(p)(TOKENS).logits) and not torch.equal(first, second)


# --- what a sublayer computes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none", "res-post"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_placements(placement: Any, norm: Any) -> None:
    p = table(norm_placement=placement, norm=norm, n_layers=1, norm_eps=1e-6)
    p = p.with_columns(skip=0.8, branch=0.6, norm_gain=1.3, norm_scale=0.7, post_norm_gain=0.5)
    sublayer = build(p, seed=0, dtype=torch.float64).sublayers()[1]
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def normed(values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(-1, keepdim=True) if norm == "layernorm" else values
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def f(values: torch.Tensor) -> torch.Tensor:
        up, down = sublayer.branch.function.up, sublayer.branch.function.down
        return nn.functional.gelu(values @ up.weight.T) @ down.weight.T

    expected = {
        "pre": lambda: 0.8 * x + 0.6 * f(0.91 * normed(x)),
        "post": lambda: 0.91 * normed(0.8 * x + 0.6 * f(x)),
        "sandwich": lambda: 0.8 * x + 0.6 * 0.5 * normed(f(0.91 * normed(x))),
        "none": lambda: 0.8 * x + 0.6 * f(x),
        "res-post": lambda: 0.8 * x + 0.6 * 0.91 * normed(f(x)),
    }[placement]()
    torch.testing.assert_close(sublayer(x, Surroundings()), expected)


@pytest.mark.parametrize("gain", [0.0, 0.6])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_value_skip_adds_a_tokens_own_value(kind: Any, gain: float) -> None:
    changes: dict[str, Any] = {"kind": kind, "n_layers": 1, "n_kv_heads": 1}
    p = table(**changes).with_columns(value_skip=0.8, attention_gain=gain)
    function = build(p, seed=0, dtype=torch.float64).sublayers()[0].branch.function
    plain = build(table(**changes), seed=0, dtype=torch.float64).sublayers()[0].branch.function
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    around = Surroundings(causal=kind == "decoder")
    own = plain.output(torch.cat([plain.value(x)] * 2, -1))  # both heads share the one value head
    torch.testing.assert_close(function(x, around), 0.8 * own + gain * plain(x, around))


def test_parallel_sublayers_read_the_same_stream_and_the_skip_counts_once() -> None:
    p = table(parallel=True, n_layers=1).with_columns(skip=0.5, branch=[2.0, 3.0])
    model = build(p, seed=0, dtype=torch.float64)
    attention, feed_forward = model.sublayers()
    seen: list[torch.Tensor] = []
    for sublayer in (attention, feed_forward):
        sublayer.branch.register_forward_hook(lambda _, __, out: seen.append(out))
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.encoder.final_norm = None
    hidden = model(TOKENS).hidden
    x, first, second = seen
    torch.testing.assert_close(hidden, 0.5 * x + 2 * first + 3 * second)
    torch.testing.assert_close(second, feed_forward.branch(feed_forward.norm(x), Surroundings()))


def test_score_scale_and_qk_norm() -> None:
    p = table(qk_norm=True)
    model, larger = build(p, seed=0), build(p.with_columns(weight__query=9 * p.weights["query"]), seed=0)
    torch.testing.assert_close(model(TOKENS).logits, larger(TOKENS).logits, rtol=1e-3, atol=1e-3)
    scaled = build(p.with_columns(score_scale=4.0), seed=0)
    assert not torch.allclose(model(TOKENS).logits, scaled(TOKENS).logits, atol=1e-2)
    plain = table()
    twice = plain.with_columns(weight__query=2 * plain.weights["query"])
    torch.testing.assert_close(
        build(twice, seed=0)(TOKENS).logits,
        build(plain.with_columns(score_scale=2 * plain.score_scale), seed=0)(TOKENS).logits,
        rtol=1e-4,
        atol=1e-4,
    )


# --- the two ends -----------------------------------------------------------------------------------------------------


def test_sinusoidal_table_has_its_root_mean_square_and_shifts_by_rotation() -> None:
    rows = sinusoidal_table(50, 64).double()
    assert float(rows.square().mean()) == pytest.approx(1.0, abs=1e-6)
    products = rows @ rows.T  # a function of the distance alone
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(47), rtol=1e-4, atol=1e-4)
    p = table(positions="sinusoidal")
    stream = build(replace(p, embedding=Embedding(token=0.0, position=0.3)), seed=0).encoder.embedding(TOKENS)
    torch.testing.assert_close(stream[0], 0.3 * sinusoidal_table(8, 16))


# --- numbers of the table that are no weights -------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), [("scalar", (1,)), ("channel", (16,))])
def test_trainable_multipliers_are_parameters(kind: Any, shape: tuple[int, ...]) -> None:
    p = replace(table().with_columns(branch=0.3), branch_trainable=kind)
    model, fixed = build(p, seed=0), build(table().with_columns(branch=0.3), seed=0)
    assert torch.equal(model(TOKENS).logits, fixed(TOKENS).logits)
    extra = set(model.state_dict()) - set(fixed.state_dict())
    assert extra == {f"encoder.sublayers.{i}.multiplier" for i in range(4)}
    model(TOKENS, targets=TOKENS).loss.backward()
    assert all(s.multiplier.shape == shape and s.multiplier.grad.abs().sum() > 0 for s in model.sublayers())


@pytest.mark.parametrize(("kind", "shape"), [("scalar", (1,)), ("channel", (16,))])
def test_trainable_skips_are_parameters(kind: Any, shape: tuple[int, ...]) -> None:
    plain = table(parallel=True).with_columns(skip=0.7)
    model, fixed = build(replace(plain, skip_trainable=kind), seed=0), build(plain, seed=0)
    assert torch.equal(model(TOKENS).logits, fixed(TOKENS).logits)
    extra = set(model.state_dict()) - set(fixed.state_dict())
    assert extra == {f"encoder.sublayers.{i}.skip" for i in (0, 2)}  # the layer has one skip, its attention's
    model(TOKENS, targets=TOKENS).loss.backward()
    for sublayer in model.sublayers()[::2]:
        assert sublayer.skip.shape == shape and sublayer.skip.grad.abs().sum() > 0
    assert "skip=trainable" in repr(model)


def test_trainable_attention_scalars_are_parameters() -> None:
    plain = table(kind="encoder-decoder")
    own = plain.kind == 0
    plain = plain.with_columns(value_skip=np.where(own, 1.0, 0.0), attention_gain=np.where(own, 0.0, 1.0))
    model, fixed = build(replace(plain, attention_trainable=True), seed=0), build(plain, seed=0)
    arguments = {"decoder_tokens": TOKENS, "targets": TOKENS}
    torch.testing.assert_close(model(TOKENS, **arguments).logits, fixed(TOKENS, **arguments).logits)
    model(TOKENS, **arguments).loss.backward()
    for sublayer, kind in zip(model.sublayers(), plain.kind, strict=True):
        if kind == kind_named("feed_forward").code:
            continue
        function = sublayer.branch.function
        assert function.attention_gain.shape == (1,) and function.attention_gain.grad.abs() > 0
        assert isinstance(function.value_skip, nn.Parameter) is bool(kind == 0)  # a query across has no own value


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(activations.ACTIVATIONS))
def test_activation_is_that_of_the_theory(name: str) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).add(0.013).requires_grad_()
    registered = activations.activation(name)
    assert registered.name in TORCH_FUNCTIONS
    y = torch_activation(name)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    np.testing.assert_allclose(y.detach(), registered.function(x.detach().numpy()), atol=1e-12)
    np.testing.assert_allclose(slope, registered.derivative(x.detach().numpy()), atol=1e-12)


def test_registered_activation_needs_no_second_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "ACTIVATIONS", dict(activations.ACTIVATIONS))
    activations.register("softsign", lambda x: x / (1 + np.abs(x)), lambda x: 1 / (1 + np.abs(x)) ** 2)
    x = torch.linspace(-3, 3, 7, requires_grad=True)
    y = torch_activation("softsign")(x)
    torch.testing.assert_close(y, nn.functional.softsign(x))
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(nn.functional.softsign(x).sum(), x)[0]
    )


# --- measuring --------------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "pre": {"n_segments": 2},
    "post": {"norm_placement": "post", "embedding_norm": True},
    "sandwich": {"norm_placement": "sandwich", "gated": True, "activation": "silu"},
    "none": {"norm_placement": "none"},
    "mixture": {"norm_placement": ("post", "pre")},
    "neox": {"kind": "decoder", "parallel": True, "positions": "rotary"},
    "bart": {"kind": "encoder-decoder", "norm_placement": "post"},
    "t5": {"kind": "encoder-decoder", "positions": "relative", "norm": "rmsnorm"},
    "olmo2": {"kind": "decoder", "norm_placement": "res-post", "norm": "rmsnorm", "qk_norm": True},
}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "t5"])  # T5's bias is no number of the table
def test_it_reads_as_the_table_it_was_built_from(form: str) -> None:
    p = table(**FORMS[form])
    rng = np.random.default_rng(0)
    scale, value, gain, skip = rng.uniform(0.5, 1, (4, p.n_sublayers))
    attends = ~kind_named("feed_forward").of(p)
    p = p.with_columns(
        norm_scale=np.where(p.placement == 3, 1.0, scale),
        value_skip=np.where(p.kind == 0, value, 0.0),
        attention_gain=np.where(attends, gain, 1.0),
        skip=np.where(p.parallel, 1.0, skip),
    )
    p = replace(p, skip_trainable="channel", branch_trainable="scalar", attention_trainable=True)
    found = read_parametrization(build(p, seed=0, dtype=torch.float64))
    for name in ("skip", "branch", "norm_gain", "norm_scale", "post_norm_gain", "value_skip", "attention_gain"):
        np.testing.assert_allclose(getattr(found, name), getattr(p, name), rtol=1e-12, err_msg=name)
    for name in ("skip_trainable", "branch_trainable", "attention_trainable"):
        assert getattr(found, name) == getattr(p, name)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_refuses_wrong_inputs() -> None:
    model = build(table(), seed=0)
    with pytest.raises(InputError, match="position table 8 rows"):
        model(TOKENS.repeat(1, 2))
    with pytest.raises(InputError, match=r"expected ids \(batch, tokens\)"):
        model(TOKENS[0])
    with pytest.raises(InputError, match="needs decoder_tokens"):
        build(table(kind="encoder-decoder"), seed=0)(TOKENS)
