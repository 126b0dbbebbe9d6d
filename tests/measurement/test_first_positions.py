"""Where a trained decoder parks activations on its first tokens, these are left out, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from applied import VOCABULARY, vanilla
from signalprop.measurement import measure

IDS = torch.randint(3, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(0))
IDS[:, 0] = 1


@pytest.fixture(scope="module")
def parking() -> nn.Module:
    """A decoder whose first token has a stream thousands of times larger than the others'."""
    model = vanilla("llama", 3).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] *= 300  # type: ignore[operator, union-attr, index]
    return model


def streams(model: nn.Module, first: int) -> list[float]:
    """Variance after every layer, over all positions from `first` on."""
    seen: list[float] = []

    def see(_: nn.Module, __: object, out: Tensor) -> None:
        seen.append(float(out[:, first:].double().var(correction=0)))

    handles = [layer.register_forward_hook(see) for layer in model.model.layers]  # type: ignore[union-attr]
    with torch.no_grad():
        model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    return seen


def test_left_out_and_said_where_they_stand_out(parking: nn.Module) -> None:
    profile = measure(parking, {"input_ids": IDS, "labels": IDS})
    np.testing.assert_allclose(profile.forward["stream_out"].variance[1::2], streams(parking, 4), rtol=1e-5)
    assert "the first 4 positions of every sequence of the decoder are left out: up to" in profile.notes[-1]
    alike = measure(parking, {"input_ids": IDS, "labels": IDS}, skip_first=4)
    for point in profile.forward:
        assert np.array_equal(profile.forward[point].variance, alike.forward[point].variance)
        assert np.array_equal(profile.gradient[point].variance, alike.gradient[point].variance)  # type: ignore[index]


@pytest.mark.parametrize("first", [0, 2])
def test_as_many_as_asked_for(parking: nn.Module, first: int) -> None:
    profile = measure(parking, {"input_ids": IDS}, backward=False, skip_first=first)
    np.testing.assert_allclose(profile.forward["stream_out"].variance[1::2], streams(parking, first), rtol=1e-5)
    assert ("left out" in profile.notes[-1]) == (first > 0)


def test_padding_at_the_start_is_not_the_start(parking: nn.Module) -> None:
    padded = nn.functional.pad(IDS, (3, 0))
    mask = (torch.arange(17) >= 3).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    profile = measure(parking, arguments, backward=False)
    np.testing.assert_allclose(profile.forward["stream_out"].variance[1::2], streams(parking, 4), rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_none_at_random_initialisation(family: str) -> None:
    model = vanilla(family, 2).eval()
    mine, all_of_them = (measure(model, {"input_ids": IDS}, backward=False, skip_first=n) for n in (None, 0))
    assert np.array_equal(mine.forward["branch"].variance, all_of_them.forward["branch"].variance)
    assert mine.notes == all_of_them.notes
