"""Attention with heads of two widths: what is built and counted of it, and what it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import signalprop as sp
from signalprop.errors import InputError
from signalprop.results.cost import count_parameters, train_flops

WIDTH = 128


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
def test_heads_of_two_widths_are_built_and_counted(shared: bool) -> None:
    a = network(shared=shared)
    table = sp.scheme("xavier")(a)
    assert sp.Parametrization.from_json(table.to_json()) == table
    model = sp.build(table, seed=0)
    gains = 2 * (16 + 32)  # of QK-norm, which built networks have in the scale of their scores
    assert count_parameters(table)["total"] == gains + sum(x.numel() for x in model.parameters())
    free = train_flops(sp.scheme("xavier")(network()), 1, 1)["attention"] - train_flops(table, 1, 1)["attention"]
    assert free == pytest.approx(2 * 2 * 32 * WIDTH * 32 * shared, rel=0.01)


def test_what_global_attention_cannot_be() -> None:
    with pytest.raises(InputError, match="expected a divisor of n_heads 8"):
        sp.predict(sp.scheme("xavier")(network(n_kv_heads=3)))
    with pytest.raises(InputError, match="a key's bias as a value is not derived"):
        sp.predict(sp.scheme("xavier")(network(shared=True).replace(qkv_bias=True)))
