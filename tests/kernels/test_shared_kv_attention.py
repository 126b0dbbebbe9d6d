"""Attention with shared keys and values: its module against transformers', counts and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from signalprop.models.surroundings import Surroundings, rotation_table
from signalprop.models.transformer import surroundings
from signalprop.network.kinds import kind_named
from signalprop.results.cost import count_parameters
from signalprop.sublayers.shared_kv_attention import module

_KINDS = {
    "shared_kv_attention": "sliding_attention",
    "heavily_compressed_attention": "heavily_compressed_attention",
    "compressed_sparse_attention": "compressed_sparse_attention",
}
_RATES = {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4}
_TOKENS, _WIDTH, _HEADS, _HEAD = 48, 128, 4, 32


def architecture(name: str, **changes: Any) -> sp.Architecture:
    """One such sublayer."""
    rate = {"rate": _RATES[name]} if name in _RATES else {}
    settings = {"window": 16, "query_rank": 96, "groups": 2, "group_rank": 64, "d_rotary": 8, "rotary_base": 1e4}
    fields: dict[str, Any] = {
        "kind": "decoder", "n_layers": 1, "d_model": _WIDTH, "n_heads": _HEADS, "d_head": _HEAD, "seq_len": _TOKENS,
        "branches": (name,), "settings": {name: settings | rate}, "positions": "rotary", "norm": "rmsnorm",
        "vocab_size": 100, "norm_eps": 1e-6, "norm_bias": False, "bias": False,
    }  # fmt: skip
    return sp.Architecture(**(fields | changes))


def table(name: str, **changes: Any) -> sp.Parametrization:
    """Its weights of standard deviation .05."""
    made = sp.scheme("xavier")(architecture(name, **changes))
    return made.with_columns(**{f"weight__{role}": 0.05 for role in made.weights if (made.weights[role] > 0).any()})


def without_biases(p: sp.Parametrization, name: str) -> dict[str, bool]:
    return dict.fromkeys(kind_named(name).role_names(p.architecture), False)


@pytest.mark.parametrize("name", _KINDS)
def test_the_module_is_that_of_transformers(name: str) -> None:
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = v4.DeepseekV4Config(
        vocab_size=100, hidden_size=_WIDTH, num_hidden_layers=1, num_attention_heads=_HEADS, head_dim=_HEAD,
        q_lora_rank=96, o_groups=2, o_lora_rank=64, sliding_window=16, layer_types=[_KINDS[name]],
        partial_rotary_factor=0.25, compress_rates=_RATES, rope_theta=1e4, compress_rope_theta=1e4,
        index_n_heads=2, index_head_dim=16, attn_implementation="eager",
    )  # fmt: skip
    theirs = v4.DeepseekV4Attention(config, 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    own = module.make(table(name), 0, without_biases(table(name), name), torch.float32, None, name)
    # theirs turn neighbouring features at the end of a head, ours those of two halves at its beginning
    turned = torch.arange(_HEAD - 8, _HEAD)
    order = torch.cat([turned[::2], turned[1::2], torch.arange(_HEAD - 8)])
    heads = (torch.arange(_HEADS)[:, None] * _HEAD + order).flatten()
    of_group = heads[: _HEADS // 2 * _HEAD]
    copied: dict[str, Tensor] = {
        "kv_query_down.weight": theirs.q_a_proj.weight, "kv_query.weight": theirs.q_b_proj.weight[heads],
        "key_value.weight": theirs.kv_proj.weight[order], "grouped_output.weight": theirs.o_a_proj.weight[:, of_group],
        "kv_output.weight": theirs.o_b_proj.weight, "query_norm.weight": theirs.q_a_norm.weight,
        "norm.weight": theirs.kv_norm.weight[order], "sink": theirs.sinks,
    }  # fmt: skip
    run = theirs.compressor
    if run is not None:
        parts = [(run.kv_proj.weight, "value"), (run.gate_proj.weight, "weight")]
        copied |= {f"run_{role}.weight": weight[-_HEAD:][order] for weight, role in parts}
        if name == "compressed_sparse_attention":
            copied |= {f"before_{role}.weight": weight[:_HEAD][order] for weight, role in parts}
        biases = [one[:, order] for one in run.position_bias.split(_HEAD, 1)]
        copied |= {"run_bias": torch.stack(biases[::-1]), "run_norm.weight": run.kv_norm.weight[order]}
    own.load_state_dict(copied)
    x = torch.randn(2, _TOKENS, _WIDTH, generator=generator)
    places = torch.arange(_TOKENS)[None]
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    at = {kind: rotary(x, places, layer_type=kind) for kind in ("main", "compress")}
    seen = (places[0][:, None] >= places[0]) & (places[0][:, None] - places[0] < 16)
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None].expand(2, 1, -1, -1)
    expected, _ = theirs(x, position_embeddings=at, position_ids=places, attention_mask=mask)
    found = own(x, Surroundings(causal=True, rotation=rotation_table(
        architecture(name), _TOKENS, device=x.device, dtype=x.dtype)))  # fmt: skip
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", _KINDS)
def test_counts_are_those_of_the_network_that_is_built(name: str) -> None:
    p = table(name)
    built = sp.build(p)
    assert count_parameters(p)["total"] == sum(x.numel() for x in built.parameters())


@pytest.mark.parametrize(("changes", "said"), [
    ({"d_rotary": 64}, "at most d_head"), ({"groups": 3}, "divisor of n_heads"), ({"selects": 2}, "an indexer selects"),
])  # fmt: skip
def test_what_is_not_derived_is_refused(changes: dict[str, Any], said: str) -> None:
    name = "compressed_sparse_attention"
    with pytest.raises(sp.InputError, match=said):
        sp.predict(sp.scheme("xavier")(architecture(name, settings={name: {"rate": 4, "d_rotary": 8} | changes})))


@pytest.mark.parametrize("name", _KINDS)
def test_padding_is_not_looked_at(name: str) -> None:
    """A mask that allows all that is causal changes nothing; one that forbids tokens moves those who saw them."""
    p = table(name)
    attention = module.make(p, 0, without_biases(p, name), torch.float64, None, name).requires_grad_(False)
    x = torch.randn(1, _TOKENS, _WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for weight in attention.parameters():
        weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    around = surroundings(p.architecture, x, "decoder")
    causal = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()[None, None]
    plain = attention(x, around)
    torch.testing.assert_close(attention(x, replace(around, mask=causal)), plain)
    first = causal & (torch.arange(_TOKENS) > 3)  # the first four are padding
    changed = attention(x, replace(around, mask=first)) - plain
    assert changed[:, 4:8].abs().max() > 1e-3
