"""What records/code-bases.json claims of some models, against a run of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.code_bases.__main__ import CASES
from benchmarks.code_bases.page import FILE
from benchmarks.code_bases.verbs import ACTIONS, VERBS, examined

import signalprop as sp
from signalprop.files.storage import read_json

WORKS = [
    ("nanochat, plain", "check"),  # norms that are functions: of the stream, of the embedding, of queries and keys
    ("nanochat, plain", "anatomy"),
    ("Megatron-core", "measure"),  # (output, bias), tokens first
    ("attentions and feed-forwards in two lists", "check"),
    ("one block in a loop (ALBERT)", "Probe"),
    ("one block in a loop, with times (universal transformer)", "SignalMonitor"),
    ("LayerScale, a module", "check"),
    ("ReZero", "fold"),
    ("nanoGPT, (ids, targets)", "diagnose"),  # a loss that ignores -100, not -1
    ("nanoGPT, ids alone", "diagnose"),  # logits of the last position
    ("gives the loss alone", "diagnose"),
    ("double precision", "diagnose"),
    ("U-Net skips with scalars", "measure"),
    ("torch encoder, batch_first=False, norm_first=True", "measure"),
]
REFUSED = [
    ("hyper-connections", "predict", "blocks.1: what enters comes from what left blocks.0 by more than sums"),
    ("x0 with scalars", "apply", "blocks.1: what enters is 1 x what left blocks.0"),
    ("one block in a loop (ALBERT)", "predict", "serves several layers"),
    ("decision transformer", "diagnose", "does not begin with a sum of tables"),
]


@pytest.mark.parametrize(("name", "verb"), WORKS)
def test_what_works(name: str, verb: str) -> None:
    assert ACTIONS[verb](CASES[name])["how"] == "works"


@pytest.mark.parametrize(("name", "verb", "why"), REFUSED)
def test_what_is_refused(name: str, verb: str, why: str) -> None:
    with pytest.raises(sp.InputError, match=why.replace("(", r"\(")):
        ACTIONS[verb](CASES[name])


def stored() -> dict[str, Any]:
    return read_json(FILE)["models"]


def test_the_record_is_whole() -> None:
    ran = [record for record in stored().values() if record["ran"]]
    assert list(stored()) == list(CASES)
    assert not [one for one in ran if any(one[verb]["how"] in ("raw", "wrong") for verb in VERBS)]
    assert sum(all(one[v]["how"] == "works" for v in ("measure", "Probe", "SignalMonitor")) for one in ran) >= 60
    assert sum(one["predict"]["how"] == "works" for one in ran) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_again(name: str) -> None:
    record, was = examined(CASES[name]), stored()[name]
    if record["ran"]:
        assert {verb: record[verb]["how"] for verb in VERBS} == {verb: was[verb]["how"] for verb in VERBS}
