"""What records/reach.json claims of four models, against a run of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.reach import examined
from benchmarks.reach_counts import CORRELATED, FILE, exact, right

from signalprop.files.storage import read_json

STORED: dict[str, Any] = read_json(FILE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["llama", "mixtral", pytest.param("clip", marks=pytest.mark.slow), "one file: parallel"]
)
def test_a_model_does_again_what_is_stored(name: str) -> None:
    again, stored = examined(name), STORED["models"][name]
    assert right(again) and right(stored)
    assert again["measured"]["correlation"] <= CORRELATED
    assert again["untouched"] and again["measured"]["stacks"] == stored["measured"]["stacks"]
    for scheme in ("lns", "layerscale"):
        assert exact(again, scheme) == exact(stored, scheme)
    assert exact(again, "lns") and again["lns"]["changed"] > 1e-3
    assert again["silenced"]["identity"] == 0
