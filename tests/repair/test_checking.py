"""`check`: right models pass, wrong ones are named, and the scatter that is allowed is that of real draws."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from applied import WAYS
from choice import some
from measurement.conftest import MODELS, fresh, models
from signalprop.attachment.families import mapping_of
from signalprop.errors import InputError
from signalprop.models import build
from signalprop.models.weights import draw
from signalprop.network.architecture import Architecture
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import ROLES, Parametrization
from signalprop.repair import apply
from signalprop.repair.check_result import Check, Row
from signalprop.repair.checks import check
from signalprop.repair.goodness_of_fit import KURTOSIS, Sample, fault, sample, standard_error, std_bounds
from signalprop.schemes import SCHEMES, scheme

transformers = pytest.importorskip("transformers")
SHAPES = ("normal", "uniform", "truncated_normal")


def family(name: str, **changes: Any) -> nn.Module:
    """A fresh model with transformers' own weights, at default settings of its initialisation."""
    usual = {key: 0.02 for key in ("initializer_range", "init_std") if key in MODELS[name][2]}
    return fresh(name, **usual, **changes)


def rows(found: Check, *names: str) -> list[Row]:
    return [row for row in found.rows if row.name in names]


def wrong(found: Check) -> set[tuple[str, str, str]]:
    return {(row.place, row.name, row.verdict) for row in found.wrong}


def drawn(shape: Any, std: float, kind: Any, seed: int = 0) -> torch.Tensor:
    tensor = torch.empty(shape)
    draw(tensor, std, kind, seed, "test", "weight")
    return tensor


class TestScatter:
    @pytest.mark.parametrize("kind", SHAPES)
    def test_kurtosis_is_that_of_the_draws(self, kind: str) -> None:
        seen = sample(drawn((2000, 1000), 0.3, kind))
        assert seen.kurtosis == pytest.approx(KURTOSIS[kind], abs=6 * math.sqrt(24 / seen.n))
        assert seen.std == pytest.approx(0.3, abs=5 * standard_error(seen, kind))  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", SHAPES)
    def test_standard_error_is_the_scatter_of_many_samples(self, kind: Any) -> None:
        many = drawn((4000, 50), 1.0, kind)
        observed = float(many.std(1).std())
        expected = standard_error(Sample(50, 0.0, 1.0, None), kind)
        assert observed == pytest.approx(expected, rel=0.06)  # 1 / sqrt(2 * 4000) = 1.1 %, and terms of order 1 / n

    @given(n=st.integers(2, 10**9), deviations=st.floats(3, 8))
    def test_bounds_enclose_the_chi_squared_quantiles(self, n: int, deviations: float) -> None:
        low, high = std_bounds(n, 3.0, deviations)
        tail = float(stats.norm.sf(deviations))
        assert low**2 * (n - 1) <= float(stats.chi2.ppf(tail, n - 1)) * (1 + 1e-3)
        assert high**2 * (n - 1) >= float(stats.chi2.isf(tail, n - 1)) * (1 - 1e-3)
        if n > 1000:  # and not by much
            assert high - 1 == pytest.approx(deviations / math.sqrt(2 * n), rel=0.2)

    @pytest.mark.parametrize("kind", SHAPES)
    @pytest.mark.parametrize("n", [3, pytest.param(30, marks=pytest.mark.slow)])
    def test_right_samples_fail_no_oftener_than_they_should(self, kind: Any, n: int) -> None:
        deviations, count = 3.0, 4000
        samples = drawn((count, n), 0.5, kind, seed=n)
        failures = sum(bool(fault(sample(values), 0.5, kind, deviations)) for values in samples)
        allowed = 2 * 2 * float(stats.norm.sf(deviations))  # two tails, of deviation and of mean
        assert failures <= allowed * count + 5 * math.sqrt(allowed * count)

    def test_means_and_zeros(self) -> None:
        assert fault(Sample(10_000, 0.002, 0.02, 3.0), 0.02, "normal", 4.0) == "the mean is not 0"
        assert fault(Sample(10, 0.0, 0.0, None), 0.0, "normal", 4.0) == ""
        assert fault(Sample(10, 0.0, 1e-9, 3.0), 0.0, "normal", 4.0) == "expected zeros"
        assert fault(Sample(10, 0.0, 0.0, None), 0.1, "normal", 4.0) == "zeros"

    def test_samples_by_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() + 5
        whole = sample(values)
        monkeypatch.setattr("signalprop.repair.goodness_of_fit.PIECE", 7)
        assert sample(values) == pytest.approx(whole, rel=1e-12)
        assert whole.std == pytest.approx(float(values.std()), rel=1e-12)
        assert whole.kurtosis == pytest.approx(float(stats.kurtosis(values.numpy(), fisher=False)), rel=1e-9)


