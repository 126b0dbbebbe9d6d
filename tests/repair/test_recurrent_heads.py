"""Heads that A_log and dt_bias leave dead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import signalprop as sp
from diagnosing import tiny
from signalprop.errors import InputError
from signalprop.repair.recurrent_heads import dead_heads


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2, vocab_size=40
    )
    return transformers.Mamba2ForCausalLM(config)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("A_log", -float("inf"), "its rate exp(A_log) is 0"),
        ("A_log", float("nan"), "its decay is NaN"),
        ("A_log", 12.0, "it forgets all at every token"),
        ("A_log", -20.0, "it never forgets"),
        ("dt_bias", -200.0, "its step is 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_planted_dead_head_is_the_only_one(
    model: Any, name: str, value: float, reason: str, dtype: torch.dtype
) -> None:
    held = getattr(model.backbone.layers[1].mixer, name)
    whole = model.to(dtype)
    assert dead_heads(whole) == []
    before = held.detach().clone()
    with torch.no_grad():
        held[2] = value
    try:
        (found,) = dead_heads(whole)
    finally:
        with torch.no_grad():
            held.copy_(before)
    assert (found.path, found.head) == (f"backbone.layers.1.mixer.{name}", 2)
    assert reason in found.reason


def test_draws_from_zero_on_die_in_half_precision() -> None:
    """As in transformers 47831: uniform from 0 to 16, drawn in bfloat16, is 0 every few hundred heads."""
    torch.manual_seed(0)
    mixer = torch.nn.Module()
    mixer.dt_bias = torch.nn.Parameter(torch.ones(20_000))
    for dtype, dead in ((torch.bfloat16, True), (torch.float32, False)):
        mixer.A_log = torch.nn.Parameter(torch.empty(20_000, dtype=dtype).uniform_(0, 16).log())
        assert bool(dead_heads(mixer)) is dead


def test_check_names_layer_and_head() -> None:
    model = tiny("llama", 2, 0)
    mixer = model.model.layers[1].self_attn.mixer = torch.nn.Module()
    mixer.A_log, mixer.dt_bias = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    with torch.no_grad():
        mixer.A_log[3] = -float("inf")
    (row,) = [row for row in sp.check(model, "huggingface").wrong if row.note.startswith("dead")]
    assert (row.layer, row.name, row.path) == (1, "head 3", "model.layers.1.self_attn.mixer.A_log")


def test_check_says_so_where_it_cannot_say_what_the_weights_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].A_log, model[0].dt_bias = (torch.nn.Parameter(torch.full((2,), -200.0)) for _ in range(2))
    with pytest.raises(InputError, match=r"^0\.A_log head 0 is dead: A_log -200: its rate exp\(A_log\) is 0"):
        sp.check(model, "xavier")
