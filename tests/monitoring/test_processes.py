"""Every process of a run has to make the monitor, and one that has not is named within seconds."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from signalprop.errors import InputError
from signalprop.monitoring.processes import EveryRank

SOON = timedelta(milliseconds=50)


def test_all_have_it_or_those_that_do_not_are_named() -> None:
    store = dist.HashStore()
    for one in [EveryRank(rank, 2, store, 0) for rank in (0, 1)]:
        one.check(SOON)

    first = EveryRank(0, 3, store, 1)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"no SignalMonitor in process 1, 2 of 3 after 0\.05 s; make one in every"):
        first.check(SOON)
    assert time.monotonic() - begun < 2
    first.check(SOON)  # the steps that follow do not wait again

    EveryRank(0, 1, None, 0).check(SOON)  # one process
