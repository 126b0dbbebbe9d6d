"""Multipliers against weights: a factor on a signal does what the weights around it do that carry the factor instead.

Exact, by both formulas and with their bands, where norms have no epsilon.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_named, kind_of
from signalprop.network.layout import PLACEMENTS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme

NETWORKS: dict[str, dict[str, Any]] = {
    "pre": {"kind": "decoder", "gated": True, "n_kv_heads": 1, "positions": "rotary", "dropout": 0.1},
    "bidirectional": {"n_segments": 2},
    "post": {"norm_placement": "post", "dropout": 0.1},
    "sandwich": {"kind": "decoder", "norm_placement": "sandwich", "norm": "rmsnorm"},
    "res-post": {"kind": "decoder", "norm_placement": "res-post", "qk_norm": True},
    "none": {"kind": "decoder", "norm_placement": "none", "dropout": 0.1},
    "parallel": {"kind": "decoder", "parallel": True},
    "encoder-decoder": {"kind": "encoder-decoder", "n_decoder_layers": 2, "target_len": 8},
    "post-norm encoder-decoder": {"kind": "encoder-decoder", "n_decoder_layers": 2, "norm_placement": "post"},
    "image": {"input": "patches", "class_token": True, "head": "classes", "seq_len": 5, "patch_dim": 12},
}
SHAPE: dict[str, Any] = {
    "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "seq_len": 8, "vocab_size": 60, "norm_eps": 0.0,
    "tied_embeddings": False, "bias": True,
}  # fmt: skip
COLUMNS = "token_correlation", "variance_sd", "token_correlation_sd", "variance_excess"


def with_multipliers(a: Architecture) -> Parametrization:
    """Weights, biases and every multiplier differ from sublayer to sublayer."""
    rng = np.random.default_rng(0)
    p = scheme("xavier")(a)
    columns = {f"weight__{role}": std * rng.uniform(0.7, 1.4, std.shape) for role, std in p.weights.items()}
    columns |= {f"bias__{role}": np.where(std > 0, 0.2, 0.0) for role, std in p.weights.items()}
    names = ["skip", "branch", "norm_gain", "norm_scale", "post_norm_gain", "score_scale", "attention_gain"]
    columns |= {name: rng.uniform(0.5, 2.0, p.n_sublayers) for name in names}
    columns["score_scale"] *= 0.3
    columns["value_skip"] = np.where(kind_named("attention").of(p), 0.6, 0.0)
    embedding = {"token": 0.9, "position": 0.4, "segment": 0.3, "patch_bias": 0.2, "scale": 1.7, "norm_gain": 0.6}
    head = p.head.model_copy(update={"scale": 0.7, "final_norm_gain": 1.8})
    return replace(p.with_columns(**columns), embedding=p.embedding.model_copy(update=embedding), head=head)


def without_multipliers(p: Parametrization) -> tuple[Parametrization, FloatArray, FloatArray, FloatArray]:
    """The same function whose weights carry the multipliers, and how many times larger than there are, in `p`, the
    stream that every sublayer reads, its branch, and the stream after it."""
    a, e = p.architecture, p.embedding
    weights, biases, gain, post = dict(p.weights), dict(p.biases), np.ones(p.n_sublayers), p.post_norm_gain.copy()
    weights, biases = ({role: x.copy() for role, x in of.items()} for of in (weights, biases))
    read, branch, left = (np.ones(p.n_sublayers) for _ in range(3))
    size = memory = layer_in = 1.0
    scored = p.score_scale.copy()
    for i in range(p.n_sublayers):
        kind, placement, across = kind_of(p, i), PLACEMENTS[p.placement[i]], kind_of(p, i).reads_memory
        if i and p.stack[i] != p.stack[i - 1]:
            memory, size = p.head.final_norm_gain if a.has_final_norm else size, 1.0
        if not p.parallel[i]:
            layer_in, size = size, size * p.skip[i]
        normed = placement in NORM_BEFORE
        for role in (role.name for role in kind.roles if role.reads):
            of_memory = across and role in ("key", "value")
            weights[role][i] *= memory if of_memory else p.norm_output[i] if normed else layer_in
        if kind.attends:
            weights["output"][i] *= p.attention_gain[i]
            if not a.qk_norm:
                for of in (weights, biases):
                    of["query"][i] *= p.score_scale[i]
                scored[i] = 1.0
        carried = p.branch[i] / size
        if placement == "sandwich":
            post[i] *= carried
        elif placement == "res-post":
            gain[i] = carried * p.norm_output[i]
        else:
            for role in (role.name for role in kind.roles if role.writes):
                weights[role][i] *= carried
                biases[role][i] *= carried
        read[i], branch[i] = layer_in, 1 / carried
        size = left[i] = p.norm_output[i] if placement in NORM_AFTER else size
    columns = {f"weight__{role}": x for role, x in weights.items()} | {f"bias__{role}": x for role, x in biases.items()}
    ones = dict.fromkeys(("skip", "branch", "norm_scale", "attention_gain"), 1.0)
    skip = np.divide(p.value_skip, p.attention_gain)
    plain = p.with_columns(**columns, **ones, norm_gain=gain, post_norm_gain=post, score_scale=scored, value_skip=skip)
    embedding = {name: getattr(e, name) * e.scale for name in ("token", "position", "segment", "patch_bias")}
    last = p.head.final_norm_gain if a.has_final_norm else size
    head = {"scale": 1.0, "final_norm_gain": 1.0, "weight": p.head.weight * last * p.head.scale}
    plain = replace(
        plain, embedding=e.model_copy(update=embedding | {"scale": 1.0}), head=p.head.model_copy(update=head)
    )
    return plain, read, branch, left


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
@pytest.mark.parametrize(
    ("name", "large"), [(name, large) for name in NETWORKS for large in (1.0, 1e4) if name != "none" or large == 1]
)
def test_weights_can_carry_every_multiplier(name: str, large: float, fidelity: Any) -> None:
    """Also where skips and branches are so large that kernels have a scale beside them."""
    a = Architecture(**SHAPE | NETWORKS[name])
    p = with_multipliers(a)
    p = p.with_columns(skip=large * p.skip, branch=large * p.branch)
    plain, before, branch, after = without_multipliers(p)
    ids = np.random.default_rng(1).integers(0, 12, (1, a.seq_len + 1))
    read = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "token_correlation": 0.1, "segment_correlation": 0.5}
    inputs = InputStatistics(**read) if a.input == "tokens" else InputStatistics(kind="patches", token_correlation=0.2)
    one, other = (predict(x, inputs, fidelity=fidelity) for x in (p, plain))
    check_same(one, other, {
        "forward": {"stream_in": before, "branch": branch, "stream_out": after},
        "gradient": {"stream_in": after[-1] / before, "stream_out": after[-1] / after},
    })  # fmt: skip


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
@pytest.mark.parametrize("size", [1e-12, 1e14])
def test_without_norms_and_scores_a_size_stays_what_it_is(size: float, fidelity: Any) -> None:
    """Of ReLUs and means over tokens, which are as large as what they read; gradients are the same."""
    a = Architecture(
        kind="decoder", n_layers=2, d_model=32, n_heads=2, d_ff=64, seq_len=8, vocab_size=60, activation="relu",
        norm_placement="none", norm_eps=0.0, tied_embeddings=False, head="none",
    )  # fmt: skip
    p = scheme("xavier")(a).with_columns(weight__query=0.0)
    inputs = InputStatistics(token_correlation=0.3, target_correlation=0.2)
    larger = replace(p, embedding=p.embedding.model_copy(update={"scale": size * p.embedding.scale}))
    one, other = (predict(x, inputs, fidelity=fidelity) for x in (larger, p))
    everywhere, none = np.full(p.n_sublayers, size), np.ones(p.n_sublayers)
    check_same(one, other, {
        "forward": dict.fromkeys(("stream_in", "branch", "stream_out"), everywhere),
        "gradient": dict.fromkeys(("stream_in", "stream_out"), none),
    })  # fmt: skip


# How far averages over positions lie from token kernels of equivalent tokens: ln of a variance, a correlation. Without
# a mask all positions are; an image's class token is not.
APART = dict.fromkeys(NETWORKS, (0.07, 0.05)) | {"bidirectional": (0.02, 0.005), "post": (0.02, 0.005)}
APART |= {"post-norm encoder-decoder": (0.2, 0.03), "none": (0.08, 0.05)}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "image"])
def test_both_formulas_agree_where_tokens_are_equivalent(name: str) -> None:
    a = Architecture(**SHAPE | {"d_model": 128, "norm_eps": 0.01} | NETWORKS[name])
    p = with_multipliers(a)
    p = p.with_columns(score_scale=(0.5 if a.qk_norm else 6) * p.score_scale)
    inputs = InputStatistics(token_correlation=0.2, target_correlation=0.1)
    averages, kernels = (predict(p, inputs, fidelity=fidelity) for fidelity in ("moments", "kernel"))  # type: ignore[arg-type]
    apart, correlated = APART[name]
    for side, points in (("forward", ("stream_out", "branch")), ("gradient", ("stream_in", "branch"))):
        for one, other in ((getattr(averages, side)[point], getattr(kernels, side)[point]) for point in points):
            np.testing.assert_allclose(one.log_variance, other.log_variance, rtol=0, atol=apart)
            np.testing.assert_allclose(one.token_correlation, other.token_correlation, rtol=0, atol=correlated)


@pytest.mark.parametrize("placement", ["sandwich", "res-post"])
def test_a_norm_on_a_branch_has_its_epsilon(placement: Any) -> None:
    """Half of what it divides by; a branch would be half as large again without."""
    a = Architecture(**SHAPE | {"kind": "encoder", "n_layers": 1, "norm_placement": placement, "norm_eps": 0.5})
    inputs = InputStatistics(token_correlation=0.2, target_correlation=0.1)
    averages, kernels = (
        predict(scheme("xavier")(a), inputs, fidelity=fidelity).forward["branch"] for fidelity in ("moments", "kernel")
    )
    np.testing.assert_allclose(averages.log_variance, kernels.log_variance, rtol=0, atol=0.02)
    assert (kernels.variance < 0.8).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sweep_is_its_networks_whatever_they_are(name: str) -> None:
    """Of tables that differ in every column."""
    a = Architecture(**SHAPE | {"norm_eps": 0.01} | NETWORKS[name])
    first = with_multipliers(a)
    second = first.with_columns(**{key.replace(".", "__"): 0.8 * x for key, x in first.columns().items()})
    read = {"kind": "patches"} if a.input == "patches" else {"target_correlation": 0.1}
    inputs = InputStatistics(token_correlation=0.2, **read)  # type: ignore[arg-type]
    together = predict(Parametrization.sweep([first, second]), inputs)
    for k, p in enumerate((first, second)):
        alone = predict(p, inputs, fidelity="moments")
        for side in ("forward", "gradient"):
            for point, series in getattr(together, side).items():
                for column in ("log_variance", "token_correlation", "mean"):
                    one, other = (getattr(x, column) for x in (series, getattr(alone, side)[point]))
                    np.testing.assert_allclose(one[k], other, rtol=1e-9, atol=1e-9, err_msg=f"{side} {point} {column}")


def check_same(one: Profile, other: Profile, sizes: dict[str, dict[str, FloatArray]]) -> None:
    """All columns of series that are known of both, but the sizes of signals."""
    for side, points in sizes.items():
        for point, size in points.items():
            mine, theirs = (getattr(x, side)[point] for x in (one, other))
            where = f"{side} {point}"
            moved = theirs.log_variance + 2 * np.log(size)
            np.testing.assert_allclose(mine.log_variance, moved, rtol=0, atol=1e-6, err_msg=where)
            for column in COLUMNS:
                values = getattr(mine, column), getattr(theirs, column)
                assert (values[0] is None) == (values[1] is None)
                if values[0] is not None:
                    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6, err_msg=f"{where} {column}")
