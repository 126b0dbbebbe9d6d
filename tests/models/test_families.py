"""The reference transformer computes what every Hugging Face family computes: logits and gradients on copied weights.

Weights are found by the family's Mapping, so this also checks that each of its roles names the right rows of the right
tensor. Batches go through the mapping's `arguments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from measurement.conftest import MODELS, models
from signalprop.attachment.anatomy import attach
from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import Mapping, find_any
from signalprop.attachment.parametrization_of import tensors_of
from signalprop.attachment.rows import Held, is_transposed
from signalprop.data.batches import Batch, default_statistics
from signalprop.models import Transformer, build, ends
from signalprop.models.synthetic import synthetic_batch
from signalprop.models.transformer import batch_tensors
from signalprop.results.cost import count_parameters
from signalprop.schemes import scheme
from signalprop.sublayers.attention.roles import Settings, has_window

NAMES = sorted(set(MODELS) - {"bert-classes"})  # a classifier of BERT reads a pooler that the reference model has not
OTHER_PAIRS = {"cohere", "cohere2", "glm", "glm4"}  # whose rotations turn other pairs of features
ONE_NORM_LESS = {"modernbert"}  # whose first layer has one norm less
_QK_NORMS = (
    "q_norm.weight",
    "k_norm.weight",
    "query_layernorm.weight",
    "key_layernorm.weight",
    "q_layernorm.weight",
    "k_layernorm.weight",
)
STEPS = 12  # tokens that the encoders of the speech models read
Pair = tuple[Tensor, Tensor, Any]  # own parameter, theirs, and how to cut the own one's value out of theirs


def theirs(name: str) -> Any:
    """A model in float64 and evaluation mode, all of whose parameters have moved off their start."""
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = getattr(hf, config_class)(**options)
    model = getattr(hf, model_class)(config).double().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(_QK_NORMS):  # a table knows their gains as a score scale
                parameter.fill_(0.0 if name == "gemma3" else 1.0)
            elif path.endswith("encoder.relative_attention_bias.weight"):  # MPNet's, which an Architecture cannot say
                parameter.zero_()
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def both(model: Any, mine: Any, reference: Any, offset: float = 0.0) -> Iterator[Pair]:
    """Weight and bias; a bias that they lack does nothing (a key bias drops out of softmax), and is set to zero."""
    module = find_any(model, reference[0] if isinstance(reference, tuple) else reference, "test")
    rows = reference[1] if isinstance(reference, tuple) else slice(None)
    turned = is_transposed(module)
    if isinstance(module, Tensor):
        several = mine.weight.ndim == 3 and isinstance(reference, tuple)  # rows of every expert
        yield mine.weight, module, lambda t: (t[:, rows] if several else t).reshape(mine.weight.shape)
        return

    def cut(t: Tensor) -> Tensor:
        return ((t[:, rows].T if turned else t[rows]) + offset).reshape(mine.weight.shape)

    yield mine.weight, module.weight, cut
    if getattr(mine, "bias", None) is not None:
        if module.bias is None:
            nn.init.zeros_(mine.bias)
        else:
            yield mine.bias, module.bias, lambda t: t[rows]


def whole(t: Tensor) -> Tensor:
    return t


def pairs(model: Any, own: Transformer, mapping: Mapping) -> Iterator[Pair]:
    """Every parameter of our model with the place in theirs that it plays."""
    gained = mapping.gain_offset
    for sublayer, item in zip(own.sublayers(), mapping.sublayers, strict=True):
        for role, reference in item.weights.items():
            yield from both(model, getattr(sublayer.branch.function, role), reference)
        norm = sublayer.norm if sublayer.norm is not None else sublayer.branch.norm
        if norm is not None:
            yield from both(model, norm, item.norm, gained)
        if item.post_norm is not None and sublayer.branch.norm is not None:  # a scheme may have taken it away
            yield from both(model, sublayer.branch.norm, item.post_norm, gained)
    stacks = [stack for stack in (own.encoder, own.decoder) if stack is not None]
    for stack, final in zip(stacks, [mapping.encoder_final_norm, mapping.final_norm][-len(stacks) :], strict=True):
        if stack.final_norm is not None:
            yield from both(model, stack.final_norm, final, gained)
    yield from embedding_pairs(model, stacks[0].embedding, stacks[-1].embedding, mapping.embedding)
    for stack, theirs_ in zip(stacks, ("encoder", "decoder")[-len(stacks) :], strict=True):
        if stack.relative is not None:
            block = getattr(model, theirs_ if own.decoder is not None else "encoder").block[0]
            yield stack.relative.table.weight, block.layer[0].SelfAttention.relative_attention_bias.weight, whole
    if own.head is not None:
        yield from head_pairs(model, own, mapping)


def embedding_pairs(model: Any, first: Any, last: Any, e: Any) -> Iterator[Pair]:
    yield from both(model, last.token or first.patch, e.token)
    for mine, reference in zip(first.front.convolutions if first.front else (), e.convolutions, strict=True):
        yield from both(model, mine, reference)
    for stack, reference, norm in (
        (first, e.position, e.norm),
        *([(last, e.decoder_position, e.decoder_norm)] if last is not first else []),
    ):
        if stack.position is not None:
            table = Held(find_any(model, reference, "positions")).weight
            n = stack.position.weight.shape[0]
            yield stack.position.weight, table, lambda t, n=n: t.reshape(-1, t.shape[-1])[-n:]  # OPT, RoBERTa: offset 2
        if stack.norm is not None:
            yield from both(model, stack.norm, norm)
    if first.segment is not None:
        yield from both(model, first.segment, e.segment)
    for mine, path in zip((first.class_token, first.distillation_token), e.class_tokens, strict=False):
        yield mine, find_any(model, path, "class token"), lambda t: t.flatten()


def head_pairs(model: Any, own: Transformer, mapping: Mapping) -> Iterator[Pair]:
    if not own.parametrization.architecture.has_tied_head:
        yield own.head.weight, tensors_of(attach(model).ends.head, "head")[0], whole
    if own.head.bias is not None:
        yield own.head.bias, tensors_of(attach(model).ends.head, "head")[1], whole
    if own.head.transform is not None:
        yield from both(model, own.head.transform, mapping.head.transform)
        near = model.cls.predictions.transform.LayerNorm if hasattr(model, "cls") else model.lm_head.layer_norm
        yield from both(model, own.head.norm, near)


def transplanted(model: Any, mapping: Mapping) -> tuple[Transformer, list[Pair]]:
    """The reference model with their weights, and the pairs of parameters."""
    table = scheme("huggingface")(mapping.architecture)
    own = build(table, seed=0, dtype=torch.float64).eval()
    found = list(pairs(model, own, mapping))
    with torch.no_grad():
        for mine, other, cut in found:
            mine.copy_(cut(other))
    named = {id(parameter) for parameter in own.parameters()}
    seen = {id(mine) for mine, _, _ in found}
    missing = [name for name, p in own.named_parameters() if id(p) not in seen and not name.endswith("key.bias")]
    assert seen <= named and not missing, missing
    return own, found


def batch_for(mapping: Mapping) -> Batch:
    a = mapping.architecture
    if has_window(a.replace(seq_len=40)):  # more tokens than a window holds
        a = a.replace(seq_len=40)
    batch = synthetic_batch(a, default_statistics(a), 3, 0)
    away = {n: np.maximum(v, 4) for n in ("tokens", "decoder_tokens") if (v := getattr(batch, n)) is not None}
    keep = None
    capped = Settings.of(a).score_cap is not None  # where theirs makes not-a-numbers of padding in float64
    if batch.tokens is not None and not capped:  # sequences of 40, 29 and 5 tokens
        keep = np.arange(batch.tokens.shape[1]) < np.array([[40], [29], [5]])
    return replace(batch, **away, keep=keep)


def sinusoids_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the reference model the sines and cosines of their models, whose slowest wave and first position differ."""
    tables = {}
    for stack, n in ((model.model.decoder, model.config.max_target_positions), (model.model.encoder, STEPS)):
        positions = stack.embed_positions
        if hasattr(positions, "weights"):  # positions 0 and 1 are unused, as in fairseq
            tables[n] = positions.weights[2 : 2 + n]
        elif stack is model.model.encoder:
            tables[n] = positions.weight

    def table(length: int, d_model: int) -> Tensor:
        return 2**0.5 * tables[length].detach().double()

    monkeypatch.setattr(ends, "sinusoidal_table", table)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """Masks of transformers 4 are made in the default type, and hold the least number of the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def compare(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Relative errors of (the output at real tokens, the worst gradient of a parameter)."""
    mapping = mapping_of(model)
    own, found = transplanted(model, mapping)
    if mapping.architecture.positions == "sinusoidal":
        sinusoids_of(model, monkeypatch)
    batch = batch_for(mapping)
    out = model(**mapping.arguments(batch))
    expected = out.logits if hasattr(out, "logits") else out.last_hidden_state
    mine = own(**{**batch_tensors(batch), "targets": None})
    got = mine.hidden if mine.logits is None else mine.logits
    assert got.shape == expected.shape
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if batch.keep is not None and batch.decoder_tokens is None:
        weight = weight * torch.as_tensor(batch.keep)[..., None]
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    largest = max(float(mine.grad.norm()) for mine, _, _ in found if mine.grad is not None)
    errors = []
    for own_parameter, other, cut in found:
        if other.grad is None or own_parameter.grad is None:
            assert not other.requires_grad or not own_parameter.requires_grad
            continue
        wanted = cut(other.grad) if not is_offset(own_parameter, other, cut) else other.grad
        errors.append(float((own_parameter.grad - wanted).norm()) / max(float(wanted.norm()), 1e-3 * largest))
    real = weight != 0
    return relative_error(got[real], expected[real]), max(errors)


