"""The same numbers again: in other processes, with other hash seeds, at other numbers of threads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# By how much numbers of networks may differ between one thread and several: relative, or of numbers of order 1.
# Sums are split differently, in float32; tests/README.md.
TOLERANCE = 1e-5


def numbers(threads: int, hash_seed: int, networks: bool = False, folder: Path = TESTS) -> dict[str, Any]:
    """What tests/numbers_of_a_process.py prints in a new process."""
    environment = os.environ | dict.fromkeys(THREADS, str(threads))
    environment |= {
        "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }  # fmt: skip
    command = [sys.executable, str(TESTS / "numbers_of_a_process.py"), str(threads if networks else 0), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_predictions_are_the_same_to_the_bit_in_every_process() -> None:
    first = numbers(threads=1, hash_seed=0)
    assert first == numbers(threads=2, hash_seed=12345)


def pairs(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of two JSON documents of one shape."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            yield from pairs(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from pairs(left, right, f"{where}/{i}")
    else:
        yield where, one, other


@pytest.mark.slow
def test_networks_in_other_processes_and_at_other_numbers_of_threads(tmp_path: Path) -> None:
    """Bit by bit at one number of threads; within rounding of float32 sums at another."""
    found = []
    for k, (threads, hash_seed) in enumerate(((1, 0), (1, 12345), (2, 0))):
        folder = tmp_path / str(k)
        folder.mkdir()
        found.append(numbers(threads, hash_seed, networks=True, folder=folder))
    for name in found[0]:
        unequal = [(where, a, b) for where, a, b in pairs(found[0][name], found[1][name]) if a != b]
        assert not [item for item in unequal if isinstance(item[1], float)], (name, unequal[:5])
    for name in found[0]:
        for where, one, other in pairs(found[0][name], found[2][name]):
            if isinstance(one, float) and isinstance(other, float):
                assert math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, where, one, other)