class TestRightModels:
    @pytest.mark.parametrize("name", models())
    def test_what_transformers_initialises(self, name: str) -> None:
        found = check(family(name), "huggingface")
        assert found.ok, found.summary()
        assert found.summary().endswith("weights and multipliers are right")

    @pytest.mark.parametrize(
        "name", some(sorted(SCHEMES), (*WAYS, "admin", "e-spa", "t-fixup", "rezero", "huggingface"))
    )
    def test_reference_models_of_every_scheme(self, name: str) -> None:
        a = Architecture(kind="encoder", n_layers=3, d_model=64, n_heads=4, vocab_size=90, seq_len=16, dropout=0.1)
        a = a.replace(family="bert") if name == "huggingface" else a
        a = a.replace(kind="decoder", norm="rmsnorm") if name in ("value-skipinit", "e-spa", "u-spa") else a
        table = scheme(name)(a)
        found = check(build(table, seed=3), table)
        assert found.ok, found.summary()

    @pytest.mark.parametrize(
        ("name", "asked"),
        some(
            [("gpt2", "deepscalelm-simple"), ("llama", "lns"), ("t5", "layerscale"), ("bert", "layerscale"),
             ("gpt2", "mup"), ("llama", "layerscale"), ("t5", "stable-resnet"), ("bert", "deepnorm")],
            (("llama", "lns"), ("t5", "layerscale"), ("gpt2", "mup"), ("bert", "deepnorm")),
        ),
    )  # fmt: skip
    def test_applied_models(self, name: str, asked: str) -> None:
        model = family(name)
        apply(model, asked, seed=1)
        found = check(model, asked)
        assert found.ok, found.summary()
        assert not check(model, "huggingface").ok

    def test_every_matrix_of_gpt2_has_one_role(self) -> None:
        model = family("gpt2")
        found = check(model, "gpt2")
        paths = [row.path for row in found.rows if row.path.endswith("weight") and "ln_" not in row.path]
        fused = [path for path in paths if "c_attn" in path]
        assert len(fused) == 9 and len(set(fused)) == 3
        matrices = {name for name, tensor in model.named_parameters() if tensor.ndim == 2}
        assert sorted(set(paths)) == sorted(matrices) and not found.notes
        entries = sum(row.entries for row in found.rows if row.path)
        assert entries == sum(tensor.numel() for tensor in model.parameters())


