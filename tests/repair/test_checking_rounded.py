"""`check` of models whose numbers were rounded to half precision, kept, constant, or not numbers at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.repair.check_result import Check
from signalprop.repair.checks import check
from tiny import llama

transformers = pytest.importorskip("transformers")
HALF = [torch.bfloat16, torch.float16]


def off(found: Check) -> set[str]:
    return {row.name for row in found.wrong}


class TestRounded:
    """LayerScale starts every multiplier at a number that half precision does not have: 0.1 becomes 0.1001."""

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("start", [0.1, 0.3])
    def test_multipliers_in_tensors_may_be_off_by_one_rounding(self, dtype: torch.dtype, start: float) -> None:
        model = llama()
        sp.apply(model, "layerscale", epsilon=start, seed=0)
        model.to(dtype)
        rows = [row for row in check(model, "layerscale", epsilon=start).rows if row.name == "branch"]
        assert {row.verdict for row in rows} == {"ok"} and rows[0].measured != start

    @pytest.mark.parametrize("dtype", HALF)
    def test_and_by_no_more(self, dtype: torch.dtype) -> None:
        model = llama()
        sp.apply(model, "layerscale", epsilon=0.3, seed=0)
        model.to(dtype)
        wanted = 0.3 * (1 + 1.5 * torch.finfo(dtype).eps)  # the neighbour is at least half an epsilon further away
        assert off(check(model, "layerscale", epsilon=wanted)) == {"branch"}

    def test_gains(self) -> None:
        model: Any = llama(dtype="bfloat16")
        sp.apply(model, "xavier", seed=0)
        table = model.signalprop_record.parametrization.with_columns(norm_gain=0.3)
        with torch.no_grad():
            for layer in model.model.layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight.fill_(float(torch.tensor(0.3, dtype=torch.bfloat16)))
        assert off(check(model, table)) == set()
        model.config.dtype = None
        assert off(check(model, table)) == {"norm gain"}  # 0.3008


class TestKept:
    def test_multipliers_alone_are_checked_and_that_is_said(self, tmp_path: Path) -> None:
        model = llama()
        sp.apply(model, "stable-resnet", initialize=False)
        sp.save(model, tmp_path)
        assert json.loads((tmp_path / "signalprop.json").read_text())["weights"] == "kept"
        for each in (model, sp.load(tmp_path)):
            found = check(each, "stable-resnet")
            assert found.ok and not any(row.path for row in found.rows)
            assert any("not the weights, which `apply` kept" in note for note in found.notes)
            assert found.summary().endswith(f"all {len(found.rows)} multipliers are right")
            assert off(check(each, "deepnorm")) >= {"skip", "norm placement"}

    def test_numbers_they_have_to_be(self) -> None:
        model = llama()
        sp.apply(model, "stable-resnet", initialize=False)
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = math.nan
        assert off(check(model, "stable-resnet")) == {"down"}


def test_a_constant_is_called_by_its_number() -> None:
    model: Any = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(0.5)
        model.model.layers[1].mlp.down_proj.weight.zero_()
    notes = {row.layer: row.note for row in check(model, "huggingface").wrong}
    assert notes == {0: "all are 0.5", 1: "zeros"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
def test_weights_that_are_not_numbers_are_not_the_mapping_s_fault(bad: float, name: str) -> None:
    model: Any = llama()
    with torch.no_grad():
        model.get_parameter(name).fill_(bad)
    with pytest.raises(InputError, match=f"^{name} holds NaN or infinite numbers"):
        sp.apply(model, "stable-resnet", initialize=False)
