"""Two processes (gloo): data-parallel and sharded training of applied models is that of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import two_processes
from applied import vanilla
from processes import run_ranks
from signalprop.repair import parameter_groups
from two_processes import CASES, IDS, make, step

if not torch.distributed.is_available() or not hasattr(torch.cpu.Stream, "record_event"):
    pytest.skip("this PyTorch cannot shard on the CPU", allow_module_level=True)

every_case = pytest.mark.parametrize(("family", "scheme"), CASES)
pytestmark = pytest.mark.slow  # two processes, a minute; training in two processes is tested in every run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(two_processes.__file__, folder)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def alone(family: str, scheme: str) -> nn.Module:
    """The same model in this process."""
    return make(family, scheme)


@every_case
@pytest.mark.parametrize("route", ["ddp", "fsdp", "meta"])
def test_loss_and_gradients(results: dict[str, Any], alone: nn.Module, family: str, scheme: str, route: str) -> None:
    assert results[f"{family} {scheme}"][route] == pytest.approx(step(alone, IDS), rel=1e-5)


@every_case
def test_parameter_groups_know_sharded_parameters_by_name(
    results: dict[str, Any], alone: nn.Module, family: str, scheme: str
) -> None:
    found = results[f"{family} {scheme}"]
    groups = parameter_groups(alone, lr=0.01, weight_decay=0.1)
    assert found["names"] == sorted(name for group in groups for name in group["names"])
    step(alone, IDS)
    torch.optim.AdamW(groups, lr=0.01).step()
    assert found["second"] == pytest.approx(step(alone, IDS)[0], rel=1e-5)


def test_a_monitor_reads_sharded_parameters_for_its_bands(results: dict[str, Any]) -> None:
    alone = two_processes.monitored(vanilla("llama", 2))
    assert alone["bands"] > 0 and alone["signal/outside"] == 0
    shared = {name: alone[name] for name in results["monitor"]}
    assert results["monitor"] == pytest.approx(shared, rel=1e-5)
    attention = ("attention_entropy", "largest_score", "largest_score_head", "score_std", "update")
    assert all(name.endswith(attention) for name in {*alone} - {*shared})  # which no process holds whole


@every_case
def test_sharded_empty_memory_is_filled_with_the_same_weights(
    results: dict[str, Any], family: str, scheme: str
) -> None:
    """Bit for bit: every process draws the whole tensor from its seed and keeps its part."""
    assert results[f"{family} {scheme}"]["same"]


@every_case
def test_a_sharded_model_needs_a_seed(results: dict[str, Any], family: str, scheme: str) -> None:
    assert "give a seed" in results[f"{family} {scheme}"]["refusal"]
