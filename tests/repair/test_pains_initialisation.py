"""Mistakes that were made in public: the broken model fails the check, which names the weight; the right one passes.

The threads are named in each test; the broken line is rebuilt here, not copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from measurement.conftest import MODELS
from signalprop.attachment.attached import attach
from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import Mapping, SublayerMap
from signalprop.cli import run
from signalprop.errors import InputError
from signalprop.models import build
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES, Parametrization, blank, fan, role_mask
from signalprop.repair import apply
from signalprop.repair import initialisation as drawing
from signalprop.repair.check_result import Check
from signalprop.repair.checks import check
from signalprop.repair.goodness_of_fit import sample
from signalprop.repair.sites import confirm
from signalprop.schemes import scheme

transformers = pytest.importorskip("transformers")


def vanilla(name: str, **changes: Any) -> nn.Module:
    """A tiny model as transformers initialises it."""
    torch.manual_seed(0)
    model, config, options = MODELS[name]
    options = {key: value for key, value in options.items() if key != "initializer_range"}
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**options, **changes}))
    return made


def encoder(n_layers: int) -> Architecture:
    """A tiny post-norm encoder."""
    return Architecture(
        kind="encoder", n_layers=n_layers, d_model=32, n_heads=4, vocab_size=60, seq_len=8, norm_placement="post"
    )


def off(found: Check) -> set[tuple[str, str]]:
    """(kind, name) of everything that is wrong."""
    return {(str(row.kind or row.place), row.name) for row in found.wrong}


def paths(found: Check) -> set[str]:
    return {row.path for row in found.wrong}


class TestDepthScaledOutputs:
    """transformers #47458 (GPT-2's c_proj never scaled), #47478 (CLVP): a name test that can no longer match."""

    def test_a_condition_that_never_matches(self) -> None:
        model = vanilla("gpt2", n_layer=12, n_embd=64)
        assert check(model, "gpt2").ok
        with torch.no_grad():
            for block in model.transformer.h:
                for projection in (block.attn.c_proj, block.mlp.c_proj):
                    projection.weight.normal_(0.0, 0.02)
        found = check(model, "gpt2")
        assert off(found) == {("attention", "output"), ("feed_forward", "down")}
        assert paths(found) == {
            f"transformer.h.{i}.{part}.c_proj.weight" for i in range(12) for part in ("attn", "mlp")
        }
        for row in found.wrong:
            assert row.wanted == pytest.approx(0.02 / math.sqrt(24))
            assert row.measured == pytest.approx(0.02, abs=5 * row.standard_error)

    def test_it_stops_a_job(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = vanilla("gpt2", n_layer=4)
        model.save_pretrained(tmp_path / "right")
        with torch.no_grad():
            model.transformer.h[3].mlp.c_proj.weight.normal_(0.0, 0.02)
        model.save_pretrained(tmp_path / "wrong")
        assert run(["check", str(tmp_path / "right"), "--scheme", "gpt2"]) == 0
        assert run(["check", str(tmp_path / "wrong"), "--scheme", "gpt2"]) == 1
        assert "layer 3 feed-forward down (transformer.h.3.mlp.c_proj.weight)" in capsys.readouterr().err


class TestEachParameterOnce:
    """transformers PR #17877: the same tensors initialised 96 times instead of 24, once per module around them."""

    def test_every_role_is_drawn_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: Counter[tuple[str, str]] = Counter()
        real = drawing.draw

        def counting(tensor: Any, std: float, distribution: Any, seed: int, place: str, role: str) -> None:
            drawn[place, role] += 1
            real(tensor, std, distribution, seed, place, role)

        monkeypatch.setattr(drawing, "draw", counting)
        model = vanilla("gpt2", n_layer=6)
        apply(model, "gpt2", seed=0)
        assert set(drawn.values()) == {1}
        weights = {
            (str(2 * layer + (role in ("up", "down"))), role)
            for layer in range(6)
            for role in ("query", "key", "value", "output", "up", "down")
        }
        assert weights <= set(drawn)
        assert check(model, "gpt2").ok

    def test_a_tensor_of_two_layers_counts_twice(self) -> None:
        model = vanilla("gpt2")
        mapping = mapping_of(model)
        items = list(mapping.sublayers)
        items[3] = replace(items[3], weights=items[1].weights)
        found = check(model, "gpt2", mapping=replace(mapping, sublayers=items))
        assert {(row.name, row.verdict) for row in found.wrong if row.layer == 1} == {
            ("up", "twice"), ("down", "twice"), ("up bias", "twice"), ("down bias", "twice"),
        }  # fmt: skip


class TestTheWrongMatrixOfAGatedBlock:
    """torchtitan #3334 (w3 is scaled as well as w2), llama2.c #579 (w3 instead of w2); w1, w3, w2: gate, up, down."""

    @staticmethod
    def model(scaled: tuple[str, ...]) -> nn.Module:
        model = vanilla("llama", num_hidden_layers=8, hidden_size=64)
        with torch.no_grad():
            for layer in model.model.layers:
                for name in (*scaled, "o_proj"):
                    owner = layer.self_attn if name == "o_proj" else layer.mlp
                    getattr(owner, name).weight.mul_(1 / 4)  # 1 / sqrt(2 * 8)
        return model

    def test_w2_is_right(self) -> None:
        assert check(self.model(("down_proj",)), "gpt2").ok

    @pytest.mark.parametrize(
        ("scaled", "named"),
        [
            (("up_proj",), {"up", "down"}),
            (("up_proj", "down_proj"), {"up"}),
            (("gate_proj", "up_proj", "down_proj"), {"gate", "up"}),
        ],
    )
    def test_others_are_not(self, scaled: tuple[str, ...], named: set[str]) -> None:
        found = check(self.model(scaled), "gpt2")
        assert off(found) == {("feed_forward", name) for name in named}
        assert len(found.wrong) == 8 * len(named)

    def test_a_truncation_at_a_hundred_deviations_is_none(self) -> None:
        model = vanilla("llama", hidden_size=64)
        table = scheme("fixed")(mapping_of(model).architecture)
        cut = replace(table, distribution=dict.fromkeys(ROLES, "truncated_normal"))
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.ndim == 2):
                nn.init.trunc_normal_(weight, 0.0, 0.02, -2.0, 2.0)
        found = check(model, cut)
        notes = {row.note for row in found.rows if row.name == "up"}
        assert found.ok and all(note.startswith("like normal numbers, kurtosis") for note in notes)
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.ndim == 2):
                nn.init.trunc_normal_(weight, 0.0, 0.02, -0.04, 0.04)
        found = check(model, cut)  # now it is cut, and its standard deviation is no longer 0.02
        there = {role for role in ROLES if role_mask(table.architecture, role).any()}
        assert {row.name for row in found.wrong} >= there and len(there) == 7
        up = next(row for row in found.wrong if row.name == "up")
        assert up.measured == pytest.approx(0.02 * 0.8796, rel=0.03)


