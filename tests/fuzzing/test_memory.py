"""What cannot fit into memory is not even tried: the line says how much it needs."""

from __future__ import annotations

import time

import pytest

from damage import check_command, commanded
from signalprop.files.limits import check_fits, memory_limit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["predict", "gpt2", "--fidelity", "kernel", "--seq-len", "1000000"],
            "a token kernel of 1,000,000 tokens needs at least 280,000.0 GB",
        ),
        (["kernel", "gpt2", "--seq-len", "1000000"], "fewer tokens"),
        (["measure", "tgs", "--set", "d_model=1000000", "--layers", "4"], "parameters on 512 tokens needs at least"),
        (["predict", "tgs", "--layers", "100000", "--fidelity", "kernel", "--seq-len", "100000"], "needs at least"),
    ],
)
def test_the_memory_needed_is_stated(arguments: list[str], says: str) -> None:
    begun = time.process_time()
    result = commanded(*arguments)
    check_command(result)
    assert result.status == 2 and says in result.err and "GB of memory; there are" in result.err
    assert time.process_time() - begun < 20


def test_what_fits_is_left_alone() -> None:
    limit = memory_limit()
    assert limit is not None and limit > 10 * 1024**2
    check_fits(limit, "this", "do that")