class TestWrongModels:
    def test_one_weight_of_one_layer(self) -> None:
        model = family("llama", hidden_size=64)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.25)
        found = check(model, "huggingface")
        assert wrong(found) == {("layer 1 feed-forward", "down", "off")}
        (row,) = found.wrong
        assert row.path == "model.layers.1.mlp.down_proj.weight"
        assert row.measured == pytest.approx(0.025, abs=5 * row.standard_error)
        assert row.standard_error == pytest.approx(0.025 / math.sqrt(2 * 64 * 48), rel=0.03)
        assert "layer 1 feed-forward down (model.layers.1.mlp.down_proj.weight): 0.02" in found.summary()

    def test_everything_else_that_can_be_wrong(self) -> None:
        model = family("gpt2")
        h = model.transformer.h
        with torch.no_grad():
            h[0].attn.c_attn.bias[40] = 1e-3
            h[1].ln_1.weight[3], h[1].ln_1.weight[4] = 1.1, 0.9
            h[1].ln_2.bias[0] = 0.1
            h[2].mlp.c_fc.weight.add_(0.01)
            h[2].mlp.c_proj.weight[0, 0] = math.nan
            model.transformer.wpe.weight.zero_()
        found = check(model, "huggingface")
        assert wrong(found) == {
            ("layer 0 attention", "key bias", "off"),
            ("layer 1 attention", "norm gain", "off"),
            ("layer 1 feed-forward", "norm bias", "off"),
            ("layer 2 feed-forward", "up", "off"),
            ("layer 2 feed-forward", "down", "off"),
            ("embedding", "position", "off"),
        }
        notes = {row.name: row.note for row in found.wrong}
        assert notes["down"] == "NaN or infinite numbers" and notes["up"] == "the mean is not 0"
        assert notes["position"] == "zeros" and notes["norm gain"].startswith("not all equal")
        json.dumps(found.to_json(), allow_nan=False)

    def test_multipliers(self) -> None:
        model = family("llama")
        mapping = mapping_of(model)
        items = [replace(item, skip=0.9, multiplier=0.5, norm_scale=0.7) for item in mapping.sublayers]
        table = scheme("huggingface")(mapping.architecture).with_columns(
            skip=0.9, branch=0.5, norm_scale=0.7, score_scale=1 / math.sqrt(8)
        )
        assert check(model, table, mapping=replace(mapping, sublayers=items)).ok
        found = check(model, table)
        assert wrong(found) == {
            (f"layer {i} {kind}", name, "off")
            for i in range(3)
            for kind in ("attention", "feed-forward")
            for name in ("skip", "branch", "norm_scale")
        }
        model.model.layers[1].self_attn.scaling *= 2
        assert ("layer 1 attention", "score_scale", "off") in wrong(check(model, table))

    def test_qk_norm_gains_are_part_of_the_score_scale(self) -> None:
        model = family("qwen3")
        with torch.no_grad():
            model.model.layers[2].self_attn.q_norm.weight.mul_(1.1)
        assert wrong(check(model, "huggingface")) == {("layer 2 attention", "score_scale", "off")}

    def test_placement_final_norm_and_trainable_multipliers(self) -> None:
        model = family("gpt2")
        names = {(row.name, row.note) for row in check(model, "deepnorm").wrong}
        assert ("norm placement", "the model has pre, the scheme post") in names
        assert ("final norm", "the model has a final norm, the scheme no final norm") in names
        assert ("branch multipliers", "the model has fixed, the scheme scalar") in {
            (row.name, row.note) for row in check(model, "rezero").wrong
        }

    def test_a_multiplier_that_something_swallowed(self) -> None:
        model = family("gpt2")
        apply(model, "deepscalelm-simple", seed=0)
        assert check(model, "deepscalelm-simple").ok
        carrier = model.transformer.h[1].mlp.c_proj
        plain = transformers.pytorch_utils.Conv1D(32, 128)
        plain.weight, plain.bias = carrier.weight, carrier.bias
        model.transformer.h[1].mlp.c_proj = plain
        assert wrong(check(model, "deepscalelm-simple")) == {("layer 1 feed-forward", "branch", "off")}

    def test_missing_and_twice(self) -> None:
        model = family("llama")
        mapping = mapping_of(model)
        items = list(mapping.sublayers)
        weights = dict(items[1].weights)
        items[1] = replace(items[1], weights={role: path for role, path in weights.items() if role != "down"})
        items[3] = replace(items[3], weights={**items[3].weights, "up": items[3].weights["gate"]})
        items[5] = replace(items[5], weights={**items[5].weights, "up": "model.layers.2.mlp.nothing"})
        found = check(model, "huggingface", mapping=replace(mapping, sublayers=items))
        assert wrong(found) == {
            ("layer 0 feed-forward", "down", "missing"),
            ("layer 1 feed-forward", "up", "twice"),
            ("layer 2 feed-forward", "up", "missing"),
        }
        notes = {row.place: row.note for row in found.wrong}
        assert notes["layer 0 feed-forward"] == "the mapping names no down"
        assert notes["layer 1 feed-forward"] == "the same numbers as layer 1 feed-forward gate"
        assert "has no 'nothing'" in notes["layer 2 feed-forward"]
        assert "model.layers.0.mlp.down_proj.weight" in found.notes[0]

    def test_what_the_model_carries(self) -> None:
        model = family("gpt2")
        with pytest.raises(InputError, match="the model carries no scheme; name one"):
            check(model)
        apply(model, "lns")
        with pytest.raises(InputError, match="options are of a scheme; name one"):
            check(model, sd=0.02)
        found = check(model)
        assert (found.scheme, found.ok) == ("lns", True)
        model.transformer.h[1].ln_1.weight.data.mul_(2)
        assert ("layer 1 attention", "norm gain", "off") in wrong(check(model))

    def test_refusals(self) -> None:
        model = family("gpt2")
        with pytest.raises(InputError, match="is for another network: n_layers is 5 there and 3 in the model"):
            check(model, scheme("gpt2")(Architecture.from_hf(model, n_layers=5)))
        with pytest.raises(InputError, match="unknown scheme 'gpt-2'"):
            check(model, "gpt-2")
        with pytest.raises(InputError, match="no option 'sd'"):
            check(model, "gpt2", sd=0.02)
        with torch.device("meta"):
            empty = family("gpt2")
        with pytest.raises(InputError, match="token: the parameter is on the meta device"):
            check(empty, "gpt2")

    def test_rows_of_a_fused_map(self) -> None:
        model = family("gpt2")
        mapping = mapping_of(model)
        items = list(mapping.sublayers)
        for changed, verdict in (
            (slice(32, 64), "twice"),  # the keys again
            (slice(64, 95), "missing"),
            ([200], "missing"),
        ):
            weights = {**items[0].weights, "value": ("transformer.h.0.attn.c_attn", changed)}
            odd = replace(mapping, sublayers=[replace(items[0], weights=weights), *items[1:]])
            found = {(row.name, row.verdict) for row in check(model, "huggingface", mapping=odd).wrong}
            assert ("value", verdict) in found


