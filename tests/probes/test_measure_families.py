"""Every family against brute force: kept tensors, NumPy statistics, retained gradients, residual identities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalprop.inputs import tensor_moments
from signalprop.parametrization import PLACEMENTS, layout
from signalprop.probes import measure
from signalprop.probes.families import mapping_of
from signalprop.probes.mapping import find, plan
from signalprop.probes.recording import first_tensor

from .conftest import MODELS, VOCABULARY

ALL = sorted(MODELS)


def arguments_for(model: nn.Module, batch: int = 3, length: int = 11, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(4, VOCABULARY, (batch, n), generator=generator)

    family = model.config.model_type
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    out = {"input_ids": ids(length)}
    if type(model).__name__ == "T5ForConditionalGeneration":
        out["decoder_input_ids"] = ids(length - 3)
    return out


def total(output: Any) -> torch.Tensor:
    """A loss that every model has: a fixed random projection of its first output."""
    tensor = output[0].float()
    weights = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
    return (tensor * weights).sum() / 10 + (tensor**2).mean()


def brute_force(model: nn.Module, arguments: dict[str, Any]) -> tuple[dict[tuple[str, int], torch.Tensor], Any]:
    """Clones (with gradients) of the tensors that the mapping names, and the output with hidden states."""
    mapping = mapping_of(model)
    where = plan(model, mapping)
    seen: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(where.sites))}
    handles = []
    for index, site in enumerate(where.sites):

        def keep(tensor: torch.Tensor, index: int = index) -> None:
            if tensor.requires_grad:
                tensor.retain_grad()
            seen[index].append(tensor)

        if site.side == "input":
            handles.append(site.module.register_forward_pre_hook(lambda m, args, keep=keep: keep(args[0])))
        else:
            handles.append(site.module.register_forward_hook(lambda m, args, out, keep=keep: keep(first_tensor(out))))
    output = model(**arguments, output_hidden_states=True)
    total(output).backward()
    for handle in handles:
        handle.remove()
    tensors = {}
    for point in ("stream_in", "branch", "stream_out"):
        for row, index in enumerate(getattr(where, point)):
            if index >= 0:
                tensors[point, row] = seen[index][where.sites[index].call]
    return tensors, output


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("training", [False, True])
def test_profile_equals_brute_force(build: Any, name: str, training: bool) -> None:
    model = build(name).train(training)
    arguments = arguments_for(model)
    torch.manual_seed(5)
    profile = measure(model, arguments, loss=total, scheme="default")
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(5)  # the same dropout masks
    tensors, _ = brute_force(model, arguments)
    assert profile.gradient is not None and profile.gradient_scale is not None
    last = len(profile.forward["branch"].variance) - 1
    scale = float(tensor_moments(tensors["stream_out", last].grad.numpy()).variance)
    assert profile.gradient_scale == pytest.approx(scale, rel=1e-5)
    for (point, row), tensor in tensors.items():
        expected = tensor_moments(tensor.detach().numpy())
        got = profile.forward[point].at(row)
        assert got["variance"] == pytest.approx(expected.variance, rel=1e-5), (point, row)
        assert got["mean"] == pytest.approx(expected.mean, abs=1e-5 * np.sqrt(expected.variance)), (point, row)
        assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5), (point, row)
        expected = tensor_moments(tensor.grad.numpy())
        got = profile.gradient[point].at(row)
        assert got["variance"] == pytest.approx(expected.variance / scale, rel=1e-5), (point, row)
        assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5), (point, row)


@pytest.mark.parametrize("name", ALL)
def test_the_points_are_where_the_residual_stream_runs(build: Any, name: str) -> None:
    """stream_out = stream_in + branch (then the norm, in post-norm), in training mode with dropout."""
    model = build(name).train()
    mapping = mapping_of(model)
    rows = layout(mapping.architecture)
    torch.manual_seed(3)
    tensors, _ = brute_force(model, arguments_for(model))
    for row in range(len(rows.kind)):
        entering, added, leaving = (tensors.get((p, row)) for p in ("stream_in", "branch", "stream_out"))
        if rows.parallel[row]:
            added = added + tensors["branch", row - 1]
        if leaving is None:  # the attention row of a parallel layer
            assert rows.parallel[row + 1]
            continue
        expected = entering + added
        if PLACEMENTS[rows.placement[row]] == "post":
            expected = find(model, mapping.sublayers[row].norm)(expected)
        torch.testing.assert_close(leaving, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("t5")])
def test_layer_boundaries_are_the_hidden_states(build: Any, name: str) -> None:
    model = build(name).eval()
    arguments = arguments_for(model)
    hidden = model(**arguments, output_hidden_states=True).hidden_states
    profile = measure(model, arguments, backward=False)
    assert profile.gradient is None and profile.gradient_scale is None
    for layer, states in enumerate(hidden[:-1]):  # the last one is behind the final norm
        variance = float(tensor_moments(states.detach().numpy()).variance)
        assert profile.forward["stream_in"].variance[2 * layer] == pytest.approx(variance, rel=1e-5)


def test_parallel_layer_sums_its_virtual_stream(build: Any) -> None:
    model = build("gpt_neox").eval()
    arguments = arguments_for(model)
    profile = measure(model, arguments, loss=total)
    tensors, _ = brute_force(model, arguments)
    for row in (0, 2, 4):
        expected = tensor_moments((tensors["stream_in", row] + tensors["branch", row]).detach().numpy())
        got = profile.forward["stream_out"].at(row)
        assert got["variance"] == pytest.approx(expected.variance, rel=1e-5)
        assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5)
        assert profile.gradient is not None
        assert profile.gradient["stream_out"].variance[row] == profile.gradient["stream_out"].variance[row + 1]


def test_the_encoder_gradient_is_the_total_over_its_readers(build: Any) -> None:
    """At the encoder's end all cross-attentions add up; zeroing one reader's keys and values changes it."""
    model = build("t5").eval()
    arguments = arguments_for(model)
    whole = measure(model, arguments, loss=total)
    with torch.no_grad():
        model.decoder.block[1].layer[1].EncDecAttention.v.weight.zero_()
    fewer = measure(model, arguments, loss=total)
    assert whole.gradient is not None and fewer.gradient is not None
    assert whole.gradient["stream_out"].variance[3] != pytest.approx(fewer.gradient["stream_out"].variance[3], rel=0.05)