class TestFanIn:
    """tt-metal PR #48716: the down projection drawn for d_model inputs, of which it has 2.75 times as many."""

    @staticmethod
    def table(architecture: Architecture) -> Parametrization:
        std = {f"weight__{role}": fan(architecture, role)[0] ** -0.5 for role in ROLES}
        table = blank(architecture, "fan-in").with_columns(**std)
        return replace(
            table,
            embedding=table.embedding.model_copy(update={"token": 0.02}),
            head=table.head.model_copy(update={"weight": 0.02}),
        )

    def test_fan_in_comes_from_the_tensor(self) -> None:
        model = vanilla("llama", intermediate_size=88)
        table = self.table(mapping_of(model).architecture)
        maps = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.lm_head]
        with torch.no_grad():
            for linear in maps:
                linear.weight.normal_(0.0, linear.in_features**-0.5)
        assert check(model, table).ok
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.normal_(0.0, 32**-0.5)
        found = check(model, table)
        assert off(found) == {("feed_forward", "down")}
        for row in found.wrong:
            assert row.measured is not None and row.wanted is not None
            assert (row.measured / row.wanted) ** 2 == pytest.approx(2.75, rel=0.15)


class TestDeepNorm:
    def test_the_value_inside_of_a_fused_map(self) -> None:
        """xformers #219: queries, keys and values are one matrix, and only outputs and feed-forwards were scaled."""
        model = vanilla("gpt2")
        apply(model, "deepnorm", seed=0)
        assert check(model, "deepnorm").ok
        with torch.no_grad():
            for block in model.transformer.h:
                block.attn.c_attn.weight[:, 64:].normal_(0.0, 32**-0.5)  # Xavier of a square matrix, without beta
        found = check(model, "deepnorm")
        assert off(found) == {("attention", "value")}
        assert paths(found) == {f"transformer.h.{i}.attn.c_attn.weight" for i in range(3)}
        beta = (8 * 3) ** -0.25
        for row in found.wrong:
            assert row.measured is not None and row.wanted is not None
            assert row.measured / row.wanted == pytest.approx(1 / beta, rel=0.1)

    @pytest.mark.parametrize(
        ("draw", "right"),
        [
            (lambda weight, beta: nn.init.xavier_normal_(weight, gain=beta), True),
            (lambda weight, beta: nn.init.xavier_normal_(weight).div_(1 / beta), True),
            (lambda weight, beta: nn.init.xavier_normal_(weight).div_(beta), False),
            (lambda weight, beta: nn.init.xavier_normal_(weight, gain=1 / beta), False),
            (lambda weight, beta: nn.init.xavier_uniform_(weight, gain=beta), True),
        ],
    )
    def test_gain_and_division(self, draw: Callable[[Any, float], Any], right: bool) -> None:
        """torchscale #16: is dividing a Xavier draw the same as a gain? By 1 / beta it is, by beta it is not."""
        model = vanilla("bert")
        apply(model, "deepnorm", seed=0)
        beta = (8 * 3) ** -0.25
        with torch.no_grad():
            for layer in model.bert.encoder.layer:
                draw(layer.output.dense.weight, beta)
        found = check(model, "deepnorm")
        assert found.ok is right
        assert off(found) == (set() if right else {("feed_forward", "down")})
        rows = [row for row in found.rows if row.name == "down"]
        uniform = sample(model.bert.encoder.layer[0].output.dense.weight).kurtosis < 2.2
        assert all(row.note.startswith("like uniform numbers") is uniform for row in rows if right)
        if not right:
            assert rows[0].measured == pytest.approx(rows[0].wanted / beta**2, rel=0.1)

    def test_alpha_on_the_branch(self) -> None:
        """annotated_deep_learning_paper_implementations #145: alpha multiplied the branch instead of the skip."""
        a = Architecture(
            kind="encoder", n_layers=4, d_model=32, n_heads=4, vocab_size=60, seq_len=8, norm_placement="post"
        )
        table = scheme("deepnorm")(a)
        assert check(build(table, seed=0), "deepnorm").ok
        swapped = table.with_columns(skip=1.0, branch=table.skip)
        found = check(build(swapped, seed=0), "deepnorm")
        assert off(found) == {(kind, name) for kind in ("attention", "feed_forward") for name in ("skip", "branch")}

    @pytest.mark.parametrize(
        ("formula", "message"),
        [
            ("norm(alpha * x + f(x))", ""),
            ("norm(x + alpha * f(x))", "layer 0 attention: the stream after it is not skip"),
            ("x + alpha * f(x)", r"layer 0 attention: its norm \(LayerNorm\) never ran"),
        ],
    )
    def test_the_formula_by_its_numbers(self, formula: str, message: str) -> None:
        """The same thread: the norm was made, and never called."""
        model = PostNorm(formula)
        if not message:
            assert confirm(attach(model, model.mapping())) is True
            return
        with pytest.raises(InputError, match=message):
            confirm(attach(model, model.mapping()))

    def test_an_inverted_gain_and_the_alpha_of_another_depth(self) -> None:
        """MixLN at ff45826: its DeepNorm baseline divides by beta, and has the alpha of 32 layers at any depth."""
        a = Architecture(
            kind="encoder", n_layers=12, d_model=32, n_heads=4, vocab_size=60, seq_len=8, norm_placement="post"
        )
        table = scheme("deepnorm")(a)
        beta = (8 * 12) ** -0.25
        scaled = ("value", "output", "up", "down")
        inverted = table.with_columns(**{f"weight__{role}": table.weights[role] / beta**2 for role in scaled})
        found = check(build(inverted, seed=0), "deepnorm")
        assert {row.name for row in found.wrong} == set(scaled)
        ratios = [row.measured / row.wanted for row in found.wrong]  # type: ignore[operator]
        assert sum(ratios) / len(ratios) == pytest.approx(math.sqrt(96), rel=0.02)  # 9.8
        other = table.with_columns(skip=(2 * 32) ** 0.25)
        found = check(build(other, seed=0), "deepnorm")
        assert {row.name for row in found.wrong} == {"skip"} and len(found.wrong) == 24


