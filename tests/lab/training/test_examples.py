"""Examples in a fixed order, and in padded batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop_lab.training.examples import IGNORED, Example, Ordered, ahead, collate

PADS = {"tokens": 9, "keep": 0, "labels": IGNORED}


class Numbers:
    """The i-th example holds i, and a number drawn for it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def example(self, i: int, rng: np.random.Generator) -> Example:
        return {"tokens": np.array([i, rng.integers(1 << 30)])}


@given(n=st.integers(1, 20), seed=st.integers(0, 5), data=st.data())
def test_the_same_examples_in_whatever_order_they_are_read(n: int, seed: int, data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(range(3 * n)))
    straight, crooked = Ordered(Numbers(n), 3 * n, seed), Ordered(Numbers(n), 3 * n, seed)
    expected = [straight[i]["tokens"].tolist() for i in range(3 * n)]
    found = {i: crooked[i]["tokens"].tolist() for i in wanted}
    assert [found[i] for i in range(3 * n)] == expected
    for turn in range(3):
        assert sorted(x[0] for x in expected[turn * n : (turn + 1) * n]) == list(range(n))


def test_what_comes_next_is_read_while_a_step_is_done() -> None:
    second, ended = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        try:
            for i in range(50):
                if i == 1:
                    second.set()
                yield i
            raise InputError("row 51 is damaged")
        finally:
            ended.set()

    found = ahead(slow(), 3)
    assert next(found) == 0
    assert second.wait(20)  # nobody has asked for it yet
    assert [next(found) for _ in range(49)] == list(range(1, 50))
    with pytest.raises(InputError, match="row 51"):  # in the thread that trains
        next(found)
    ended.clear()
    stopped = ahead(slow(), 3)
    next(stopped)
    stopped.close()  # a run that ends before its data leaves no thread that reads on
    assert ended.wait(20)
    assert list(ahead(iter(range(2)), 5)) == [0, 1]


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_shorter_ones_are_filled_up_at_the_end(lengths: list[int]) -> None:
    examples = [
        {"tokens": np.arange(n), "keep": np.ones(n, np.bool_), "labels": np.arange(n), "frames": np.ones((n, 2), "f4")}
        for n in lengths
    ]
    batch = collate(examples, PADS)
    for i, n in enumerate(lengths):
        assert batch["tokens"][i].tolist() == [*range(n), *[9] * (max(lengths) - n)]
        assert batch["labels"][i].tolist() == [*range(n), *[-100] * (max(lengths) - n)]
        assert batch["keep"][i].sum() == n
        assert batch["frames"][i].sum() == 2 * n
    assert batch["keep"].dtype == torch.bool and batch["frames"].dtype == torch.float32
