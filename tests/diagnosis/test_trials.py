"""Weights of another convention: each is planted in a model, and the trial for it gives the model's own logits back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from choice import some
from diagnosing import findings, logits_of, text_batch, tiny
from signalprop.attachment.anatomy import attach
from signalprop.data.batches import Batch, load_text, windows
from signalprop.diagnosis.run import diagnose
from signalprop.diagnosis.temporary_changes import Trial
from signalprop.diagnosis.trials import trials
from signalprop.diagnosis.whole_model_values import REBUILT, SETTINGS

HEADS, KEYS = 6, 2


def every(model: Any, batch: Batch) -> list[Trial]:
    return list(trials(attach(model), batch, guessing=True))


def llama(n_layers: int = 3, **changes: Any) -> Any:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KEYS, "hidden_size": 48, "intermediate_size": 60}
    model = tiny("llama", n_layers, tie_word_embeddings=False, **sizes | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return model


def each(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def rows(weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight.copy_(change(weight.clone()))


def interleaved(model: Any, halves: bool = False) -> None:
    for attention in each(model):
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            width = attention.head_dim
            shape = (-1, width // 2, 2, weight.shape[1]) if halves else (-1, 2, width // 2, weight.shape[1])
            rows(weight, lambda w, shape=shape: w.view(shape).transpose(1, 2).reshape(w.shape))  # type: ignore[misc]


def regrouped(model: Any) -> None:
    order = torch.arange(HEADS).view(KEYS, -1).t().reshape(-1)
    for attention in each(model):
        q, o = attention.q_proj.weight, attention.o_proj.weight
        rows(q, lambda w: w.view(HEADS, -1, w.shape[1])[order].reshape(w.shape))
        rows(o, lambda w: w.view(w.shape[0], HEADS, -1)[:, order].reshape(w.shape))


def shifted(model: Any, by: float) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(by)


def by_name(model: Any) -> None:
    held = list(model.model.layers)
    model.model.layers = nn.ModuleList(held[i] for i in sorted(range(len(held)), key=str))


def turned(model: Any) -> None:
    for attention in each(model):
        for part in (attention.q_proj, attention.o_proj):
            rows(part.weight, lambda w: w.t())


def swapped(model: Any) -> None:
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight.clone(), layer.mlp.up_proj.weight.clone()
        layer.mlp.gate_proj.weight.copy_(up)
        layer.mlp.up_proj.weight.copy_(gate)


def based(model: Any) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(5e5 ** -(torch.arange(len(frequencies)) / len(frequencies)))


def unscaled(model: Any) -> None:
    for attention in each(model):
        attention.scaling = 1.0


def exchanged(model: Any) -> None:
    for attention in each(model):
        key, value = attention.k_proj.weight, attention.v_proj.weight
        held = key.clone()
        key.copy_(value)
        value.copy_(held)


def rectified(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


FAULTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "gains - 1": ("gains", lambda m: shifted(m, 1.0)),
    "gains + 1": ("gains", lambda m: shifted(m, -1.0)),
    "query and key rows reordered to two halves": ("rotary pairs", interleaved),
    "query and key rows reordered to interleaved pairs": ("rotary pairs", lambda m: interleaved(m, halves=True)),
    "grouping": ("grouping", regrouped),
    "layers reordered by number": ("layer order", by_name),
    "layers in the opposite order": (
        "layer order", lambda m: setattr(m.model, "layers", nn.ModuleList(list(m.model.layers)[::-1]))
    ),
    "gate and up projections swapped": ("gate and up", swapped),
    "rope_theta = 10000": ("rotary base", based),
    "a factor of 0.3536 on scores": ("score scale", unscaled),
    "these maps taken as query, value, key": ("projections", exchanged),
    "positions multiplied by 4": ("rotary factor", lambda m: m.model.rotary_emb.inv_freq.div_(4)),
    "the activation silu": ("activation", rectified),
    "layers moved by +1": (
        "layer order", lambda m: setattr(m.model, "layers", nn.ModuleList([*m.model.layers[1:], m.model.layers[0]]))
    ),
    "rows of the token table moved by +1": (
        "token rows", lambda m: m.model.embed_tokens.weight.copy_(m.model.embed_tokens.weight.roll(-1, 0))
    ),
    "rows of the token table and of the head moved by -3": (
        "token rows", lambda m: [p.copy_(p.roll(3, 0)) for p in (m.model.embed_tokens.weight, m.lm_head.weight)]
    ),
}  # fmt: skip


# Of each of these trials another direction or number is a fast test.
SLOW = {
    "gains + 1", "query and key rows reordered to interleaved pairs", "layers in the opposite order",
    "rows of the token table and of the head moved by -3",
}  # fmt: skip


@pytest.mark.parametrize("repair", some(FAULTS, {*FAULTS} - SLOW))
def test_the_trial_takes_the_fault_back(repair: str) -> None:
    kind, plant = FAULTS[repair]
    model = llama(12 if plant is by_name else 3)  # names sort as numbers below 11
    batch = text_batch(model)
    wanted = logits_of(model, batch)
    with torch.no_grad():
        plant(model)
    broken = logits_of(model, batch)
    assert not torch.allclose(broken, wanted, atol=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = [trial for trial in every(model, batch) if trial.name == kind]
    repaired = []
    for trial in found:
        with trial.change():
            if torch.allclose(logits_of(model, batch), wanted, atol=1e-4):
                repaired.append(trial.repair)
    assert len(repaired) == 1 and (repair == kind or repair in repaired[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits_of(model, batch), broken)


def test_square_maps_the_other_way_round() -> None:
    """Queries and outputs of as many keys as heads are square; both are turned at once or alone."""
    model = llama(num_key_value_heads=HEADS)
    batch = text_batch(model)
    wanted = logits_of(model, batch)
    with torch.no_grad():
        for attention in each(model):
            attention.v_proj.weight.copy_(attention.v_proj.weight.t().clone())
    (trial,) = [one for one in every(model, batch) if one.repair == "value transposed"]
    with trial.change():
        assert torch.allclose(logits_of(model, batch), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "repair"),
    [
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "num_attention_heads = 4"),
        ("bert", {"num_attention_heads": 2}, "num_attention_heads = 4"),
        ("qwen2", {"sliding_window": 4}, "sliding_window = 8"),
    ],
)
def test_another_configuration(family: str, changes: dict[str, Any], repair: str) -> None:
    """Weights in a model that was configured for others, without an error: the entry is found, and nothing is left."""
    model = tiny(family, 3, **({"sliding_window": 8} if "sliding_window" in changes else {}))
    batch = text_batch(model)
    wanted = logits_of(model, batch)
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    broken = logits_of(other, batch)
    assert not torch.allclose(broken, wanted, atol=1e-3)
    right = []
    for trial in every(other, batch):
        with trial.change():
            if trial.name in SETTINGS and torch.allclose(logits_of(other, batch), wanted, atol=1e-4):
                right.append(trial.repair)
    assert right and all(repair in one for one in right)
    assert torch.equal(logits_of(other, batch), broken) and other.config is config


def test_a_hook_is_no_entry_of_the_configuration() -> None:
    """A new model of the same configuration does without it: the control, before any entry."""
    model = tiny("llama", 3)
    batch = text_batch(model)
    wanted = logits_of(model, batch)
    model.model.embed_tokens.register_forward_hook(lambda module, given, out: 0.1 * out)
    assert not torch.allclose(logits_of(model, batch), wanted, atol=1e-3)
    first = next(trial for trial in every(model, batch) if trial.name in (*SETTINGS, REBUILT))
    assert first.name == REBUILT
    with first.change():
        assert torch.allclose(logits_of(model, batch), wanted, atol=1e-5)


def of_thirds(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """A change of GPT-2's fused weights and biases, whose last axis holds queries, keys and values."""

    def plant(model: Any) -> None:
        for block in model.transformer.h:
            for parameter in block.attn.c_attn.parameters():
                parameter.copy_(change(model.config, parameter.clone()))

    return plant