def is_offset(own: Tensor, other: Tensor, cut: Any) -> bool:
    """Whether our parameter is theirs plus a number (Gemma's gains): then the gradients are one and the same."""
    return own.shape == other.shape and not torch.equal(cut(torch.zeros_like(other)), torch.zeros_like(other))


@pytest.mark.parametrize("name", models(sorted(set(NAMES) - OTHER_PAIRS - ONE_NORM_LESS)))
def test_outputs_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = theirs(name)
    output, gradient = compare(model, monkeypatch)
    single = mapping_of(model).architecture.norm == "rmsnorm"  # these compute in float32 whatever the model's type
    assert output < (2e-6 if single else 1e-13) and gradient < (1e-5 if single else 1e-11)


@pytest.mark.parametrize("name", models(NAMES))
def test_parameters_are_counted(name: str) -> None:
    lacking = 32 * (name in ONE_NORM_LESS)
    model = theirs(name)
    pooler = {id(p) for path, p in model.named_parameters() if ".pooler." in f".{path}"}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in pooler)
    assert count_parameters(mapping_of(model).architecture)["total"] == trained + lacking


def test_bert_reads_segments() -> None:
    model = theirs("bert")
    own, _ = transplanted(model, mapping_of(model))
    tokens = torch.tensor([[5, 9, 12, 7, 9, 11, 8]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    found, other = own(tokens, segments=segments).logits, own(tokens).logits
    assert relative_error(found, model(tokens, token_type_ids=segments).logits) < 1e-13 < relative_error(found, other)


def test_t5_past_the_last_bucket_of_distances() -> None:
    model = theirs("t5")
    own, _ = transplanted(model, mapping_of(model))
    tokens = 4 + torch.arange(150).remainder(20)[None]
    expected = model(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits
    assert relative_error(own(tokens, decoder_tokens=tokens.flip(1)).logits, expected) < 2e-6