class TestPublicMistakes:
    """Lines that were wrong in public code, built anew: the check names the weight, and passes the right ones."""

    @pytest.mark.parametrize(
        ("scaled", "named"),
        [
            (("down_proj",), set()),
            (("up_proj",), {"up", "down"}),
            (("up_proj", "down_proj"), {"up"}),
            (("gate_proj", "up_proj", "down_proj"), {"gate", "up"}),
        ],
    )
    def test_the_wrong_matrix_of_a_gated_block(self, scaled: tuple[str, ...], named: set[str]) -> None:
        """torchtitan #3334 (w3 is scaled as well as w2), llama2.c #579 (w3 instead of w2)."""
        model = family("llama", num_hidden_layers=8, hidden_size=64)
        with torch.no_grad():
            for layer in model.model.layers:
                for weight in (layer.self_attn.o_proj.weight, *(getattr(layer.mlp, name).weight for name in scaled)):
                    weight.mul_(1 / 4)  # 1 / sqrt(2 * 8)
        assert [row.name for row in check(model, "gpt2").wrong].count("up") == 8 * ("up" in named)
        assert {(row.kind, row.name) for row in check(model, "gpt2").wrong} == {
            ("feed_forward", name) for name in named
        }


class TestResults:
    def test_json_and_options(self) -> None:
        found = check(family("llama"), "fixed", std=0.02)
        data = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert data["schema"] == "signalprop/check/1" and data["ok"] is True
        assert (data["scheme"], data["options"]) == ("fixed", {"std": 0.02})
        assert data["counts"] == {"ok": len(found.rows), "off": 0, "missing": 0, "twice": 0}
        assert set(data["rows"][0]) == {
            "place", "stack", "layer", "kind", "name", "path", "wanted", "measured", "standard_error", "mean",
            "kurtosis", "entries", "verdict", "note",
        }  # fmt: skip

    def test_the_table_joins_layers_of_one_verdict(self) -> None:
        model = family("llama", num_hidden_layers=5)
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(2)
        lines = check(model, "huggingface").table().splitlines()
        ups = [line.split()[:3] for line in lines if " ffn up  " in line]
        assert ups == [["0-1", "ffn", "up"], ["2", "ffn", "up"], ["3-4", "ffn", "up"]]
        assert next(line for line in lines if line.startswith("2 ") and " ffn up " in line).split()[-1] == "off"
        assert "0-4" in next(line for line in lines if " ffn down " in line)
        assert lines[-1].startswith("and ") and "more as they should be" in lines[-1]
        everything = check(model, "huggingface").table(everything=True)
        assert "attn norm gain" in everything and "ffn skip" in everything

    def test_stacks_are_named_where_there_are_two(self) -> None:
        text = str(check(family("t5"), "huggingface"))
        assert "encoder 0-1  attn query" in text and "decoder 0-2  cross value" in text
        assert text.splitlines()[0].startswith("T5ForConditionalGeneration carries scheme 'huggingface'")


def test_what_no_scheme_speaks_of_has_to_be_finite() -> None:
    """Rates of a recurrence that were drawn from 0 on in half precision: the logarithm of 0 (transformers 47831)."""
    model: Any = fresh("llama")
    mixer = model.model.layers[1].self_attn.mixer = nn.Module()
    mixer.A_log = nn.Parameter(torch.zeros(4))
    before = check(model, "huggingface").wrong
    with torch.no_grad():
        mixer.A_log[3] = -math.inf
    (row,) = [row for row in check(model, "huggingface").wrong if row not in before]
    assert (row.layer, row.name, row.path) == (1, "A_log", "model.layers.1.self_attn.mixer.A_log")
    assert row.note == "NaN or infinite numbers"


def test_the_power_is_what_the_standard_errors_say() -> None:
    """A map of 64 x 64: 1.1 % standard error, and some 4.7 of them; 7 % is found, and 2 % not."""
    a = Architecture(kind="encoder", n_layers=2, d_model=64, n_heads=4, vocab_size=90, seq_len=16)
    table: Parametrization = scheme("xavier")(a)
    assert check(build(table, seed=0), table).deviations == pytest.approx(4.7, abs=0.2)
    for factor, ok in ((1.02, True), (1.08, False), (0.98, True), (0.92, False)):
        shifted = table.with_columns(weight__query=factor * table.weights["query"])
        assert check(build(shifted, seed=0), table).ok is ok


def test_false_alarms_of_whole_models_are_rare() -> None:
    """60 right models of 21 drawn weights each: none fails (in 166 repetitions one would)."""
    a = Architecture(kind="encoder", n_layers=3, d_model=16, n_heads=2, vocab_size=20, seq_len=8)
    for kind in SHAPES:
        table = replace(scheme("xavier")(a), distribution=dict.fromkeys(ROLES, kind))
        assert all(np.isfinite(table.weights[role][role_mask(a, role)]).all() for role in ROLES)
        assert sum(not check(build(table, seed=seed), table).ok for seed in range(8)) == 0
