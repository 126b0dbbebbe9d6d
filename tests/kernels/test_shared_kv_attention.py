"""Attention with shared keys and values: its kernel against random networks, its module against transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.masked import MaskedAttention, View
from signalprop.models.surroundings import Surroundings, rotation_table
from signalprop.network.kinds import kind_named
from signalprop.network.moments import FloatArray
from signalprop.results.cost import count_parameters
from signalprop.sublayers.shared_kv_attention import kernel, module, moments
from signalprop.theory.softmax import exact_softmax_moments

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


def random_kernels() -> tuple[FloatArray, FloatArray]:
    """Of tokens of which some are equal, and of a gradient."""
    rng, at = np.random.default_rng(0), np.arange(_TOKENS)
    words = rng.integers(0, 15, _TOKENS)
    tokens = 0.2 + 0.7 * (words[:, None] == words)
    gradient = 0.1 + 0.3 * (np.abs(at[:, None] - at) < 2)
    for one in (tokens, gradient):
        np.fill_diagonal(one, 1.0)
    return tokens, gradient


def without_biases(p: sp.Parametrization, name: str) -> dict[str, bool]:
    return dict.fromkeys(kind_named(name).role_names(p.architecture), False)


@pytest.mark.parametrize("name", _KINDS)
def test_kernels_are_those_of_random_networks(name: str) -> None:
    p, (tokens, gradient) = table(name), random_kernels()
    made = kernel.of(p, 1, (), name)
    predicted = made.forward(0, tokens), made.backward(0, tokens, gradient)
    roots = [torch.tensor(np.linalg.cholesky(one)) for one in (tokens, gradient)]
    shape = (_TOKENS, _WIDTH)
    table_of_turns = rotation_table(p.architecture, _TOKENS, device=torch.device("cpu"), dtype=torch.float64)
    seen: list[list[FloatArray]] = [[], []]
    network = module.make(p, 0, without_biases(p, name), torch.float64, None, name)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        for part in network.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.05, generator=generator)
        x, g = (root @ torch.randn(shape, generator=generator, dtype=torch.float64) for root in roots)
        x.requires_grad_()
        out = network(x[None], Surroundings(causal=True, rotation=table_of_turns))[0]
        (sent,) = torch.autograd.grad(out, x, g)
        for kept, one in zip(seen, (out.detach(), sent), strict=True):
            kept.append((one @ one.T / _WIDTH).numpy())
    for which, kept in zip(predicted, seen, strict=True):
        measured = np.stack(kept)
        for of in (np.trace, np.sum):
            numbers = np.array([of(one) for one in measured])
            error = numbers.std(ddof=1) / len(numbers) ** 0.5 / numbers.mean()
            assert abs(np.log(of(which) / numbers.mean())) < 0.06 + 3 * error


def means(of: FloatArray) -> list[float]:
    """Of the diagonal, and of the rest."""
    n, trace = len(of), float(np.trace(of))
    return [trace / n, (float(of.sum()) - trace) / (n * (n - 1))]


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize(
    ("positions", "tokens_of", "tolerance"), [("none", _TOKENS, 0.006), ("none", 9, 0.006), ("rotary", _TOKENS, 0.03)]
)
def test_moments_are_kernels_of_equally_correlated_tokens(
    name: str, positions: str, tokens_of: int, tolerance: float
) -> None:
    """Kernels hold against random networks, above; averages once had no path through what runs weigh, 22 % low."""
    p = table(name, positions=positions, seq_len=tokens_of)
    made, whole = moments.of(p, 1, name), kernel.of(p, 1, (), name)
    same, one, size = np.ones((tokens_of, tokens_of)), np.eye(tokens_of), 1.7
    for r in (0.0, 0.3, 0.9):
        tokens = size * (r * same + (1 - r) * one)
        forward = made.forward(0, (size, r))
        back = made.backward(np.array([0]), (np.full(1, size), np.full(1, r))).stream
        vv, vc, cv, cc = (float(column[0]) for column in back)
        pairs = [
            ([forward.variance, forward.covariance], means(whole.forward(0, tokens))),
            ([vv, cv], means(whole.backward(0, tokens, one))),
            ([vv + vc, cv + cc], means(whole.backward(0, tokens, same))),
        ]
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=0, abs=tolerance * expected[0])


def test_rotations_of_tokens_that_are_nearly_alike() -> None:
    """What all keys share turns, in scores and in what they average: by one of them alone 9 and 17 % too much."""
    name, n = "shared_kv_attention", _TOKENS
    settings = {"window": 16, "query_rank": 96, "groups": 2, "group_rank": 64, "d_rotary": 16, "rotary_base": 1e4}
    p = table(name, settings={name: settings})
    tokens, gradient = (r + (1 - r) * np.eye(n) for r in (0.95, 0.3))
    made = kernel.of(p, 1, (), name)
    # 250 networks of 4 sequences each; standard errors .7 and 1.2 %
    assert np.trace(made.forward(0, tokens)) / n == pytest.approx(0.03493, rel=0.02)
    assert np.trace(made.backward(0, tokens, gradient)) / n == pytest.approx(0.01889, rel=0.035)


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


def test_a_mask_of_all_that_came_before_is_causal_attention() -> None:
    tokens, gradient = random_kernels()
    at = np.arange(float(_TOKENS))
    view = View(at[:, None] >= at, at, at)
    own = TokenAttention(kernel=tokens, qk=0.5, d_model=_WIDTH, d_head=_HEAD)
    masked = MaskedAttention(
        kernel=tokens, asks=tokens, view=view, qk=0.5, d_model=_WIDTH, d_head=_HEAD, chance=1 / _WIDTH
    )
    found, whole = masked.forward(), own.forward()
    # short rows apart: what two keys have by being part of their mean is structure to the latter, 1.2 % of the second
    np.testing.assert_allclose(found[8:, 8:], whole[8:, 8:], rtol=0.01)
    r = tokens[0, 1]
    exact = r + (1 - r) * exact_softmax_moments(0.5 * (1 - r), 2).second
    assert found[1, 1] == pytest.approx(float(exact), rel=3e-3)
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-12)
    sent = sum(masked.backward_to_both(gradient))
    assert abs(np.trace(sent) / np.trace(own.backward(gradient)) - 1) < 0.02


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
