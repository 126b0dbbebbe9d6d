"""Optimizer groups: every parameter once, and the learning rates of muP."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from applied import VOCABULARY, loss_of, vanilla
from signalprop.errors import InputError
from signalprop.hooks import first_tensor
from signalprop.models import build
from signalprop.repair import apply, parameter_groups

IDS = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
SCHEMES = ("deepscalelm", "layerscale", "stable-resnet", "lns")
FAMILIES = ("bert", "gpt2", "llama")
EVERY_WAY = [(FAMILIES[(i + 1) % 3], scheme) for i, scheme in enumerate(SCHEMES)] + [("bert", "deepnorm")]


def applied_model(
    family: str, scheme: Any, dtype: torch.dtype = torch.float64, *, tied: bool = False, **options: Any
) -> nn.Module:
    model = vanilla(family, 3, tie_word_embeddings=tied).to(dtype)
    apply(model, scheme, seed=3, **options)
    return model.train()


def loss(model: nn.Module) -> Tensor:
    return loss_of(model(input_ids=IDS).logits)  # transformers' own loss is in single precision


def by_name(groups: list[dict[str, Any]], key: str) -> dict[str, float]:
    return {name: group[key] for group in groups for name in group["names"]}


class TestMuon:
    def test_matrices_apart_from_vectors_and_ends(self) -> None:
        model = applied_model("gpt2", "deepscalelm")
        groups = parameter_groups(model, lr=0.02, optimizer="muon", rest_lr=1e-3, eps=1e-9)
        names = by_name(groups, "use_muon")
        assert set(names) == {name for name, p in model.named_parameters()}
        assert all(taken == (".h." in name and "ln" not in name and "weight" in name) for name, taken in names.items())
        assert {g["eps"] for g in groups if not g["use_muon"]} == {1e-9}
        parts = [[g for g in groups if g["use_muon"] is wanted] for wanted in (True, False)]
        before = loss(model)
        steppers = [torch.optim.Muon(parts[0]), torch.optim.AdamW(parts[1])]
        for _ in range(5):
            model.zero_grad()
            loss(model).backward()
            for stepper in steppers:
                stepper.step()
        assert loss(model) < before

    @pytest.mark.parametrize(("adjustment", "power"), [("original", 0.0), ("match_rms_adamw", -0.5)])
    def test_factors_of_width_and_depth(self, adjustment: Any, power: float) -> None:
        model = applied_model("llama", "depth-mup", base_width=4, base_depth=1, alpha=0.5)
        m, deeper = model.config.hidden_size / 4, 3.0
        groups = parameter_groups(model, lr=1.0, optimizer="muon", adjust_lr_fn=adjustment, rest_lr=0.1)
        rates = by_name(groups, "lr")
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            assert rates[f"model.layers.0.{name}.weight"] == pytest.approx(m**power * deeper**-0.5)
        assert rates["model.embed_tokens.weight"] == 0.1
        adam = by_name(parameter_groups(model, lr=0.1), "lr")
        assert {name: rates[name] for name in rates if "norm" in name} == {n: adam[n] for n in adam if "norm" in n}

    def test_completep_scales_the_epsilon_of_adam(self) -> None:
        model = applied_model("llama", "completep", base_width=4, base_depth=1)
        m, deeper = model.config.hidden_size / 4, 3.0
        groups = parameter_groups(model, lr=1.0, eps=1e-8, weight_decay=0.1)
        eps, rates, decay = (by_name(groups, key) for key in ("eps", "lr", "weight_decay"))
        weight, norm = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"
        assert eps[weight] == eps[norm] == pytest.approx(1e-8 / (m * deeper))
        assert eps["model.embed_tokens.weight"] == pytest.approx(1e-8 / m)
        assert (rates[weight], decay[weight]) == pytest.approx((1 / m, 0.1 * m)) and rates[norm] == 1.0

    def test_a_matrix_that_is_stored_the_other_way_round(self) -> None:
        """Muon takes rows for outputs: GPT-2's feed-forward has them in the columns."""
        model = applied_model("gpt2", "deepscalelm")
        rates = by_name(parameter_groups(model, lr=1.0, optimizer="muon"), "lr")
        up, down = (rates[f"transformer.h.0.mlp.{name}.weight"] for name in ("c_fc", "c_proj"))
        inputs, outputs = model.get_parameter("transformer.h.0.mlp.c_fc.weight").shape
        assert (up, down) == pytest.approx(((outputs / inputs) ** 0.5, (inputs / outputs) ** 0.5))


