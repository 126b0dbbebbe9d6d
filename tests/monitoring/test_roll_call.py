"""Processes agree whether all of them have a monitor, without waiting for those that do not."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from signalprop.monitoring.roll_call import RollCall

SOON = timedelta(milliseconds=50)


def test_all_or_some_and_every_process_is_told_the_same() -> None:
    store = dist.HashStore()
    both = [RollCall(rank, store, 0) for rank in (0, 1)]
    assert [one.complete([0, 1], SOON) for one in both] == [True, True]

    first = RollCall(0, store, 1)
    assert not first.complete([0, 1], SOON)
    late = RollCall(1, store, 1)
    assert not late.complete([0, 1], SOON)  # it sees both, and the first one has gone on without

    assert RollCall(3, store, 2).complete([3], SOON)  # a group of its own
    assert RollCall(0, None, 0).complete([0, 1], SOON)  # one process
