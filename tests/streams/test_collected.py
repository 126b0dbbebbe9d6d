"""Equal terms of a sum are one: x + (x + f) is 2 * x + f, in every spelling; what is said grows with the layers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp

# how a block adds what it makes, and the factor on the stream
SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "x + (x + f)": (lambda x, f: x + (x + f), "2 * stream + feed-forward   [proved]"),
    "(x + f) + x": (lambda x, f: (x + f) + x, "2 * stream + feed-forward   [proved]"),
    "x + x + f": (lambda x, f: x + x + f, "2 * stream + feed-forward   [proved]"),
    "f + x + x / 2": (lambda x, f: f + x + x / 2, "1.5 * stream + feed-forward   [proved]"),
    "x + (f + (x + x / 2))": (lambda x, f: x + (f + (x + x / 2)), "2.5 * stream + feed-forward   [proved]"),
    "(x + x) / 2 + f": (lambda x, f: (x + x) / 2 + f, "stream + feed-forward   [proved]"),
    "x + (x + 3 * f)": (lambda x, f: x + (x + 3 * f), "2 * stream + 3 * feed-forward   [proved]"),
}


class Block(nn.Module):
    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.ff = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.ff(self.norm(x)))


class Model(nn.Module):
    def __init__(self, layers: int, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Block(add) for _ in range(layers))
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("name", SUMS)
def test_the_stream_is_one_term(name: str) -> None:
    add, line = SUMS[name]
    found = str(sp.anatomy(Model(4, add)))
    assert f"\n    {line}\n" in found and "layers 0-3\n" in found and "proved              4 of 4 sums" in found


@pytest.mark.parametrize("name", ["x + (x + f)", "(x + f) + x"])
def test_it_grows_with_the_layers(name: str) -> None:
    sizes = [len(json.dumps(sp.anatomy(Model(n, SUMS[name][0])).to_json())) for n in (8, 16, 32)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)  # 8 layers' worth, then 16


def test_a_stream_of_an_earlier_place_is_said() -> None:
    """What a layer read is added again after its second branch: that sum is not of the stream before it alone."""

    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.ff(self.norm(x))
            return y + self.ff(self.norm(y)) + x

    model = Model(4, torch.add)
    model.layers = nn.ModuleList(Twice(torch.add) for _ in range(4))
    found = str(sp.anatomy(model))
    assert "\n    stream + feed-forward   [proved]\n" in found
    assert found.count("[not proved: it is the stream of an earlier place]") == 1  # all layers are alike
