"""docs/reach.md against docs/reach.json, and what it claims of four models against a run of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.layer_oracle import apart, boundaries
from benchmarks.other_models import OTHERS, other_model
from benchmarks.reach import examined
from benchmarks.reach_page import FILE, PAGE, exact, right, text
from benchmarks.small_models import TooLarge, small_model
from torch import nn

from signalprop.files.storage import read_json, read_text

STORED: dict[str, Any] = read_json(FILE)


def test_the_page_is_made_of_the_file() -> None:
    assert read_text(PAGE) == text(STORED)


def test_the_file_says_what_the_project_promises() -> None:
    types = [record for name, record in STORED["models"].items() if name not in OTHERS]
    assert sum(record["ran"] for record in types) >= 150
    assert sum(map(right, types)) >= 130
    assert sum("stream" in record.get("predicted", {}) for record in types) >= 190
    assert sum("weights" in record.get("initialised", {}) for record in types) >= 180
    assert sum(exact(record, "lns") or exact(record, "layerscale") for record in types) >= 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mixtral", "clip", "one file: parallel"])
def test_a_model_does_again_what_is_stored(name: str) -> None:
    again, stored = examined(name), STORED["models"][name]
    assert right(again) and right(stored)
    assert again["untouched"] and again["measured"]["stacks"] == stored["measured"]["stacks"]
    for scheme in ("lns", "layerscale"):
        assert exact(again, scheme) == exact(stored, scheme)
    assert exact(again, "lns") and again["lns"]["changed"] > 1e-3
    assert again["silenced"]["identity"] == 0


def test_the_hooks_see_the_stream_of_a_model_by_hand() -> None:
    model, inputs = other_model("one file: parallel")
    seen = next(layers for layers in boundaries(model, inputs) if layers.path == "blocks")
    parts: Any = model
    with torch.no_grad():
        x = parts.wte(inputs["idx"]) + parts.wpe(torch.arange(inputs["idx"].shape[1]))
        entering = []
        for block in parts.blocks:
            entering.append(float(x.double().var(correction=0)))
            x = block(x)
    assert apart(seen.entering, entering) < 1e-12
    assert apart(seen.leaving, [*entering[1:], float(x.double().var(correction=0))]) < 1e-12
    assert len(seen.gradients) == 3 and min(seen.gradients) > 0


def test_a_large_model_is_refused_before_it_is_made() -> None:
    def large(_: Any) -> nn.Module:
        return nn.Linear(5000, 5000)

    large.__name__ = "Large"
    with pytest.raises(TooLarge, match="25M parameters"):
        small_model(large, None)
