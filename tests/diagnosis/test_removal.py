"""Removing layers is exact: against models that transformers builds without them, and on layers that do nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import own_model
import signalprop as sp
from choice import some
from diagnosing import FAMILIES, LENGTH, VOCABULARY, logits_of, mapping_of, text_batch, tiny, transformers, weights_of
from signalprop.attachment.anatomy import attach
from signalprop.data.batches import Batch
from signalprop.diagnosis.removal import lists_of, removal, without
from signalprop.diagnosis.result import Estimate, Removed
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.errors import InputError

# which layers go, by family; layers of T5 and BART are counted through both stacks
REMOVED = {
    "gpt2": (0, 2), "llama": (1,), "qwen2": (0, 1), "gemma3": (1, 2), "bert": (3,), "opt": (2,), "t5": (1, 2, 5, 7),
    "bart": (0, 5, 6),
}  # fmt: skip
N = 4


def silent(model: nn.Module, layers: Sequence[int]) -> None:
    """What the layers' branches end with becomes 0."""
    with torch.no_grad():
        for layer in layers:
            for weight, _ in weights_of(model, layer, ("output", "down")):
                weight.zero_()
        for name, bias in model.named_parameters():
            if name.endswith(("c_proj.bias", "out_proj.bias", "fc2.bias")) and any(f".{k}." in name for k in layers):
                bias.zero_()


def by_hand(family: str, model: Any, layers: Sequence[int]) -> Any:
    """A fresh model of fewer layers, with the weights of those that are left."""
    model_class, config_class, depths, options = FAMILIES[family]
    kept = [[k for k in range(N) if k + N * stack not in layers] for stack in range(len(depths))]
    numbers = {name: len(left) for name, left in zip(depths, kept, strict=True)}
    if hasattr(model.config, "layer_types"):
        numbers["layer_types"] = [model.config.layer_types[k] for k in kept[0]]  # type: ignore[assignment]
    config = getattr(transformers, config_class)(**options | numbers)
    fresh = getattr(transformers, model_class)(config).eval()
    lists = [path.rpartition(".")[0] for path in mapping_of(model).layers[::N]]
    state = model.state_dict()
    wanted = {}
    for name in fresh.state_dict():
        source = name
        for path, left in zip(lists, kept, strict=True):
            if name.startswith(f"{path}."):
                number, _, rest = name[len(path) + 1 :].partition(".")
                source = f"{path}.{left[int(number)]}.{rest}"
        wanted[name] = state[source]
    fresh.load_state_dict(wanted)
    return fresh


@pytest.mark.parametrize("family", some(REMOVED, ("gpt2", "qwen2", "gemma3", "t5")))
class TestExact:
    def test_as_a_model_that_never_had_them(self, family: str) -> None:
        model = tiny(family, N)
        layers, batch = REMOVED[family], text_batch(tiny(family, N))
        wanted = logits_of(by_hand(family, model, layers), batch)
        before, config = logits_of(model, batch), copy.deepcopy(model.config.to_dict())
        assert not torch.allclose(wanted, before, rtol=1e-3)
        with without(attach(model), layers):
            assert torch.equal(logits_of(model, batch), wanted)
        assert torch.equal(logits_of(model, batch), before)
        assert model.config.to_dict() == config


def removed(model: nn.Module, batches: list[Batch]) -> tuple[Removed, ...]:
    return removal(attach(model), batches, loss(model, batches)).single


