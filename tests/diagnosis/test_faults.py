"""Faults that are put into a model are found, and the verdict names the layer and the likely cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import own_model
import signalprop as sp
from choice import some
from diagnosing import UNTRAINED, diagnosed, findings, mapping_of, tiny, weights_of
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.diagnosis.result import Diagnosis
from signalprop.diagnosis.run import diagnose
from signalprop.network.layout import ROLES
from signalprop.results.findings import Finding

N, SICK = 4, 2


def model_of(family: str, **changes: Any) -> Any:
    """A healthy model: four layers whose branches are small against the stream, so that tokens stay apart."""
    return tiny(family, N, initializer_range=0.1, **changes)


def scaled(model: nn.Module, factor: float, roles: tuple[str, ...] = ROLES, layer: int = SICK) -> None:
    with torch.no_grad():
        for weight, rows in weights_of(model, layer, roles):
            weight[rows] *= factor


def fault(found: Diagnosis) -> Finding:
    """The only fault; it comes first."""
    (verdict,) = [v for v in found.findings if v.severity == "fault" and v.name not in UNTRAINED]
    assert next(v for v in found.findings if v.name not in UNTRAINED) == verdict
    return verdict


@pytest.mark.parametrize("family", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "bert"))])
class TestOneLayer:
    def test_a_clean_model_has_none(self, family: str) -> None:
        assert findings(diagnosed(model_of(family)), "fault", "warning") == []

    def test_weights_times_8(self, family: str) -> None:
        model = model_of(family)
        scaled(model, 8.0)
        verdict = fault(diagnosed(model))
        assert (verdict.name, verdict.layers) == ("scaled weights", (SICK,))
        ratios = [float(part.split()[-1]) for part in verdict.text.split(": ", 1)[1].split(":")[1].split(",")]
        assert len(ratios) == (7 if family == "llama" else 6)
        assert all(6.5 < ratio < 9.5 for ratio in ratios), verdict.text
        assert "scaled" in verdict.cause

    def test_weights_of_0(self, family: str) -> None:
        model = model_of(family)
        scaled(model, 0.0)
        verdict = fault(diagnosed(model))
        assert (verdict.name, verdict.layers) == ("zero weights", (SICK,))
        assert "query, key, value, output" in verdict.text
        assert "never loaded" in verdict.cause

    @pytest.mark.parametrize("role", ["value", "output"])
    def test_a_dead_head(self, family: str, role: str) -> None:
        """Its values are 0 (weights and bias), or nobody reads them."""
        model = model_of(family)
        d_head, head = 8, 3
        share = slice(8, 16) if family == "llama" and role == "value" else slice(d_head * head, d_head * head + d_head)
        dead = (2, 3) if family == "llama" and role == "value" else (head,)  # two query heads share a value head
        with torch.no_grad():
            ((weight, rows),) = weights_of(model, SICK, (role,))
            if role == "output":
                weight[:, share] = 0
            else:
                weight[rows][share] = 0
                for name, bias in model.named_parameters():
                    if f".{SICK}." in name and name.endswith(("c_attn.bias", "value.bias")):
                        bias[-32:][share] = 0
        verdict = fault(diagnosed(model))
        assert (verdict.name, verdict.layers) == ("dead heads", (SICK,))
        assert f"{'heads 2-3' if len(dead) == 2 else 'head 3'} of 4" in verdict.text
        assert "weights of the head are 0" in verdict.cause

    def test_weights_that_are_not_numbers(self, family: str) -> None:
        model = model_of(family)
        with torch.no_grad():
            ((weight, _),) = weights_of(model, SICK, ("down",))
            weight[1, 2] = math.nan
        found = diagnosed(model, remove=True, cast=["bfloat16"])
        verdict = fault(found)
        assert (verdict.name, verdict.layers) == ("not finite", (SICK,))
        assert "holds 1 NaN" in verdict.text and "the first at [" in verdict.text
        assert found.loss is None and found.removal is None and not found.casts
        assert any("no finite loss" in note for note in found.notes)
        assert [s.finite for s in found.signal] == [True] * SICK + [False] * (N - SICK)
        assert Diagnosis.from_json(found.to_json()) == found

    def test_a_layer_that_gives_out_nan_by_itself(self, family: str) -> None:
        model = model_of(family)
        norm: Any = model.get_submodule(mapping_of(model).sublayers[2 * SICK + 1].norm)
        with torch.no_grad():
            norm.weight[0] = math.inf
        verdict = fault(diagnosed(model))
        assert (verdict.name, verdict.layers) == ("not finite", (SICK,))
        assert "holds 1 infinite numbers" in verdict.text and ".weight (parameter)" in verdict.text


class ScaledBlock(own_model.Block):
    """A block whose LayerNorm Scaling is a buffer."""

    def __init__(self, number: int) -> None:
        super().__init__(affine=True)
        self.register_buffer("scale", torch.tensor(number**-0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.scale * self.ln_1(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.scale * self.ln_2(x))))


class ScaledGPT(own_model.OwnGPT):
    """A model with LayerNorm Scaling, which its mapping knows of."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(n_layers)
        self.blocks = nn.ModuleList(ScaledBlock(i + 1) for i in range(n_layers))

    def signalprop_mapping(self) -> Mapping:
        from dataclasses import replace

        mapping = super().signalprop_mapping()
        items = [replace(item, norm_scale=(i // 2 + 1) ** -0.5) for i, item in enumerate(mapping.sublayers)]
        return replace(mapping, sublayers=items, layers=[f"blocks.{i}" for i in range(len(self.blocks))])


def own_batch() -> Batch:
    ids = own_model.own_ids().numpy()
    return Batch(ids, (ids + 1) % own_model.VOCABULARY)


class TestScaleInABuffer:
    def test_a_clean_model_has_none(self) -> None:
        torch.manual_seed(0)
        found = diagnose(ScaledGPT(4).eval(), [own_batch()])
        assert findings(found, "fault", "warning") == []
        for k, signal in enumerate(found.signal):
            assert signal.norm_factor == pytest.approx(((k + 1) ** -0.5,) * 2, rel=1e-5)

    @pytest.mark.parametrize("held", some([0.0, 1.0, 3e-39], (3e-39,)))
    def test_erased_by_to_empty(self, held: float) -> None:
        """Buffers that are not in the state dict hold whatever was in memory; most often 0."""
        torch.manual_seed(0)
        state = ScaledGPT(4).state_dict()
        with torch.device("meta"):
            model = ScaledGPT(4)
        model.to_empty(device="cpu")
        model.load_state_dict(state)  # strict: nothing seems to be missing
        for block in model.blocks:
            block.scale.fill_(held)  # type: ignore[operator]
        verdict = fault(diagnose(model.eval(), [own_batch()]))
        assert verdict.name == "norm output off"
        assert verdict.layers == ((1, 2, 3) if held == 1.0 else (0, 1, 2, 3))
        assert "buffer" in verdict.cause and "to_empty" in verdict.cause


class TestGainOfDeepNorm:
    def test_multiplied_for_divided(self) -> None:
        """The released code that multiplies by (8N)^(1/4) where DeepNet divides by it."""
        model = tiny("bert", N)
        table = sp.apply(model, "deepnorm", redraw=True)
        assert findings(diagnosed(model), "fault", "warning") == []
        for layer in range(N):
            scaled(model, table.architecture.n_layers**0.5 * 8**0.5, ("value", "output", "up", "down"), layer)
        verdict = fault(diagnosed(model))
        assert verdict.name == "deepnorm gain" and verdict.layers == tuple(range(N))
        assert "(8N)^(1/4) = 2.38" in verdict.text and "multiplied instead of divided" in verdict.cause


class TestLayerNormScaling:
    @pytest.mark.parametrize("family", some(["gpt2", "llama"], ("llama",)))
    def test_not_in_effect(self, family: str) -> None:
        verdict = fault(diagnosed(model_of(family), expected="lns"))
        assert verdict.name == "layernorm scaling not in effect"
        assert verdict.layers == tuple(range(1, N))  # the first factor is 1
        assert "the factor at layer 3 is 1, LayerNorm Scaling makes it 0.5" in verdict.text
        assert "switch" in verdict.cause

    @pytest.mark.parametrize(
        ("family", "folded"),
        [
            ("llama", True),
            *(pytest.param("gpt2", folded, marks=pytest.mark.slow) for folded in (False, True)),
        ],
    )
    def test_in_effect(self, family: str, folded: bool) -> None:
        model = model_of(family)
        sp.apply(model, "lns", initialize=False, change_function=True)
        if folded:
            sp.fold(model)
        assert findings(diagnosed(model, expected="lns"), "fault", "warning") == []
