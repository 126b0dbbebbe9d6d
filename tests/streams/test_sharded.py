"""Models that are sharded over processes (FSDP2)."""

from __future__ import annotations

from pathlib import Path

import pytest

import processes

SCRIPT = Path(__file__).parents[1] / "sharded.py"


@pytest.mark.slow  # two processes, a quarter of a minute
def test_what_is_said_of_a_model_does_not_depend_on_sharding(tmp_path: Path) -> None:
    processes.run_ranks(str(SCRIPT), tmp_path)
