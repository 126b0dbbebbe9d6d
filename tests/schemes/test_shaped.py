"""Value-SkipInit: the paper's numbers, and identity attention in prediction and in a random network."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.inputs import InputStatistics
from signalprop.parametrization import PLACEMENTS, Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from strategies import architectures

A = Architecture(kind="decoder", n_layers=3, d_model=64, n_heads=4, activation="relu", positions="rotary", seq_len=32)


class TestTable:
    def test_identity_attention_without_skips_and_norms(self) -> None:
        table = scheme("value-skipinit")(A)
        assert table.value_skip[::2].tolist() == [1, 1, 1] and table.attention_gain[::2].tolist() == [0, 0, 0]
        assert table.value_skip[1::2].tolist() == [0, 0, 0] and table.attention_gain[1::2].tolist() == [1, 1, 1]
        assert table.attention_trainable and not table.skip.any() and (table.branch == 1).all()
        assert {PLACEMENTS[code] for code in table.placement} == {"none"} and not table.architecture.has_final_norm
        assert (table.branch_trainable, table.skip_trainable) == ("fixed", "fixed")

    def test_weights(self) -> None:
        table = scheme("value-skipinit")(A)
        for role in ("query", "key", "value", "output"):
            assert table.weights[role][0] == 1 / 8
        assert table.weights["up"][1] == 1 / 8
        assert 256 * table.weights["down"][1] ** 2 / 2 == pytest.approx(1.0)  # E relu^2 = 1/2
        assert set(table.distribution.values()) == {"orthogonal"} and not any(b.any() for b in table.biases.values())
        normal = scheme("value-skipinit", orthogonal=False)(A)
        assert set(normal.distribution.values()) == {"normal"}

    def test_embeddings_have_variance_1_and_logits_start_small(self) -> None:
        table = scheme("value-skipinit")(A)
        assert table.embedding.token == 1 and table.head.scale == 1 / 8

    def test_norms_and_the_feed_forward_skip(self) -> None:
        table = scheme("value-skipinit", norm=True, feed_forward_skip=0.6)(A)
        assert {PLACEMENTS[code] for code in table.placement} == {"pre"} and table.architecture.has_final_norm
        assert table.skip.tolist() == [0, 0.6] * 3 and table.branch == pytest.approx([1, 0.8] * 3)

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            ({"norm": 1}, "expected true or false"),
            ({"orthogonal": "yes"}, "expected true or false"),
            ({"feed_forward_skip": 1.5}, "from 0 to 1"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], part: str) -> None:
        with pytest.raises(InputError, match=part):
            scheme("value-skipinit", **options)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(a=architectures())
    def test_any_architecture(self, a: Architecture) -> None:
        if a.kind == "encoder-decoder" or a.parallel:
            with pytest.raises(InputError, match="one stack of attention and feed-forward in turn"):
                scheme("value-skipinit")(a)
            return
        table = scheme("value-skipinit")(a)
        assert Parametrization.from_json(json.loads(json.dumps(table.to_json()))) == table
        attention = table.kind == 0
        assert (table.value_skip + table.attention_gain == 1).all() and (table.value_skip == attention).all()
        inner = a.n_heads * a.d_head
        assert a.d_model * table.weights["value"][attention] ** 2 == pytest.approx(np.ones(attention.sum()))
        assert inner * table.weights["output"][attention] ** 2 == pytest.approx(np.ones(attention.sum()))


class TestSignal:
    STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.3)

    def test_attention_leaves_variance_and_correlation_alone(self) -> None:
        a = Architecture(n_layers=20, d_model=256, seq_len=64, activation="relu")
        profile = predict(scheme("value-skipinit")(a), self.STREAM, fidelity="moments")
        before, after = (profile.forward[point].select(slice(0, None, 2)) for point in ("stream_in", "stream_out"))
        assert after.variance == pytest.approx(before.variance)
        assert after.token_correlation == pytest.approx(before.token_correlation)
        assert profile.forward["stream_out"].variance == pytest.approx(np.ones(40))

    def test_what_is_left_is_a_relu_network_of_each_token_alone(self) -> None:
        """The arc-cosine map of correlations, once per layer: tokens still grow alike, without DKS or TAT."""
        a = Architecture(n_layers=20, d_model=256, seq_len=64, activation="relu")
        profile = predict(scheme("value-skipinit")(a), self.STREAM, fidelity="moments")
        r, wanted = 0.3, []
        for _ in range(20):
            r = (math.sqrt(1 - r * r) + r * (math.pi - math.acos(r))) / math.pi
            wanted.append(r)
        assert profile.forward["stream_out"].token_correlation[1::2] == pytest.approx(wanted)

    def test_skipless_attention_alone_collapses(self) -> None:
        """What Value-SkipInit mends: the same table with ordinary attention."""
        a = Architecture(n_layers=20, d_model=256, seq_len=64, activation="relu")
        table = scheme("value-skipinit")(a)
        plain = table.with_columns(value_skip=0.0, attention_gain=1.0)
        mended, collapsed = (
            float(predict(t, self.STREAM, fidelity="moments").forward["stream_out"].token_correlation[2])
            for t in (table, plain)
        )
        assert mended < 0.6 and collapsed > 0.9

    def test_in_a_random_network_variance_is_kept_exactly(self) -> None:
        """Orthogonal values and outputs keep the length of every token: no error that falls with width only."""
        torch = pytest.importorskip("torch")
        from signalprop.data import Batch
        from signalprop.models import build
        from signalprop.probes import measure

        draws = np.random.default_rng(0)
        batch = Batch(tokens=draws.integers(0, 32_000, (2, 32)), targets=draws.integers(0, 32_000, (2, 32)))
        model = build(scheme("value-skipinit")(A), seed=0, dtype=torch.float64)
        profile = measure(model, batch, backward=False)
        for i in (0, 2, 4):
            before, after = (profile.forward[point].at(i) for point in ("stream_in", "branch"))
            second = [m["variance"] + m["mean"] ** 2 for m in (before, after)]
            assert second[1] == pytest.approx(second[0], rel=1e-6)  # weights are drawn in float32
