"""Models that are not of transformers: five refusals, whose remedy in the line, followed word for word, works; a loop.

docs/measuring.md has the same five as a table, and the loop.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.code_bases.parts import LM, D, ids
from benchmarks.code_bases.series import CASES as SERIES
from benchmarks.code_bases.series import TorchEncoder
from benchmarks.code_bases.variations import Bare, BareSeen
from torch import nn

import signalprop as sp


def test_inputs_that_could_not_be_made_up() -> None:
    model, inputs = SERIES["decision transformer"].make(), SERIES["decision transformer"].inputs()
    with pytest.raises(sp.InputError, match=r"^give its inputs, what the model is called with: .* a dictionary"):
        sp.measure(model, backward=False)
    assert sp.measure(model, inputs, backward=False).forward["stream_out"].variance.shape == (8,)


def test_a_loss_that_nobody_said() -> None:
    model, inputs = SERIES["decision transformer"].make(), SERIES["decision transformer"].inputs()
    with pytest.raises(sp.InputError, match=r"give loss=, a function of (its|the model's) output"):
        sp.measure(model, inputs)
    assert sp.measure(model, inputs, loss=lambda out: out[1].square().mean()).gradient is not None


def test_branches_that_no_module_gives() -> None:
    with pytest.raises(sp.InputError, match=r"let it pass through an nn.Identity\(\) of the layer"):
        sp.measure(LM(Bare), ids())
    assert sp.measure(LM(BareSeen), ids()).forward["branch"].variance.shape == (8,)
    (stack,) = sp.anatomy(LM(BareSeen), ids()).stacks
    assert [branch.sort for branch in stack.branches] == ["attention", "feed_forward"] * 4


class Einsums(nn.Module):
    """Its branches are einsums, whose results are views in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Parameter(torch.randn(3, 4, D, D // 4) / 4), nn.Parameter(torch.randn(4, D // 4, D) / 4)
        self.up, self.down = nn.Parameter(torch.randn(4, D, D) / 4), nn.Parameter(torch.randn(4, D, D) / 4)
        self.seen = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("btd,nhde->nbhte", self.norms[0](x), self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.seen[0](torch.einsum("bhte,hed->btd", mixed, self.out))
        inner = torch.einsum("btd,hde->bhte", self.norms[1](x), self.up).relu()
        return x + self.seen[1](torch.einsum("bhte,hed->btd", inner, self.down))


def test_an_identity_after_an_einsum() -> None:
    (stack,) = sp.anatomy(LM(Einsums), ids()).stacks
    assert [branch.sort for branch in stack.branches] == ["attention", "feed_forward"] * 4
    assert all(branch.proved and ".seen." in branch.module for branch in stack.branches)


def test_half_precision() -> None:
    model = LM().bfloat16()
    with pytest.raises(sp.InputError, match=r"so give model.float\(\)"):
        sp.predict(model, ids())
    assert sp.predict(model.float(), ids()).forward["stream_out"].variance.shape == (8,)


def test_pytorchs_fast_path() -> None:
    model: nn.Module = TorchEncoder(True, True)
    try:
        torch.backends.mha.set_fastpath_enabled(True)
        with pytest.raises(sp.InputError, match=r"^call torch.backends.mha.set_fastpath_enabled\(False\) first"):
            sp.apply(model, "xavier", redraw=True, inputs=ids())
        torch.backends.mha.set_fastpath_enabled(False)
        assert sp.apply(model, "xavier", redraw=True, inputs=ids()).architecture.d_model == D
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_loop_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "measuring.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(def watched\(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"sp": sp, "torch": torch}
    exec(code, names)
    monitor = names["watched"](LM(), [ids()] * 3, lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()))
    said = capsys.readouterr().out
    assert "median error" in said  # the start was compared with its prediction
    assert said.count("/variance") == 4 and not monitor.warnings
