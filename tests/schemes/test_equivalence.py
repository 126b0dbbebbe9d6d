"""Networks that are one in other units: the known ones, random gauges against built networks, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.models.transformer import surroundings
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization

SMALL = Architecture(
    kind="decoder", n_layers=3, d_model=32, n_heads=4, d_ff=48, vocab_size=40, seq_len=9, norm_eps=0.0,
    tied_embeddings=False,
)  # fmt: skip


def table(name: str, a: Architecture = SMALL, **options: Any) -> Parametrization:
    return sp.scheme(name, **options)(a)


def logits(p: Parametrization) -> torch.Tensor:
    """Of the network that a table builds, with the draws of one seed, in double precision."""
    model = sp.build(p, seed=0, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.arange(9)[None]).logits


def apart(one: Parametrization, other: Parametrization) -> float:
    """Largest difference of logits over the largest; draws are single numbers, scaled."""
    mine, theirs = logits(one), logits(other)
    return float((mine - theirs).abs().max() / theirs.abs().max())


def test_a_running_mean_is_peri_ln() -> None:
    found = sp.equivalent(table("running-mean"), table("peri-ln"))
    assert found.same and not found.weights and not found.notes
    assert found.stream == pytest.approx([k**-0.5 for k in range(1, 8)])
    assert apart(table("running-mean"), table("peri-ln")) < 2e-6
    other = sp.equivalent(table("running-mean", base="gpt2"), table("sandwich"))  # output maps are normed away
    assert other.same and other.stream == found.stream


def test_layer_norm_scaling_is_folded_gains() -> None:
    scaled, plain = table("lns", base="xavier"), table("xavier")
    root = np.sqrt(1.0 + plain.layer)
    readers = ("query", "key", "value", "up")
    folded = plain.with_columns(**{f"weight__{role}": plain.weights[role] / root for role in readers})
    found = sp.equivalent(scaled, folded)
    assert found.same and set(found.weights) == set(readers) and found.stream == (1.0,) * 7
    assert found.weights["up"] == pytest.approx([1, 1, 1, 2**0.5, 1, 3**0.5])
    assert apart(scaled, folded) < 2e-6
    difference = sp.equivalent(scaled, plain).difference
    assert difference is not None and difference.where == "layer 1 attention"
    assert difference.other == pytest.approx(2 * difference.one)  # scores: read twice, each divided by sqrt(2)


def test_post_norm_in_disguise_and_bamboo() -> None:
    post = table("xavier", SMALL.replace(norm_placement="post"))
    half = post.with_columns(skip=0.5**0.5, branch=0.5**0.5)
    assert sp.equivalent(half, post).same and apart(half, post) < 2e-6
    deep = table("deepnorm")
    assert sp.equivalent(deep, deep.with_columns(skip=1.0, branch=1 / deep.skip)).same
    assert not sp.equivalent(deep, post).same
    assert sp.equivalent(table("bamboo"), table("xavier")).same


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "res-post", "none"])
@pytest.mark.parametrize("changes", [{"activation": "relu"}, {"gated": True, "qk_norm": True}, {"parallel": True}])
def test_a_random_gauge_is_found_and_a_change_is_not_one(placement: Any, changes: dict[str, Any]) -> None:
    if changes.get("parallel") and placement not in ("pre", "none"):
        return
    a = SMALL.replace(norm_placement=placement, **changes)
    draws = np.random.default_rng(7)
    p = table("xavier", a)
    n = p.n_sublayers
    p = p.with_columns(skip=draws.uniform(0.5, 2, n), branch=draws.uniform(0.5, 2, n))
    if a.parallel:  # one skip per layer
        p = p.with_columns(skip=np.repeat(p.skip[::2], 2))
    t, into = draws.uniform(0.5, 2, (2, n))
    moved = p.with_columns(
        weight__value=p.weights["value"] * t, weight__output=p.weights["output"] / t * into,
        weight__query=p.weights["query"] * t, weight__key=p.weights["key"] / t,
        weight__up=p.weights["up"] * (t if a.gated or a.activation == "relu" else 1),
        weight__down=p.weights["down"] * into / (t if a.gated or a.activation == "relu" else 1),
        branch=p.branch if placement in ("sandwich", "res-post") else p.branch / into,
    )  # fmt: skip
    first = np.where(np.arange(n) < 1 + a.parallel, 3.0, 1.0)  # the embeddings in other units
    raw = placement not in ("pre", "sandwich")  # then the first branch reads them as they are
    moved = moved.with_columns(
        skip=moved.skip / first,
        **{f"weight__{role}": moved.weights[role] / (first if raw else 1) for role in ("query", "key", "value", "up")},
    )
    moved = replace(moved, embedding=moved.embedding.model_copy(update={"scale": 3.0}))
    found = sp.equivalent(moved, p)
    assert found.same, found.difference
    assert apart(moved, p) < 2e-6
    changed = p.with_columns(branch=np.where(np.arange(n) == 2, 1.01, 1) * p.branch)
    difference = sp.equivalent(changed, p).difference
    assert difference is not None and difference.where == "layer 1 attention"
    assert apart(changed, p) > 1e-4


def attended(
    p: Parametrization, read: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and their gradient at the token table, of a table's branches where each reads all outputs before it."""
    model = sp.build(p, seed=0, dtype=torch.float64).eval()
    assert model.decoder is not None and model.decoder.embedding.token is not None and model.head is not None
    stack, ids = model.decoder, torch.arange(9)[None]
    outputs = [stack.embedding(ids, None)]
    around = surroundings(p.architecture, outputs[0], "decoder")
    for sublayer in model.sublayers():
        outputs.append(sublayer.branch(sublayer.norm(read(outputs)), around))
    logits = model.head(stack.final_norm(read(outputs)))
    return logits, torch.autograd.grad(logits.square().sum(), stack.embedding.token.weight)[0]


