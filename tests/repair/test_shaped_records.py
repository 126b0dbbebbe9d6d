"""Models of transformers with shaped attention: saved and loaded, checked, measured, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import signalprop as sp
from applied import (
    IDS,
    VOCABULARY,
    batch_of,
    close,
    shaped,
    skip_without_interface,
    vanilla,
)
from signalprop import read_parametrization
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.repair.module_swaps import restore
from signalprop.repair.shaped_models import Activating, Shaped
from tiny import CACHE

transformers = pytest.importorskip("transformers")
skip_without_interface("e-spa", whole_module=True)
from transformers import DynamicCache  # noqa: E402

EVERY = [("gpt2", "e-spa", {}), ("llama", "e-spa", {}), ("bert", "u-spa", {}),
         ("gpt2", "value-skipinit", {}), ("vit", "u-spa", {"repeats": 0.1})]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme", "options"), EVERY)
def test_save_and_load(name: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = shaped(name, scheme, **options)
    given = {"pixel_values": torch.ones(1, 3, 16, 16)} if name == "vit" else {"input_ids": IDS}
    expected = model(**given).logits
    with pytest.warns(UserWarning, match="silently leave out"):
        model.save_pretrained(tmp_path)
    again = sp.load(tmp_path)
    assert torch.equal(again.eval()(**given).logits, expected)
    assert again.signalprop_record.parametrization == model.signalprop_record.parametrization
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".pt"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.save(again, tmp_path / "again")
    assert torch.equal(sp.load(tmp_path / "again").eval()(**given).logits, expected)


@pytest.mark.parametrize(("name", "scheme", "options"), EVERY)
def test_check_and_from_model(name: str, scheme: str, options: dict[str, Any]) -> None:
    model = vanilla(name)
    table = sp.apply(model, scheme, seed=0, **options)
    found = sp.check(model, table)
    assert found.ok, found.summary()
    read = read_parametrization(model)
    assert read.shaping == table.shaping
    for column in ("shape_in", "shape_out", "shape_gain"):
        assert np.array_equal(getattr(read, column), getattr(table, column))
    assert read.architecture.activation == table.architecture.activation
    assert not sp.check(vanilla(name), table).ok


def wrong_queries(model: nn.Module) -> str:
    nn.init.normal_(next(m for m in model.modules() if isinstance(m, Shaped)).q_proj.weight, std=0.02)
    return "query"


def wrong_shape(model: nn.Module) -> str:
    attention = next(m for m in model.modules() if isinstance(m, Shaped))
    attention.numbers = (0.0, *attention.numbers[1:2], 0.5)
    return "shape_gain"


def lost_shape(model: nn.Module) -> str:
    restore(next(m for m in model.modules() if isinstance(m, Shaped)))
    return "shape_out"


@pytest.mark.parametrize("damage", [wrong_queries, wrong_shape, lost_shape])
def test_check_finds_what_is_wrong(damage: Any) -> None:
    model = vanilla("llama")
    table = sp.apply(model, "e-spa", seed=0)
    name = damage(model)
    assert name in {row.name for row in sp.check(model, table).wrong}


@pytest.mark.parametrize(("name", "scheme", "options"), [
    ("llama", "e-spa", {"norm": True}), ("bert", "u-spa", {}),
    pytest.param("gpt2", "e-spa", {}, marks=pytest.mark.slow),
    pytest.param("gpt2", "value-skipinit", {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_measured_as_predicted(name: str, scheme: str, options: dict[str, Any]) -> None:
    """Token correlations and sizes of the streams, by the token kernels, through B, D and the new activation."""
    sizes = {
        "gpt2": {"n_embd": 256}, "bert": {"hidden_size": 256, "intermediate_size": 1024},
        "llama": {"hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 4},
    }  # fmt: skip
    measured = []
    for seed in range(3):
        model = vanilla(name, 3, **sizes[name])
        table = sp.apply(model, scheme, seed=seed, **options)
        batch = replace(batch_of(model, 12), tokens=IDS.numpy())
        measured.append(sp.measure(model.eval(), batch))
    architecture = table.architecture.replace(seq_len=12)
    predicted = sp.predict(replace(table, architecture=architecture), batch.statistics(architecture), fidelity="kernel")
    for what, point in (("forward", "stream_out"), ("gradient", "stream_in")):
        mine, theirs = [getattr(m, what)[point] for m in measured], getattr(predicted, what)[point]
        assert np.allclose(np.mean([m.variance for m in mine], 0), theirs.variance, rtol=0.25)
        assert np.allclose(np.mean([m.token_correlation for m in mine], 0), theirs.token_correlation, atol=0.04)


# --- refusals --------------------------------------------------------------------------------------------


def refusal(name: str, scheme: str, **options: Any) -> str:
    model = vanilla(name, **options.pop("config", {}))
    with pytest.raises(InputError) as found:
        sp.apply(model, scheme, **options)
    text = str(found.value)
    assert "\n" not in text
    return text


def test_refusals() -> None:
    assert "encoder-decoders" in refusal("t5", "e-spa")
    assert "QK-norm" in refusal("qwen3", "e-spa")
    assert "tat" in refusal("llama", "e-spa", activation="tat")


def test_a_sliding_window_is_refused() -> None:
    config = transformers.MistralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, num_hidden_layers=2,
        vocab_size=VOCABULARY, max_position_embeddings=24, sliding_window=8,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    with pytest.raises(InputError, match="sliding window of 8 tokens"):
        sp.apply(model, "e-spa", seed=0)
    config.sliding_window = 4096  # wider than any sequence
    model = transformers.MistralForCausalLM(config).eval()
    sp.apply(model, "e-spa", seed=0)
    whole = model(input_ids=IDS, use_cache=False).logits
    cache = DynamicCache(config=config)
    parts = [model(input_ids=part, **{CACHE: cache}).logits for part in IDS.split([5, 1, 6], 1)]
    close(torch.cat(parts, 1), whole)
    config.sliding_window = 8
    for module in model.modules():
        if isinstance(module, Shaped) and hasattr(module, "sliding_window"):
            module.sliding_window = 8
    with pytest.raises(InputError, match="do not fit into the model's of 8"):
        model(input_ids=IDS)


def test_a_family_that_keeps_its_own_attention() -> None:
    config = transformers.FalconConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCABULARY, parallel_attn=False,
        multi_query=False, new_decoder_architecture=False,
    )  # fmt: skip
    model = transformers.FalconForCausalLM(config)
    before = [type(m) for m in model.modules()]
    with pytest.raises(InputError, match=r"names no `attention`"):
        sp.apply(model, "e-spa", seed=0)
    assert [type(m) for m in model.modules()] == before
    sp.apply(model, "value-skipinit", seed=0)  # which needs no attention function


def test_an_activation_that_is_no_module() -> None:
    config = transformers.RobertaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, vocab_size=VOCABULARY
    )
    model = transformers.RobertaForMaskedLM(config)
    with pytest.raises(InputError, match=r"head: the scheme changes the activation.*activation=keep"):
        sp.apply(model, "e-spa", seed=0)
    assert not any(isinstance(m, (Shaped, Activating)) for m in model.modules())
    sp.apply(model, "e-spa", seed=0, activation="keep")


def test_another_activation_is_another_network() -> None:
    model = vanilla("gpt2")
    architecture = Architecture.from_hf(model).replace(activation="relu")
    for activation in ("relu", "leaky_relu(0.3)", "transformed(silu, 1, 0, 0, 1)"):
        table = sp.scheme("e-spa", activation="keep")(architecture.replace(activation=activation))
        with pytest.raises(InputError, match="activation is"):
            sp.apply(model, table)
