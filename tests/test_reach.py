"""records/reach.json: its counts, and what it claims of four models against a run of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.other_models import OTHERS
from benchmarks.reach import examined
from benchmarks.reach_counts import FILE, exact, right

from signalprop.files.storage import read_json

STORED: dict[str, Any] = read_json(FILE)


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
