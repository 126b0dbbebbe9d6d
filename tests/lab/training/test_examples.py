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
from signalprop_lab.training.examples import IGNORED, Example, Ordered, Streamed, ahead, as_batch, collate
from signalprop_lab.training.position import Position

PADS = {"tokens": 9, "keep": 0, "labels": IGNORED}


class Numbers:
    """The i-th example holds i, and a number drawn for it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def example(self, i: int, rng: np.random.Generator) -> Example:
        return {"tokens": np.array([i, rng.integers(1 << 30)])}


class Counting:
    """A stream of three."""

    def examples(self, seed: int, position: Position | None = None) -> Iterator[Example]:
        return iter([{"tokens": np.array([seed, i])} for i in range(3)])


class Empty:
    def examples(self, seed: int, position: Position | None = None) -> Iterator[Example]:
        return iter(())


@given(n=st.integers(1, 20), seed=st.integers(0, 5), data=st.data())
def test_the_same_examples_in_whatever_order_they_are_read(n: int, seed: int, data: st.DataObject) -> None:
    wanted = data.draw(st.permutations(range(3 * n)))
    straight, crooked = Ordered(Numbers(n), 3 * n, seed), Ordered(Numbers(n), 3 * n, seed)
    expected = [straight[i]["tokens"].tolist() for i in range(3 * n)]
    found = {i: crooked[i]["tokens"].tolist() for i in wanted}
    assert [found[i] for i in range(3 * n)] == expected
    for turn in range(3):
        assert sorted(x[0] for x in expected[turn * n : (turn + 1) * n]) == list(range(n))


def test_another_seed_is_another_order() -> None:
    orders = [[int(Ordered(Numbers(50), 100, seed)[i]["tokens"][0]) for i in range(100)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert orders[0][:50] != orders[0][50:]


def test_streams_begin_anew_and_empty_ones_end() -> None:
    assert [x["tokens"].tolist() for x in Streamed(Counting(), 5, 7)] == [[7, 0], [7, 1], [7, 2], [10, 0], [10, 1]]
    assert list(Streamed(Empty(), 5, 7)) == []


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


def test_one_label_per_example() -> None:
    batch = collate([{"tokens": np.arange(n), "labels": np.array(n)} for n in (1, 3)], PADS)
    assert batch["labels"].tolist() == [1, 3]
    assert as_batch(batch).targets.tolist() == [1, 3]


def test_as_batch() -> None:
    batch = as_batch({"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[IGNORED, 2]])}, "here")
    assert batch.targets.tolist() == [[-1, 2]] and batch.source == "here"
    heard = as_batch(
        {"frames": torch.ones(1, 2, 3), "labels": torch.tensor([[1]]), "decoder_tokens": torch.tensor([[0]])}
    )
    assert heard.frames is not None and heard.frames.dtype == np.float64 and heard.tokens is None
    with pytest.raises(KeyError):
        as_batch({"tokens": torch.ones(1, 1)})
