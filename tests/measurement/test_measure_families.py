"""Every family against brute force: kept tensors, NumPy statistics, retained gradients, residual identities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from signalprop.attachment.anatomy import attach
from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import find, find_any, number, split
from signalprop.hooks import first_tensor
from signalprop.measurement import measure
from signalprop.network.inputs import tensor_moments
from signalprop.network.parametrization import PLACEMENTS, layout

from .conftest import MODELS, VOCABULARY, models

ALL = models()
THIRD = ALL[::3]  # of what models/test_families.py runs for all of them
ENCODER_DECODERS = ("T5Config", "MT5Config", "BartConfig", "MBartConfig", "WhisperConfig", "Speech2TextConfig")


def arguments_for(model: nn.Module, batch: int = 3, length: int = 11, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(4, VOCABULARY, (batch, n), generator=generator)

    c, family = model.config, model.config.model_type
    if family in ("vit", "deit"):
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    if family == "whisper":
        features = torch.randn(batch, c.num_mel_bins, 2 * c.max_source_positions, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids(length - 3)}
    if family == "speech_to_text":
        features = torch.randn(batch, 4 * length, c.input_feat_per_channel, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids(length - 3)}
    out = {"input_ids": ids(length)}
    if c.is_encoder_decoder and type(model).__name__ != "T5EncoderModel":
        out["decoder_input_ids"] = ids(length - 3)
    return out


def total(output: Any) -> torch.Tensor:
    """A loss that every model has: a fixed random projection of its first output."""
    tensor = output[0].float()
    weights = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
    return (tensor * weights).sum() / 10 + (tensor**2).mean()


@dataclass
class Kept:
    """A tensor of the forward pass, (batch, tokens, features), its gradient, and what a dropout function made of it."""

    tensor: torch.Tensor
    value: np.ndarray
    grad: np.ndarray | None = None
    dropped: torch.Tensor | None = None
    rate: float = 0.0


def brute_force(model: nn.Module, arguments: dict[str, Any]) -> dict[tuple[str, int], Kept]:
    """Copies (with gradients) of the tensors that the mapping names; Falcon changes some of them in place."""
    mapping = mapping_of(model)
    where = attach(model, mapping).plan
    seen: dict[int, list[Kept]] = {i: [] for i in range(len(where.sites))}
    handles = []
    shapes: dict[int, tuple[int, int]] = {}
    for index, site in enumerate(where.sites):

        def keep(tensor: torch.Tensor, index: int = index, stack: int = site.stack) -> None:
            if tensor.ndim == 3:
                shapes.setdefault(stack, (tensor.shape[0], tensor.shape[1]))
            shape = (*shapes[stack], tensor.shape[-1])
            kept = Kept(tensor, tensor.detach().clone().reshape(shape).numpy())
            seen[index].append(kept)

            def gradient(g: torch.Tensor) -> None:
                kept.grad = g.detach().clone().reshape(shape).numpy()

            tensor.register_hook(gradient)

        if site.side == "input":
            handles.append(site.module.register_forward_pre_hook(lambda m, args, keep=keep: keep(args[0])))
        else:
            handles.append(site.module.register_forward_hook(lambda m, args, out, keep=keep: keep(first_tensor(out))))
    own = nn.functional.dropout

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        out = own(x, p, training, inplace)
        for kept in (kept for group in seen.values() for kept in group if kept.tensor is x):
            kept.dropped, kept.rate = out.detach().reshape(kept.value.shape), p if training else 0.0
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "dropout", dropout)
        total(model(**arguments)).backward()
    for handle in handles:
        handle.remove()
    tensors = {}
    for point in ("stream_in", "branch", "stream_out"):
        for row, index in enumerate(getattr(where, point)):
            if index >= 0:
                tensors[point, row] = seen[index][where.sites[index].call]
    return tensors


def close(got: dict[str, float], mean: float, variance: float, covariance: float, where: Any) -> None:
    assert got["mean"] == pytest.approx(mean, abs=1e-5 * np.sqrt(variance)), where
    assert got["variance"] == pytest.approx(variance, rel=1e-5), where
    assert got["token_correlation"] == pytest.approx(covariance / variance, abs=1e-5), where


def check_residuals(model: nn.Module, tensors: dict[tuple[str, int], Kept]) -> None:
    """stream_out = stream_in + branch (then the norm, in post-norm), in training mode with dropout."""
    mapping = mapping_of(model)
    rows = layout(mapping.architecture)

    def added(row: int) -> torch.Tensor:
        kept = tensors["branch", row]
        branch = torch.as_tensor(kept.value) if kept.dropped is None else kept.dropped
        return branch * number(mapping.sublayers[row].multiplier)

    for row in range(len(rows.kind)):
        entering, leaving = tensors["stream_in", row], tensors.get(("stream_out", row))
        if leaving is None:  # the attention row of a parallel layer
            assert rows.parallel[row + 1]
            continue
        expected = torch.as_tensor(entering.value) + added(row)
        if rows.parallel[row] and tensors["branch", row].dropped is None:  # Falcon drops out the sum of both
            expected = expected + added(row - 1)
        if PLACEMENTS[rows.placement[row]] == "post":
            expected = find(model, mapping.sublayers[row].norm)(expected)
        torch.testing.assert_close(torch.as_tensor(leaving.value), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", THIRD)
def test_profile_equals_brute_force(build: Any, name: str, training: bool) -> None:
    """Of branches that a function drops out, the expectation over its masks."""
    model = build(name).train(training)
    arguments = arguments_for(model)
    torch.manual_seed(5)
    profile = measure(model, arguments, loss=total, scheme="default")
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(5)  # the same dropout masks
    tensors = brute_force(model, arguments)
    if training:
        check_residuals(model, tensors)
    assert profile.gradient is not None and profile.gradient_scale is not None
    last = len(profile.forward["branch"].variance) - 1
    scale = float(tensor_moments(tensors["stream_out", last].grad).variance)
    assert profile.gradient_scale == pytest.approx(scale, rel=1e-5)
    rates = {row: mapping_of(model).sublayers[row].dropout is not None for row in range(last + 1)}
    for (point, row), kept in tensors.items():
        p = model.config.to_dict().get("dropout", model.config.to_dict().get("hidden_dropout", 0.0))
        p = p if point == "branch" and rates[row] and training else 0.0
        m = tensor_moments(kept.value)
        after = (m.second_moment) / (1 - p) - m.mean**2
        close(profile.forward[point].at(row), m.mean, after, m.covariance, (point, row))
        m = tensor_moments(kept.grad)
        after = m.second_moment * (1 - p) - m.mean**2
        got = profile.gradient[point].at(row)
        close(got, m.mean / np.sqrt(scale), after / scale, m.covariance / scale, (point, row, "gradient"))


@pytest.mark.parametrize("name", models(name for name in MODELS if "dropout" in MODELS[name][2]))
def test_a_dropout_function_is_counted_where_no_hook_sees_it(build: Any, name: str) -> None:
    model = build(name, dropout=0.3).train()
    arguments = arguments_for(model)
    torch.manual_seed(5)
    profile = measure(model, arguments, loss=total)
    torch.manual_seed(5)
    for (point, row), kept in brute_force(model, arguments).items():
        if point != "branch":
            continue
        assert kept.rate == 0.3 and kept.dropped is not None
        assert ((kept.dropped == 0).float().mean() - 0.3).abs() < 0.1
        masked = (tensor_moments(nn.functional.dropout(torch.as_tensor(kept.value), 0.3).numpy()) for _ in range(64))
        draws = np.array([(m.variance, m.covariance) for m in masked])
        error = draws.std(0) / np.sqrt(len(draws))
        got = profile.forward["branch"].at(row)
        expected = got["variance"] * np.array([1, got["token_correlation"]])
        assert (np.abs(draws.mean(0) - expected) < 4 * error).all(), row


@pytest.mark.parametrize("name", THIRD)
def test_the_scaling_multiplies_the_scores(build: Any, name: str) -> None:
    """Twice the number that the mapping names changes the output, and as much as twice the query weights do."""
    fused = getattr(transformers, MODELS[name][0])._supports_sdpa  # others compute their scores themselves
    implementation = "sdpa" if fused else "eager"
    model = build(name, attn_implementation=implementation).eval()
    assert model.config._attn_implementation == implementation
    arguments = arguments_for(model)
    with torch.no_grad():
        before = model(**arguments)[0]
        for item in mapping_of(model).sublayers:
            if item.scaling is None:
                continue
            path, _, attribute = item.scaling.rpartition(".")
            holder = find(model, path)
            own = getattr(holder, attribute)
            setattr(holder, attribute, 2 * own)
            doubled = model(**arguments)[0]
            setattr(holder, attribute, own)
            assert not torch.allclose(doubled, before, rtol=1e-3)
            if item.query_norm is not None or isinstance(item.weights["query"], tuple):
                continue
            query = find(model, item.weights["query"])
            for tensor in (query.weight, query.bias):
                if tensor is not None:
                    tensor.mul_(2)
            torch.testing.assert_close(model(**arguments)[0], doubled, rtol=1e-4, atol=1e-5)
            for tensor in (query.weight, query.bias):
                if tensor is not None:
                    tensor.mul_(0.5)


@pytest.mark.parametrize("name", models(name for name in MODELS if MODELS[name][1] not in ENCODER_DECODERS)[::3])
def test_layer_boundaries_are_the_hidden_states(build: Any, name: str) -> None:
    model = build(name).eval()
    arguments = arguments_for(model)
    hidden = model(**arguments, output_hidden_states=True).hidden_states
    profile = measure(model, arguments, backward=False)
    assert profile.gradient is None and profile.gradient_scale is None
    for layer, states in enumerate(hidden[:-1]):  # the last one is behind the final norm
        variance = float(tensor_moments(states.detach().numpy()).variance)
        assert profile.forward["stream_in"].variance[2 * layer] == pytest.approx(variance, rel=1e-5)


@pytest.mark.parametrize("name", THIRD)
def test_layers_hold_their_sublayers(build: Any, name: str) -> None:
    """`Mapping.layers` is a module per layer, encoder first, in which the layer's branches and weights are."""
    model = build(name)
    mapping = mapping_of(model)
    rows = layout(mapping.architecture)
    assert len(mapping.layers) == mapping.architecture.n_layers_total
    modules = [find(model, layer) for layer in mapping.layers]
    assert len({id(module) for module in modules}) == len(modules)
    for stack, layer, item in zip(rows.stack, rows.layer, mapping.sublayers, strict=True):
        decoder = len(set(rows.stack)) > 1 and stack == rows.stack.max()
        here = modules[layer + decoder * mapping.architecture.n_layers]
        inside = {*map(id, here.modules()), *map(id, here.parameters())}
        assert id(find(model, item.branch)) in inside
        assert all(id(find_any(model, split(w)[0], "test")) in inside for w in item.weights.values())