class TestWorth:
    @pytest.mark.parametrize("family", ["gpt2", "qwen2", "t5"])
    def test_an_exact_identity_is_worth_nothing(self, family: str) -> None:
        """To the last bit: the loss without it is the same number."""
        model = tiny(family, N)
        silent(model, [1])
        found = {item.layers[0]: item for item in removed(model, [text_batch(model)])}
        assert found[1].increase == Estimate(value=0.0, standard_error=0.0)
        assert all(item.increase.value != 0.0 for layer, item in found.items() if layer != 1)
        assert sorted(found) == ([1, 2, 3, 5, 6, 7] if family == "t5" else [0, 1, 2, 3])

    def test_errors_are_those_of_the_difference(self) -> None:
        model = tiny("gpt2", N)
        batches = [text_batch(model, 3, start=0), text_batch(model, 3, start=900)]
        whole = loss(model, batches)
        (first, *_) = removed(model, batches)
        with without(attach(model), [0]):
            left = loss(model, batches)
        assert first.loss == left.estimate and first.loss.value == left.mean
        gaps = (left.sums - whole.sums) / LENGTH  # all sequences are of one length: a plain mean of their losses
        assert first.increase.value == pytest.approx(gaps.mean(), rel=1e-12)
        assert first.increase.standard_error == pytest.approx(gaps.std(ddof=1) / math.sqrt(6), rel=1e-9)

    def test_errors_cover_the_truth(self) -> None:
        """Of sequences of different lengths: the mean of the losses of all tokens, as often as errors say."""
        generator = np.random.default_rng(0)
        inside = 0
        for _ in range(400):
            counts = generator.integers(5, 30, 40).astype(float)
            gaps = generator.normal(0.3, 0.2, 40)  # per token, of a sequence
            found = LossResult(gaps * counts + 1.0, counts).above(LossResult(np.ones(40), counts))
            assert found.value is not None and found.standard_error is not None
            inside += abs(found.value - 0.3) < 1.96 * found.standard_error
        assert 0.91 < inside / 400 < 0.98


class TestLayerNormScaling:
    @pytest.mark.parametrize("folded", [False, True])
    def test_survivors_keep_their_own_factor(self, folded: bool) -> None:
        model = tiny("llama", N)
        sp.apply(model, "lns", initialize=False, change_function=True)
        plain = tiny("llama", N)
        with torch.no_grad():
            for k, layer in enumerate(plain.model.layers):
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight /= math.sqrt(k + 1)
        if folded:
            sp.fold(model)
        batch = text_batch(plain)
        wanted = logits_of(by_hand("llama", plain, (0, 2)), batch)
        mapping = mapping_of(model)
        with without(attach(model), (0, 2)):
            assert torch.allclose(logits_of(model, batch, mapping), wanted, rtol=1e-4, atol=1e-5)

    def test_scores_over_the_number_of_the_layer(self) -> None:
        """GPT-2's own option computes with the number, so the layers that are left keep theirs."""
        model = tiny("gpt2", N, scale_attn_by_inverse_layer_idx=True)
        silent(model, [1])
        batch = text_batch(model)
        wanted = logits_of(model, batch)
        with without(attach(model), (1,)):
            assert torch.equal(logits_of(model, batch), wanted)


class TestRefused:
    def test_layers_that_are_not_there(self) -> None:
        model = tiny("llama", N)
        for layers, message in (((4,), "no layer 4; .* 0 to 3"), ((-1,), "no layer -1"), (range(N), "at least one")):
            with pytest.raises(InputError, match=message), without(attach(model), layers):
                pass

    def test_the_layer_that_holds_the_bias(self) -> None:
        model = tiny("t5", 2)
        for layer in (0, 2):
            message = f"layer {layer} holds the position bias"
            with pytest.raises(InputError, match=message), without(attach(model), (layer,)):
                pass

    def test_models_that_do_not_say_where_layers_are(self) -> None:
        own = own_model.own_model()
        with pytest.raises(InputError, match=r"does not say where the layers are; give Mapping.layers"):
            lists_of(attach(own))
        named = replace(mapping_of(own), layers=["blocks.0.attn", "blocks.1", "blocks.2"])
        with pytest.raises(InputError, match="names them by path in a list"):
            lists_of(attach(own, named))

    def test_everything_is_put_back_after_an_error(self) -> None:
        model = tiny("qwen2", N)
        before, config = logits_of(model, text_batch(model)), copy.deepcopy(model.config.to_dict())
        bad = Batch(np.full((1, 8), VOCABULARY), np.zeros((1, 8), np.int64))
        with pytest.raises(IndexError), without(attach(model), (0,)):
            loss(model, [bad])
        assert torch.equal(logits_of(model, text_batch(model)), before) and model.config.to_dict() == config
