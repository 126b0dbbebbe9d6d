"""Hard attention by drawn heads, and heads of two widths: against modules, and networks that are built and measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.kernels.drawn_heads import DrawnHeads, Shape
from signalprop.kernels.stack import Stack
from signalprop.models.surroundings import Surroundings
from signalprop.network.kinds import kind_named
from signalprop.results.cost import count_parameters, train_flops
from signalprop.results.profile import DRAWN
from signalprop.sublayers.global_attention.module import make

TOKENS, WIDTH = 12, 128


def network(**own: Any) -> sp.Architecture:
    """Attention in a window, and to all tokens with wider heads; scores of variance 16 and 32."""
    settings = {"n_kv_heads": 1, "rotary_base": 1e5, "rotary_fraction": 0.5, "proportional": True, "value_norm": True}
    return sp.Architecture(
        kind="decoder", n_layers=2, d_model=WIDTH, n_heads=8, d_head=16, n_kv_heads=2, d_ff=128, gated=True,
        norm="rmsnorm", norm_placement="sandwich", norm_bias=False, bias=False, positions="rotary", qk_norm=True,
        attention_scale=1.0, vocab_size=300, seq_len=32, tied_embeddings=False,
        branches=(("attention", "feed_forward"), ("global_attention", "feed_forward")),
        settings={
            "attention": {"window": 8, "value_norm": True}, "global_attention": {"d_head": 32, **settings, **own},
        },
    )  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_drawn_heads_are_what_modules_do(shared: bool) -> None:
    """Kernels of the output, and of the gradient that comes back, as means over modules of random weights."""
    a = network(shared=shared)
    roles = kind_named("global_attention").role_names(a)
    module = make(sp.scheme("xavier")(a), 2, dict.fromkeys(roles, False), torch.float32, None)
    kernel = 0.2 + 0.8 * np.eye(TOKENS)
    kernel[2, 7] = kernel[7, 2] = 0.9
    back = 0.3 + 0.7 * np.eye(TOKENS)
    roots = [torch.from_numpy(np.linalg.cholesky(x)).float() for x in (kernel, back)]
    out, returned = np.zeros((TOKENS, TOKENS)), np.zeros((TOKENS, TOKENS))
    torch.manual_seed(0)
    n = 400
    for _ in range(n):
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=WIDTH**-0.5)
        x, g = (root @ torch.randn(TOKENS, WIDTH) for root in roots)
        x = x.requires_grad_()
        y = module(x[None], Surroundings(causal=True))[0]
        (sent,) = torch.autograd.grad((y * g).sum(), x)
        for total, found in ((out, y.detach()), (returned, sent)):
            total += (found @ found.mT).double().numpy() / WIDTH / n
    shape = Shape(8, 1, 32, base=1e5**0.5, fraction=0.5, value_norm=True, shared=shared)
    drawn = [DrawnHeads(kernel, 32.0, shape, True, (k, 0)) for k in range(n)]
    inner = 8 * 32 / WIDTH
    for found, measured in (
        (np.mean([x.forward() for x in drawn], 0) * inner, out),
        (np.mean([x.backward(back) for x in drawn], 0) * inner, returned),
    ):
        assert np.trace(found) == pytest.approx(np.trace(measured), rel=0.04)
        apart = found.sum() - np.trace(found), measured.sum() - np.trace(measured)
        assert apart[0] == pytest.approx(apart[1], rel=0.08)


@pytest.mark.parametrize("shared", [False, True])
def test_heads_of_two_widths_are_built_counted_and_predicted(shared: bool) -> None:
    a = network(shared=shared)
    table = sp.scheme("xavier")(a)
    assert sp.Parametrization.from_json(table.to_json()) == table
    models = [sp.build(table, seed=seed) for seed in range(8)]
    gains = 2 * (16 + 32)  # of QK-norm, which built networks have in the scale of their scores
    assert count_parameters(table)["total"] == gains + sum(x.numel() for x in models[0].parameters())
    free = train_flops(sp.scheme("xavier")(network()), 1, 1)["attention"] - train_flops(table, 1, 1)["attention"]
    assert free == pytest.approx(2 * 2 * 32 * WIDTH * 32 * shared, rel=0.01)
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    measured = sp.average([sp.measure(model, {"inputs": ids, "targets": ids.roll(-1, 1)}) for model in models])
    inputs = sp.InputStatistics(token_correlation=1 / 300, target_correlation=1 / 300)
    predicted = sp.predict(table, inputs)
    assert predicted == sp.predict(table, inputs)
    assert predicted.statistics[DRAWN] == 16 and "mean of 16 such networks" in " ".join(predicted.notes)
    for way, at, most in (("forward", "stream_out", 0.03), ("gradient", "stream_in", 0.2)):
        one, other = (getattr(profile, way)[at].log_variance for profile in (predicted, measured))
        assert np.abs(one - other).max() < most


def test_the_same_draw_serves_both_ways_and_another_network_another() -> None:
    stack = Stack(sp.scheme("xavier")(network()))
    kernel = np.eye(32) * 0.9 + 0.1
    first = stack.branches[0].forward(0, kernel)
    assert (stack.branches[0].forward(0, kernel) == first).all()
    stack.draw(1)
    assert not (stack.branches[0].forward(0, kernel) == first).all()


def test_what_global_attention_cannot_be() -> None:
    with pytest.raises(InputError, match="expected a divisor of n_heads 8"):
        sp.predict(sp.scheme("xavier")(network(n_kv_heads=3)))
    with pytest.raises(InputError, match="a key's bias as a value is not derived"):
        sp.predict(sp.scheme("xavier")(network(shared=True).replace(qkv_bias=True)))
