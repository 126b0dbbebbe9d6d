"""Input statistics against enumeration, brute force and simulated embeddings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import (
    InputStatistics,
    collision_probability,
    from_patches,
    from_tokens,
    segment_correlation,
    tensor_moments,
    zipf,
    zipf_token_correlation,
)
from signalprop.network.parametrization import Embedding
from signalprop.schemes import scheme
from signalprop.theory.embedding import embed, sinusoidal_moments

IDS = st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), min_size=1, max_size=4)


def pairs_that_agree(rows: Any, ignore: int | None) -> float:
    """Brute force over all ordered pairs of different positions."""
    agree = total = 0
    for row in rows:
        for i, j in itertools.permutations(range(len(row)), 2):
            if ignore is None or (row[i] != ignore and row[j] != ignore):
                total += 1
                agree += row[i] == row[j]
    return agree / total if total else 0.0


class TestZipf:
    @pytest.mark.parametrize("vocabulary", [1, 2, 10, 1000])
    def test_the_exact_value(self, vocabulary: int) -> None:
        p = [1 / i for i in range(1, vocabulary + 1)]
        expected = math.fsum(x * x for x in p) / math.fsum(p) ** 2
        assert zipf_token_correlation(vocabulary) == pytest.approx(expected, rel=1e-13)

    def test_the_papers_number_for_three_tables(self) -> None:
        exact = (zipf_token_correlation(32_000) + segment_correlation()) / 3
        simplified = (zipf_token_correlation(32_000, approximate=True) + segment_correlation()) / 3
        assert (round(exact, 4), round(simplified, 4), round(exact, 3)) == (0.2268, 0.2273, 0.227)
        assert zipf_token_correlation(32_000) == pytest.approx(0.01372, abs=5e-6)

    def test_the_papers_approximation_is_this_far_off(self) -> None:
        ratio = [zipf_token_correlation(v, approximate=True) / zipf_token_correlation(v) for v in (1000, 32_000)]
        assert ratio == pytest.approx([1.17, 1.11], abs=0.005)

    def test_statistics_without_text(self) -> None:
        x = zipf(32_000, loss_fraction=0.15)
        assert x.token_correlation == x.target_correlation == zipf_token_correlation(32_000)
        assert (x.loss_fraction, x.segment_correlation) == (0.15, 2 / 3)


@pytest.mark.parametrize("length", [2, 3, 17])
def test_segments_by_enumeration(length: int) -> None:
    def average(boundaries: range) -> float:
        rows = [[int(k >= b) for k in range(length)] for b in boundaries]
        return float(np.mean([pairs_that_agree([row], None) for row in rows]))

    assert average(range(length + 1)) == pytest.approx(segment_correlation(), abs=1e-12)
    assert average(range(1, length)) == pytest.approx(segment_correlation(length), abs=1e-12)


class TestTokenIds:
    @given(IDS, st.sampled_from([-1, 0, None]))
    def test_collisions_by_brute_force(self, rows: list[list[int]], ignore: int | None) -> None:
        assert collision_probability(rows, ignore=ignore) == pytest.approx(pairs_that_agree(rows, ignore), abs=1e-12)

    @given(IDS, st.booleans())
    def test_statistics_by_brute_force(self, rows: list[list[int]], causal: bool) -> None:
        if all(value == -1 for row in rows for value in row):
            return
        x = from_tokens(rows, causal=causal)
        aims = [
            [-1 if here == -1 else there for here, there in zip(row, [*row[1:], -1] if causal else row, strict=True)]
            for row in rows
        ]
        real = [
            (here, aim) for row, aim_row in zip(rows, aims, strict=True) for here, aim in zip(row, aim_row, strict=True)
        ]
        share = np.mean([aim != -1 for here, aim in real if here != -1])
        assert x.token_correlation == pytest.approx(pairs_that_agree(rows, -1), abs=1e-12)
        assert x.target_correlation == pytest.approx(pairs_that_agree(aims, -1), abs=1e-12)
        assert x.loss_fraction == pytest.approx(share if share else 1.0)
        assert x.tokens.tolist() == rows and x.targets.tolist() == aims

    @pytest.mark.parametrize(
        ("tokens", "more", "part"),
        [
            ([[-1, -1]], {}, "no token"),
            ([], {}, "integers"),
            ([[0.5, 1.0]], {}, "integers"),
            ([["a"]], {}, "integers"),
            ([[True, False]], {}, "integers"),
            ([[1, 2], [3]], {}, "ragged"),
            ([[[1]]], {}, "integers"),
            ([[1, 2]], {"targets": [[1, 2, 3]]}, "targets have shape"),
            ([[1, 2]], {"segments": [[0]]}, "segments have shape"),
            ([[1, 2]], {"targets": [[-1, -100]]}, "no position carries loss"),
            ([[1, 2]], {"loss_fraction": 0.0}, "loss_fraction is 0"),
        ],
    )
    def test_bad_ids(self, tokens: Any, more: dict[str, Any], part: str) -> None:
        with pytest.raises(InputError, match=part):
            from_tokens(tokens, **more)


class TestTensors:
    def test_moments_by_brute_force(self) -> None:
        rng = np.random.default_rng(0)
        x = rng.normal(0.3, 2.0, (3, 5, 4)) + rng.normal(0, 1, (3, 1, 4))
        keep = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], bool)
        m = tensor_moments(x, keep)
        real = x[keep]
        assert m.mean == pytest.approx(real.mean()) and m.variance == pytest.approx(real.var())
        products = [
            (x[b, i] - real.mean()) @ (x[b, j] - real.mean()) / 4
            for b in range(3)
            for i, j in itertools.permutations(np.flatnonzero(keep[b]), 2)
        ]
        assert m.token_correlation == pytest.approx(np.mean(products) / real.var())


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "words"},
        {"token_correlation": 1.1},
        {"token_correlation": "0.5"},
        {"token_correlation": float("nan")},
        {"segment_correlation": -2.0},
        {"target_correlation": True},
        {"variance": -1.0},
        {"variance": float("inf")},
        {"mean": None},
        {"loss_fraction": 0.0},
        {"loss_fraction": 1.5},
        {"decoder": {"kind": "tokens"}},
    ],
    ids=str,
)
def test_bad_statistics(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        InputStatistics(**fields)


def test_a_description() -> None:
    x = replace(zipf(100), loss_fraction=0.5)
    both = InputStatistics(decoder=x).describe()
    assert both["decoder"]["loss_fraction"] == 0.5 and both["kind"] == "tokens"


def sines(length: int, d: int) -> Any:
    """Vaswani et al. 2017, section 3.5, scaled to mean square 1."""
    rate = 10_000.0 ** (-np.arange(d // 2) / (d // 2))
    angle = np.arange(length)[:, None] * rate
    return math.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], -1)


@pytest.mark.parametrize(("length", "d"), [(1, 8), (2, 8), (512, 256), (1000, 64)])
def test_sinusoids_by_brute_force(length: int, d: int) -> None:
    table = sines(length, d)
    mean, alike = sinusoidal_moments(length, d)
    assert mean == pytest.approx(table.mean(), abs=1e-12)
    gram = table @ table.T / d
    expected = (gram.sum() - np.trace(gram)) / (length * (length - 1)) if length > 1 else 0.0
    assert alike == pytest.approx(expected, abs=1e-12)


ENDS: dict[str, dict[str, Any]] = {
    "three tables": {"n_segments": 2},
    "one segment": {"n_segments": 1},
    "rotary": {"positions": "rotary"},
    "scaled": {"positions": "none", "embedding_scale": 3.0},
    "sinusoidal": {"positions": "sinusoidal"},
    "layernorm": {"n_segments": 2, "embedding_norm": True},
    "rmsnorm": {"positions": "sinusoidal", "embedding_norm": True, "norm": "rmsnorm"},
    "epsilon": {"n_segments": 2, "embedding_norm": True, "norm_eps": 0.3},
    "patches": {"input": "patches", "patch_dim": 24},
    "class token": {"input": "patches", "patch_dim": 24, "class_token": True, "n_segments": 2},
    "one patch": {"input": "patches", "patch_dim": 24, "class_token": True, "seq_len": 2},
}


def simulated(a: Architecture, e: Embedding, data: Any, segments: Any, rng: np.random.Generator) -> list[float]:
    """Mean, variance and covariance of one random embedding of the data."""
    d = a.d_model
    if a.input == "patches":
        bias = rng.normal(0, e.patch_bias, d)
        stream = data @ rng.normal(0, e.token, (a.patch_dim, d)) + bias
        if a.class_token:
            first = np.broadcast_to(rng.normal(0, e.position, d), (len(data), 1, d))
            stream = np.concatenate([first, stream], 1)
    else:
        stream = rng.normal(0, e.token, (a.vocab_size, d))[data]
    if a.positions == "learned":
        stream = stream + rng.normal(0, e.position, (a.seq_len, d))
    if a.positions == "sinusoidal":
        stream = stream + e.position * sines(a.seq_len, d)
    if a.n_segments:
        stream = stream + rng.normal(0, e.segment, (a.n_segments, d))[segments]
    stream = e.scale * stream
    if a.embedding_norm:
        stream = stream - (stream.mean(-1, keepdims=True) if a.norm == "layernorm" else 0.0)
        stream = e.norm_gain * stream / np.sqrt((stream**2).mean(-1, keepdims=True) + a.norm_eps)
    p = a.embedding_dropout or 0.0
    stream = stream * (rng.random(stream.shape) >= p) / (1 - p)
    # about 0, not about the sample's own mean, which takes 1/d of the variance of what all tokens share
    second, shared = (stream**2).mean(), 0.0
    if a.seq_len > 1:
        shared = ((stream.sum(1) ** 2).sum() - (stream**2).sum()) / stream.size / (a.seq_len - 1)
    return [float(stream.mean()), float(second), float(shared)]


@pytest.mark.parametrize("case", ENDS)
def test_embed_against_a_simulated_embedding(case: str) -> None:
    a = Architecture(
        **{"n_layers": 1, "d_model": 256, "vocab_size": 200, "seq_len": 24, "embedding_dropout": 0.2, **ENDS[case]}
    )
    has_table = a.positions in ("learned", "sinusoidal")
    e = Embedding(
        token=0.7,
        position=0.5 if has_table else 0.0,
        segment=0.6 if a.n_segments else 0.0,
        patch_bias=0.3,
        scale=a.embedding_scale,
        norm_gain=0.9,
    )
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, a.vocab_size + 1)
    ids = rng.choice(a.vocab_size, p=p / p.sum(), size=(6, a.seq_len))
    segments = (np.arange(a.seq_len) >= rng.integers(0, a.seq_len + 1, (6, 1))).astype(int) * (a.n_segments > 1)
    same = from_tokens(ids, segments=segments)
    data, inputs = ids, same
    if a.input == "patches":
        n_patches = a.seq_len - a.class_token
        if n_patches == 0:
            data, inputs = np.zeros((6, 0, a.patch_dim)), InputStatistics(kind="patches")
        else:
            data = rng.normal(0.4, 1.0, (6, n_patches, a.patch_dim)) + rng.normal(0, 0.5, (6, 1, a.patch_dim))
            found = from_patches(data)
            inputs = InputStatistics(
                kind="patches",
                mean=found.mean,
                variance=found.variance,
                token_correlation=found.token_correlation,
                segment_correlation=same.segment_correlation,
            )
    m = embed(a, e, inputs)
    expected = np.array([m.mean, m.second_moment, m.covariance + m.mean**2])
    if a.seq_len == 1:
        expected[2] = 0.0
    samples = np.array([simulated(a, e, data, segments, rng) for _ in range(60)])
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    # with a norm the theory is that of infinite width: its covariance is off by up to r (1 - r^2) / (2 d)
    slack = 1 / (4 * a.d_model) if a.embedding_norm else 0.0
    assert (np.abs(samples.mean(0) - expected) < 4 * error + slack + 1e-12).all()
    assert error[1] < 0.03 * expected[1]


def test_the_papers_embedding_has_variance_1_and_correlation_0_204() -> None:
    a = Architecture.preset("tgs", embedding_dropout=0.1)
    m = embed(a, scheme("deepscalelm")(a).embedding, zipf(32_000))
    assert m.variance == pytest.approx(1.0)
    assert m.token_correlation == pytest.approx(0.9 * 0.2268, abs=1e-4)
