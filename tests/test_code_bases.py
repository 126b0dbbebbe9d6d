"""What records/code-bases.json claims of models that are not of transformers, and some of them again."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.code_bases.__main__ import CASES
from benchmarks.code_bases.page import FILE
from benchmarks.code_bases.verbs import ACTIONS, VERBS, examined

import signalprop as sp
from signalprop.files.storage import read_json

pytestmark = pytest.mark.filterwarnings("ignore:.(is_gradient_checkpointing|past_key_values):FutureWarning")  # of peft

WORKS = [
    ("nanochat, plain", "check"),  # norms that are functions: of the stream, of the embedding, of queries and keys
    ("nanochat, plain", "anatomy"),
    ("nanochat, x0 lambdas .1", "check"),
    ("modded-nanogpt, with nn.Identity", "predict"),
    ("U-Net skips with scalars", "apply"),
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
    ("decision transformer", "diagnose"),  # of its stream alone
    ("U-Net skips with scalars", "measure"),
    ("torch encoder, batch_first=False, norm_first=True", "measure"),
    ("prefix tuning (PEFT)", "measure"),
]
REFUSED = [
    ("hyper-connections", "predict", "blocks.1: what enters comes from what left blocks.0 by more than sums"),
    ("U-ViT", "predict", "neither"),
    ("DenseFormer", "predict", "final: what it reads is 1 x what left blocks.3"),
    ("one block in a loop (ALBERT)", "predict", "serves several layers"),
    ("prefix tuning (PEFT)", "predict", "only the stream is known: base_model.transformer.h.0 attention"),
]


@pytest.mark.parametrize(("name", "verb"), WORKS)
def test_what_works(name: str, verb: str) -> None:
    assert ACTIONS[verb](CASES[name])["how"] == "works"


@pytest.mark.parametrize(("name", "verb", "why"), REFUSED)
def test_what_is_refused(name: str, verb: str, why: str) -> None:
    with pytest.raises(sp.InputError, match=why.replace("(", r"\(")):
        ACTIONS[verb](CASES[name])


STORED: dict[str, Any] = read_json(FILE)["models"]


def test_the_record() -> None:
    ran = {name: record for name, record in STORED.items() if record["ran"]}
    assert set(STORED) <= set(CASES)
    assert not [n for n, record in ran.items() if any(record[verb]["how"] in ("raw", "wrong") for verb in VERBS)]
    watched = [n for n, r in ran.items() if all(r[v]["how"] == "works" for v in ("measure", "Probe", "SignalMonitor"))]
    assert len(watched) >= 30
    assert sum(record["predict"]["how"] == "works" for record in ran.values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_every_model_again(name: str) -> None:
    record, was = examined(CASES[name]), STORED[name]
    if record["ran"]:
        assert {verb: record[verb]["how"] for verb in VERBS} == {verb: was[verb]["how"] for verb in VERBS}