class TestLayerNormScaling:
    def test_a_switch_that_selects_nothing(self) -> None:
        """LayerNorm-Scaling at 3ac54dd: the value of its switch matches no branch of the code, so nothing is scaled."""
        model = vanilla("llama", num_hidden_layers=4)
        found = check(model, "lns", base="huggingface")
        assert off(found) == {("attention", "norm_scale"), ("feed_forward", "norm_scale")}
        assert {row.layer for row in found.wrong} == {1, 2, 3}  # the first layer's factor is 1
        apply(model, scheme("lns", base="huggingface"), initialize=False)
        assert check(model, "lns", base="huggingface").ok

    @pytest.mark.parametrize("name", ["LNS", "post_pre", "layernorm-scaling"])
    def test_unknown_names_are_errors(self, name: str) -> None:
        with pytest.raises(InputError, match=f"unknown scheme '{name}'; .*known schemes: "):
            check(vanilla("llama"), name)


class PostNorm(nn.Module):
    """Two post-norm sublayers and their formula in words."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.formula, self.alpha = formula, 1.4
        self.table, self.entry, self.head = nn.Embedding(50, 16), nn.Identity(), nn.Linear(16, 50)
        self.up, self.down, self.value, self.output = (
            nn.Linear(16, 24),
            nn.Linear(24, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.after = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.entry(self.table(ids))
        for norm, after, f in zip(
            self.norms,
            self.after,
            (lambda x: self.output(self.value(x).mean(1, keepdim=True).expand_as(x)),
             lambda x: self.down(torch.relu(self.up(x)))),
            strict=True,
        ):  # fmt: skip
            branch = f(x)
            if self.formula == "x + alpha * f(x)":
                x = after(x + self.alpha * branch)
            elif self.formula == "norm(x + alpha * f(x))":
                x = after(norm(x + self.alpha * branch))
            else:
                x = after(norm(self.alpha * x + branch))
        logits: torch.Tensor = self.head(x)
        return logits

    def mapping(self) -> Mapping:
        """What the paper says: post-norm, alpha on the skip."""
        a = Architecture(
            kind="encoder", n_layers=1, d_model=16, n_heads=2, d_ff=24, vocab_size=50, seq_len=9,
            norm_placement="post", positions="none",
        )  # fmt: skip
        rows = [
            SublayerMap(branch="output", norm="norms.0", reads="entry", weights={"value": "value", "output": "output"}),
            SublayerMap(branch="down", norm="norms.1", reads="after.0", weights={"up": "up", "down": "down"}),
        ]
        rows = [replace(row, skip=self.alpha, stream_out=f"after.{i}") for i, row in enumerate(rows)]
        return Mapping(a, rows, arguments=lambda batch: {"ids": torch.as_tensor(batch.tokens)})
