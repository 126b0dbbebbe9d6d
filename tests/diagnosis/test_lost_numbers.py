"""What a loader or a converter left out: gains, biases, scales; labels, new rows, padding, calls that differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagnosing import text_batch, tiny
from signalprop.attachment.anatomy import attach
from signalprop.diagnosis.ends import ends_of
from signalprop.diagnosis.lost_numbers import lost_numbers
from signalprop.diagnosis.not_finite import layer_paths, why_not_finite
from signalprop.diagnosis.parts import parts_of
from signalprop.diagnosis.wiring import wiring_of
from signalprop.results.findings import Finding


def each(model: Any, word: str, change: Callable[[Tensor], object]) -> None:
    found = [p for name, p in model.named_parameters() if word in name]
    assert found
    with torch.no_grad():
        for p in found:
            change(p)


def in_eight_bits(p: Tensor) -> object:
    return p.copy_((p * 448 / p.abs().max()).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("family", "word", "change", "name", "says"),
    [
        (
            "gemma3",
            "q_norm",
            lambda p: p.fill_(0.5),
            "norm gains not loaded",
            "self_attn.q_norm are all 0.5, while those",
        ),
        (
            "llama",
            "layernorm",
            lambda p: p.fill_(1.0),
            "norm gains not loaded",
            "model.layers.*.input_layernorm, model",
        ),
        ("gpt2", "ln_2.bias", lambda p: p.zero_(), "biases of zeros", "transformer.h.*.ln_2 are 0 in every layer"),
        ("gpt2", "c_attn.bias", lambda p: p.zero_(), "biases of zeros", "queries and values are 0"),
        ("llama", "proj", lambda p: p.mul_(200).round_(), "scales lost", "hold whole numbers up to"),
        (
            "llama",
            "proj",
            in_eight_bits,
            "scales lost",
            "whose largest is 448 in 28 of 28",
        ),
    ],
)
def test_what_was_left_out(family: str, word: str, change: Callable[[Tensor], object], name: str, says: str) -> None:
    model = tiny(family)
    assert not list(lost_numbers(attach(model)))
    each(model, word, change)
    (found,) = lost_numbers(attach(model))
    assert found.name == name and says in found.text


def test_final_norm_alone_and_one_layer_alone_are_no_matter_of_kinds() -> None:
    model = tiny("llama")
    each(model, "model.norm", lambda p: p.fill_(1.0))
    each(model, "layers.1.input_layernorm", lambda p: p.fill_(1.0))
    assert not list(lost_numbers(attach(model)))


def test_feed_forwards_of_which_no_unit_is_alive() -> None:
    model = tiny("opt")
    batch = text_batch(model)
    assert not [one for one in parts_of(attach(model), batch) if one.name == "dead units"]
    each(model, "layers.2.fc1.bias", lambda p: p.fill_(-30.0))
    (found,) = [one for one in parts_of(attach(model), batch) if one.name == "dead units"]
    assert found.layers == (2,)


def test_the_loss_of_the_word_itself_and_of_the_one_after_the_next() -> None:
    """Logits that say the token `ahead` places on: that loss alone is small."""
    model = tiny("llama", tie_word_embeddings=False)
    batch = text_batch(model, length=30)
    ids = torch.as_tensor(batch.tokens)
    for ahead, small in ((0, 0), (2, 1)):
        said = F.one_hot(ids.roll(-ahead, 1), model.config.vocab_size) * 20.0
        hook = model.lm_head.register_forward_hook(lambda *_, said=said: said)
        found = ends_of(attach(model), batch)
        hook.remove()
        assert found is not None and len(found.other_losses) == 2
        assert found.other_losses[small] < 0.1 < 5 < found.other_losses[1 - small]


def test_new_rows_that_take_the_answers() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    batch = text_batch(model)
    found = ends_of(attach(model), batch)
    assert found is not None and not found.outlying
    each(model, "lm_head", lambda p: p[-5:].mul_(8.0))
    found = ends_of(attach(model), batch)
    assert found is not None
    (row,) = found.outlying
    assert row.table == "head" and row.row >= 92 and row.losses[0] > row.losses[1] + 0.3


class Reader(nn.Module):
    """Words of a table, mixed with the mean of all that are read; dropout that stays on."""

    def __init__(self, mixes: bool, drops: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)
        self.mixes, self.drops = mixes, drops

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + x.mean(1, keepdim=True) if self.mixes else x
        return self.head(F.dropout(x, 0.5) if self.drops else x)


@pytest.mark.parametrize(
    ("mixes", "drops", "names"),
    [(False, False, []), (True, False, ["padding is read"]), (True, True, ["differs between calls"])],
)
def test_padding_and_calls_that_differ(mixes: bool, drops: bool, names: list[str]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (1, 12))
    found = wiring_of(Reader(mixes, drops).eval(), {"ids": ids}, own=False, causal=False)
    assert [one.name for one in found] == names


# --- activations that are not finite while parameters are: the operation, its layer, the cause that was tested


class Layer(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.map, self.norm = fault, nn.Linear(8, 8), nn.LayerNorm(8, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "mask":
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0)
            scores = (x @ x.transpose(-1, -2)).masked_fill(hidden, -math.inf)
            return x + scores.softmax(-1) @ x
        if self.fault == "range":
            return x + self.map(x * 1e3) * 1e3
        if self.fault == "norm":
            return x + self.norm(x - x)
        if self.fault == "division":
            return x + x / (x.detach() * 0).abs().sum()
        if self.fault == "logarithm":
            return x + torch.asin(x.abs() + 2)
        return x + self.map(x)


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fault if i == 2 else "") for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def found(fault: str) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    model: Any = Model(fault).to(torch.float16 if fault == "range" else torch.float32)
    x = torch.randn(2, 5, 8).to(next(model.parameters()).dtype)
    return why_not_finite(model, [{"x": x}], layer_paths(model, model.layers))


@pytest.mark.parametrize(
    ("fault", "says", "ruled"),
    [
        ("mask", "in softmax in layers.2: a row of the mask allows no key", 1),
        ("range", "float16 ends at 65504", 2),
        ("norm", "in layer_norm in layers.2.norm: all features of a token are equal", 3),
        ("division", "it divides by 0", 3),
        ("logarithm", "in asin in layers.2: none of the causes", 4),
    ],
)
def test_the_first_operation_and_its_cause(fault: str, says: str, ruled: int) -> None:
    (one,) = found(fault)
    assert one.layers == (2,) and says in one.text, one.text
    assert one.cause.startswith("tested") and one.cause.count(", ") - one.cause.count(", which") == ruled - 1


def test_nothing_where_all_is_finite() -> None:
    assert found("") == ()