def test_attention_residuals_start_as_pre_norm() -> None:
    """Kimi's formula, written out: a softmax over normed outputs by a query of zeros, of the outputs themselves."""

    def read(outputs: list[torch.Tensor]) -> torch.Tensor:
        values = torch.stack(outputs, -2)
        keys = values * values.square().mean(-1, keepdim=True).rsqrt()
        scores = keys @ torch.zeros(32, dtype=torch.float64)
        return (scores.softmax(-1)[..., None] * values).sum(-2)

    plain = table("xavier")
    k = 1.0 + np.arange(plain.n_sublayers)
    mean = plain.with_columns(skip=k / (k + 1), branch=1 / (k + 1))
    found = sp.equivalent(mean, plain)
    assert found.same and not found.weights and found.stream == pytest.approx([1 / n for n in range(1, 8)])
    mine, theirs = attended(plain, read), attended(plain, lambda outputs: torch.stack(outputs).sum(0))
    assert torch.allclose(mine[0], theirs[0], rtol=1e-12, atol=1e-12)
    assert torch.allclose(mine[1], theirs[1], rtol=1e-11, atol=1e-11)
    assert torch.allclose(mine[0], logits(plain), rtol=1e-12, atol=1e-12)
    small = table("gpt2", SMALL.replace(n_layers=12, norm_eps=1e-6))  # tables of 0.02: the mean is not above epsilon
    one, other = attended(small, read)[0], logits(small)
    assert (one - other).square().sum() > 0.01 * other.square().sum()


@pytest.mark.parametrize(
    ("streams", "branch"),
    [({"mixing": "hyper", "n": 3}, 1.0), ({"gate_scale": 0.0}, 1.0),
     ({"mixing": "independent", "gate_std": 0.0, "write_bias": 1.0, "write_gain": 3.0}, 3 / (1 + np.exp(-1)))],
)  # fmt: skip
def test_streams_that_stay_equal_are_one(streams: dict[str, Any], branch: float) -> None:
    many = table("xavier", SMALL.replace(streams=streams))
    one = table("xavier").with_columns(branch=branch)
    found = sp.equivalent(many, one)
    assert found.same and "training parts them" in found.notes[0]
    assert apart(many, one) < 2e-6
    assert not sp.equivalent(many, one.with_columns(branch=1.1)).same
    apart_by_gates = table(
        "xavier", SMALL.replace(streams={**streams, "mixing": "mhc", "gate_std": 0.1, "gate_scale": 1.0})
    )
    assert "streams" in sp.equivalent(apart_by_gates, one).summary()


def test_architectures_ends_and_notes() -> None:
    p = table("xavier")
    other = sp.equivalent(p, table("xavier", SMALL.replace(activation="relu")))
    assert "activation 'gelu' against 'relu'" in other.summary() and other.difference is not None
    head = sp.equivalent(p, replace(p, head=p.head.model_copy(update={"scale": 2 * p.head.scale})))
    assert head.difference is not None and head.difference.where == "head"
    position = p.embedding.model_copy(update={"position": 2 * p.embedding.position})
    assert "embedding: position" in sp.equivalent(p, replace(p, embedding=position)).summary()
    assert "learning rates" in sp.equivalent(p, p.with_columns(learning_rate__up=0.5)).notes[0]
    assert (
        "epsilon"
        in sp.equivalent(*(table(n, SMALL.replace(norm_eps=1e-5)) for n in ("running-mean", "peri-ln"))).notes[0]
    )
    with pytest.raises(sp.InputError, match="sweep"):
        sp.equivalent(Parametrization.sweep([p, p]), p)