def turned_values(config: Any, x: torch.Tensor) -> torch.Tensor:
    width = config.n_embd
    if x.ndim > 1:
        x[:, 2 * width :] = x[:, 2 * width :].t().clone()
    return x


FUSED: dict[str, Callable[[Any], None]] = {
    "value transposed": of_thirds(turned_values),
    "these maps taken as key, query, value": of_thirds(
        lambda _, x: torch.cat([x.chunk(3, -1)[i] for i in (1, 0, 2)], -1)
    ),
    "these maps taken as value, query, key": of_thirds(
        lambda _, x: torch.cat([x.chunk(3, -1)[i] for i in (2, 0, 1)], -1)
    ),
    "the fused map reordered to thirds": of_thirds(
        lambda config, x: x.unflatten(-1, (3, config.n_head, -1)).transpose(-3, -2).reshape(x.shape)
    ),
    "rows of the position table moved by +2": lambda m: m.transformer.wpe.weight.copy_(
        m.transformer.wpe.weight.roll(-2, 0)
    ),
}


@pytest.mark.parametrize("repair", some(FUSED, ("value transposed", "the fused map reordered to thirds")))
def test_fused_maps_and_position_tables(repair: str) -> None:
    """GPT-2 holds queries, keys and values in one tensor, as (inputs, outputs): what repairs it is found."""
    model = tiny("gpt2", 2)
    batch = text_batch(model)
    wanted = logits_of(model, batch)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias.normal_()
        wanted = logits_of(model, batch)
        FUSED[repair](model)
    assert not torch.allclose(logits_of(model, batch), wanted, atol=1e-3)
    right = []
    for trial in every(model, batch):
        with trial.change():
            if torch.allclose(logits_of(model, batch), wanted, atol=1e-4):
                right.append(trial.repair)
    assert right == [repair]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A small Llama after 70 steps on bytes, below 2.9 nats per byte; guessing costs 5.5."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "max_position_embeddings": 64, "vocab_size": 256}
    model = tiny(
        "llama", 3, initializer_range=0.02, num_attention_heads=HEADS, num_key_value_heads=KEYS, **sizes
    ).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(name.endswith("weight")))
    data = np.frombuffer(load_text()[:250_000].encode(), np.uint8).astype(np.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    for step in range(70):
        ids = torch.from_numpy(windows(data, 48, 6, step))
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def read(model: Any, **options: Any) -> Any:
    data = np.frombuffer(load_text()[250_000:300_000].encode(), np.uint8).astype(np.int64)
    ids = windows(data, 64, 8, 0)
    return diagnose(model, [Batch(ids[:, :-1], ids[:, 1:], source="bytes")], jacobian_sequences=0, **options)


class TestTrained:
    @pytest.fixture(autouse=True)
    def as_it_was(self, trained: Any) -> Any:
        state = {name: value.clone() for name, value in trained.state_dict().items()}
        yield
        trained.load_state_dict(state)

    def test_nothing_is_wrong(self, trained: Any) -> None:
        found = read(trained)
        assert found.ends.learnt and found.loss.value < 2.9 and found.trials
        assert findings(found, "fault", "warning") == []
        assert found.trials[0].loss > found.trials[0].before - 0.15

    @pytest.mark.parametrize(
        ("plant", "says"),
        [
            (lambda m: shifted(m, 1.0), "with gains - 1 the loss"),
            pytest.param(lambda m: shifted(m, -1.0), "with gains + 1 the loss", marks=pytest.mark.slow),
            pytest.param(interleaved, "reordered to two halves the loss", marks=pytest.mark.slow),
        ],
    )
    def test_the_repair_comes_first_and_alone(self, trained: Any, plant: Callable[[Any], object], says: str) -> None:
        with torch.no_grad():
            plant(trained)
        found = read(trained)
        assert found.findings[0].name == "weights of another convention"
        assert says in found.findings[0].text and found.findings[0].cause.startswith("tested")
        assert not {v.name for v in found.findings} - {"weights of another convention", "no better than guessing"}
        assert found.trials[0].loss == pytest.approx(2.6, abs=0.4)
        assert not read(trained, trials=False).trials

    def test_what_was_not_loaded(self, trained: Any) -> None:
        with torch.no_grad():
            trained.model.norm.weight.fill_(1.0)
            layer = trained.model.layers[1]
            for parameter in layer.parameters():
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
        kinds = {v.name: v for v in read(trained).findings if v.severity == "fault"}
        assert kinds["final norm not loaded"].layers == () and kinds["layers not loaded"].layers == (1,)

    def test_gains_around_0(self, trained: Any) -> None:
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                if "norm" in name:
                    parameter.sub_(1.0).mul_(0.1)
        found = read(trained, trials=False)
        faults = [v.name for v in found.findings if v.severity == "fault"]
        assert faults[0] == "norm gains around 0" and "head not loaded" not in faults

    def test_a_row_that_is_not_a_number(self, trained: Any) -> None:
        with torch.no_grad():
            trained.get_input_embeddings().weight[255] = math.nan
        first = read(trained).findings[0]
        assert first.name == "not finite" and "model.embed_tokens.weight (parameter) holds 96 NaN" in first.text
        assert "the first at [255, 0]" in first.text

    def test_a_buffer_that_was_wiped(self, trained: Any) -> None:
        held = trained.model.rotary_emb.inv_freq.clone()
        trained.model.rotary_emb.inv_freq.fill_(math.nan)
        try:
            first = read(trained).findings[0]
        finally:
            trained.model.rotary_emb.inv_freq.copy_(held)
        assert "model.rotary_emb.inv_freq (buffer) holds 8 NaN" in first.text