class TestMaximalUpdate:
    """muP at four times the base width (32 to 8): hidden weights learn at a quarter of the rate."""

    HIDDEN: ClassVar = {
        "bert": ("query", "key", "value", "dense"), "gpt2": ("c_attn", "c_proj", "c_fc"),
        "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "t5": ("q", "k", "v", "o", "wi", "wo"), "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h",
                                                          "dense_4h_to_h"),
    }  # fmt: skip

    @pytest.mark.parametrize("family", HIDDEN)
    def test_rates_by_name(self, family: str) -> None:
        model = applied_model(family, "mup", torch.float32, base_width=8)
        rates = by_name(parameter_groups(model, lr=1.0), "lr")
        for name, rate in rates.items():
            module, kind = name.split(".")[-2:]
            hidden = kind == "weight" and module in self.HIDDEN[family]
            assert rate == pytest.approx(0.25 if hidden else 1.0), name
        assert sum(rate < 1 for rate in rates.values()) >= 3 * len(self.HIDDEN[family])

    @pytest.mark.parametrize("tied", [True, False])
    def test_embeddings_and_head(self, tied: bool) -> None:
        """A tied table is the embedding's: read by the head with a factor, learning at the full rate."""
        model = vanilla("gpt2", 3, tie_word_embeddings=tied)
        apply(model, "mup", seed=3, base_width=8)
        names = Counter(name for group in parameter_groups(model, lr=1.0) for name in group["names"])
        assert names["transformer.wte.weight"] == 1
        assert names["lm_head.weight"] == (0 if tied else 1)
        assert model.lm_head.input_scale == pytest.approx(0.25)
        assert by_name(parameter_groups(model, lr=1.0), "lr")["transformer.wte.weight"] == 1.0

    def test_trained_multipliers_learn_as_vectors_do(self) -> None:
        model = applied_model("gpt2", "depth-mup", base="layerscale", base_width=32, base_depth=1)
        built = build(model.signalprop_record.parametrization, seed=0)
        for one in (model, built):
            rates = by_name(parameter_groups(one, lr=1.0), "lr")
            trained = [rate for name, rate in rates.items() if name.endswith("multiplier")]
            assert trained == pytest.approx(6 * [3**-0.5])

    def test_a_fused_map_that_would_need_two_rates_is_refused(self) -> None:
        model = vanilla("gpt2", 3)
        table = apply(vanilla("gpt2", 3), "mup", seed=3, base_width=8)
        apply(model, table.with_columns(learning_rate__query=0.5), seed=3)
        with pytest.raises(InputError, match=r"c_attn\.weight holds query, key, value.*one tensor has one"):
            parameter_groups(model, lr=1.0)

    @pytest.mark.slow
    def test_a_step_moves_the_features_as_far_at_every_width_and_depth(self) -> None:
        """Why the rates are there. microsoft/mup #22, #23: "coord check looks good, transfer fails": by width alone."""

        def change(scheme: str, n_layers: int, width: int = 32) -> float:
            """How far one step of Adam moves the output of the last layer, relative to its size."""
            seen: list[Tensor] = []
            model: Any = vanilla("llama", n_layers, hidden_size=width, intermediate_size=2 * width)
            bases = {"mup": {"base_width": 32}, "depth-mup": {"base_width": 32, "base_depth": 4}}
            apply(model, scheme, seed=3, **bases.get(scheme, {}))
            model.model.layers[-1].register_forward_hook(lambda m, a, out: seen.append(first_tensor(out).detach()))
            stepper = torch.optim.AdamW(parameter_groups(model, lr=0.003))
            loss(model).backward()
            stepper.step()
            loss(model)
            before, after = seen
            return float((after - before).norm() / before.norm())

        one = {scheme: change(scheme, 4) for scheme in ("mup", "depth-mup", "fixed")}
        assert 0.5 < change("mup", 4, 128) / one["mup"] < 1.5  # the check that looks good
        assert change("fixed", 4, 128) / one["fixed"] > 1.5
        deep, both = change("mup", 32) / one["mup"], change("depth-mup", 32) / one["depth-mup"]
        assert deep > 1.3 * both and 0.5 < both < 1.5


class TestEveryParameterOnce:
    @pytest.mark.parametrize(("family", "scheme"), [*EVERY_WAY, ("gpt_neox", "deepscalelm"), ("t5", "layerscale")])
    def test_and_none_that_does_not_train(self, family: str, scheme: str) -> None:
        model = applied_model(family, scheme, torch.float32)
        groups = parameter_groups(model, lr=0.01, weight_decay=0.1)
        listed = Counter(id(q) for group in groups for q in group["params"])
        assert listed == Counter(id(q) for q in model.parameters() if q.requires_grad)
        for group in groups:
            assert all(model.get_parameter(n) is q for n, q in zip(group["names"], group["params"], strict=True))
        decays = by_name(groups, "weight_decay")
        assert {name for name, decay in decays.items() if decay} == {
            name for name, q in model.named_parameters() if q.requires_grad and q.ndim > 1
        }
        torch.optim.AdamW(groups)  # which refuses a parameter that it is given twice

    def test_frozen_parameters_are_left_out(self) -> None:
        model = applied_model("gpt2", "layerscale", torch.float32)
        model.transformer.wte.weight.requires_grad_(False)
        names = [name for group in parameter_groups(model, lr=0.01) for name in group["names"]]
        assert "transformer.wte.weight" not in names
        assert "transformer.h.0.attn.c_proj.multiplier" in names

    def test_bad_input(self) -> None:
        with pytest.raises(InputError, match="carries no scheme"):
            parameter_groups(vanilla("gpt2"), lr=0.01)
        with pytest.raises(InputError, match="expected one of adamw, adam, sgd, muon"):
            parameter_groups(applied_model("gpt2", "lns"), lr=0.01, optimizer="original")  # type: ignore[arg-type]
