"""docs/fitted.md against docs/fitted.json, and two of its models against a run of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.fitted_models import FILE, PAGE, REACH, SAME, SAME_IN_SINGLE, scanned, text_of

from signalprop.files.storage import read_json, read_text

STORED: dict[str, Any] = read_json(FILE)


def test_the_page_is_made_of_the_file() -> None:
    assert read_text(PAGE) == text_of(STORED)


def test_models_whose_weights_are_known_are_there_and_nothing_overflows_after() -> None:
    known = {name for name, one in read_json(REACH)["models"].items() if "stream" in one.get("predicted", {})}
    assert known <= set(STORED["models"])
    fitted = [one for one in STORED["models"].values() if "error" in one]
    refused = [one for one in STORED["models"].values() if "error" not in one]
    kept = [one for one in refused if "the epsilon of the norms, " in one["reason"]]
    assert len(fitted) >= 248 and len(refused) - len(kept) <= 2 and not any(one["after"] for one in fitted)
    exact = [one for one in fitted if not one["epsilon"]]
    assert len(exact) >= 230 and all(one["error"] <= SAME and one["single"] <= SAME_IN_SINGLE for one in exact)


def test_a_trained_model_is_what_it_was_in_fp16() -> None:
    (gemma,) = STORED["checkpoints"].values()
    half, full = gemma["types"]["float16"], gemma["types"]["float32"]
    assert half["before"]["not_finite"] > 0 and half["before"]["largest"] is None
    assert half["after"]["perplexity"] == pytest.approx(full["before"]["perplexity"], rel=0.01)
    assert full["after"]["perplexity"] == pytest.approx(full["before"]["perplexity"], rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "granite"])
def test_a_model_does_again_what_is_stored(name: str) -> None:
    again, stored = scanned(name), STORED["models"][name]
    assert again["before"] > 0 and not again["after"] and again["error"] <= SAME
    assert again["single"] <= SAME_IN_SINGLE
    assert {key: again[key] for key in ("stream", "inner")} == {key: stored[key] for key in ("stream", "inner")}
