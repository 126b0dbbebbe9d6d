"""read_parametrization against torch.std and by-hand root mean squares, fused maps included."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from signalprop.attachment.families import mapping_of
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.errors import InputError
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import ROLES, Parametrization

from .conftest import models


def rms(tensor: torch.Tensor) -> float:
    return float((tensor.detach().double() ** 2).mean().sqrt())


@pytest.mark.parametrize("name", models())
def test_every_family_reads_and_round_trips(build: Any, name: str) -> None:
    p = read_parametrization(build(name))
    assert p.scheme == "as is" and set(p.distribution.values()) == {"measured"}
    for role in ROLES:
        present = role_mask(p.architecture, role)
        assert (p.weights[role][present] > 0.01).all() and (p.weights[role][~present] == 0).all()
    assert Parametrization.from_json(p.to_json()) == p


def test_root_mean_square_is_the_standard_deviation_of_a_centred_weight(build: Any) -> None:
    model = build("llama", hidden_size=64)
    p = read_parametrization(model)
    for i, layer in enumerate(model.model.layers):
        pairs = {
            ("query", 0): layer.self_attn.q_proj, ("key", 0): layer.self_attn.k_proj,
            ("value", 0): layer.self_attn.v_proj,
            ("output", 0): layer.self_attn.o_proj, ("gate", 1): layer.mlp.gate_proj, ("up", 1): layer.mlp.up_proj,
            ("down", 1): layer.mlp.down_proj,
        }  # fmt: skip
        for (role, offset), linear in pairs.items():
            got = p.weights[role][2 * i + offset]
            assert got == pytest.approx(rms(linear.weight), rel=1e-12)
            assert got == pytest.approx(float(linear.weight.detach().std()), rel=5e-3)
        assert p.norm_gain[2 * i] == pytest.approx(rms(layer.input_layernorm.weight))
        assert p.norm_gain[2 * i + 1] == pytest.approx(rms(layer.post_attention_layernorm.weight))
    assert p.embedding.token == pytest.approx(
        rms(torch.cat([model.model.embed_tokens.weight[:1], model.model.embed_tokens.weight[2:]]))
    )
    assert p.head.weight == pytest.approx(rms(model.lm_head.weight))
    assert p.head.final_norm_gain == pytest.approx(rms(model.model.norm.weight))
    assert not p.architecture.tied_embeddings and p.embedding.position == 0


def test_gpt2_splits_the_columns_of_its_conv1d(build: Any) -> None:
    model = build("gpt2")
    with torch.no_grad():
        for i, scale in enumerate((1.0, 3.0, 9.0)):
            model.transformer.h[1].attn.c_attn.weight[:, 32 * i : 32 * (i + 1)] *= scale
            model.transformer.h[1].attn.c_attn.bias[32 * i : 32 * (i + 1)] = scale
    p = read_parametrization(model)
    fused = model.transformer.h[1].attn.c_attn.weight
    for i, (role, scale) in enumerate(zip(("query", "key", "value"), (1.0, 3.0, 9.0), strict=True)):
        assert p.weights[role][2] == pytest.approx(rms(fused[:, 32 * i : 32 * (i + 1)]))
        assert p.biases[role][2] == pytest.approx(scale)
    assert p.architecture.tied_embeddings and p.head.weight == p.embedding.token


def test_neox_splits_the_rows_of_each_head(build: Any) -> None:
    model = build("gpt_neox")
    fused = model.gpt_neox.layers[2].attention.query_key_value
    with torch.no_grad():
        rows = fused.weight.view(4, 3, 8, 32)  # heads, (query, key, value), features of a head, inputs
        for i, value in enumerate((0.1, 0.2, 0.3)):
            rows[:, i] = value
            fused.bias.view(4, 3, 8)[:, i] = 10 * value
    p = read_parametrization(model)
    for role, value in zip(("query", "key", "value"), (0.1, 0.2, 0.3), strict=True):
        assert p.weights[role][4] == pytest.approx(value) and p.biases[role][4] == pytest.approx(10 * value)
    assert p.parallel[5] and not p.parallel[4]


def test_the_ends(build: Any) -> None:
    bert = build("bert")
    e = read_parametrization(bert).embedding
    embeddings = bert.bert.embeddings
    assert e.position == pytest.approx(rms(embeddings.position_embeddings.weight))
    assert e.segment == pytest.approx(rms(embeddings.token_type_embeddings.weight))
    assert e.norm_gain == pytest.approx(rms(embeddings.LayerNorm.weight))
    assert read_parametrization(bert).head.transform == pytest.approx(rms(bert.cls.predictions.transform.dense.weight))
    roberta = build("roberta")
    assert read_parametrization(roberta).head.transform == pytest.approx(rms(roberta.lm_head.dense.weight))
    vit = build("vit")
    p = read_parametrization(vit)
    patch = vit.vit.embeddings.patch_embeddings.projection
    assert (p.embedding.token, p.embedding.patch_bias) == (
        pytest.approx(rms(patch.weight)),
        pytest.approx(rms(patch.bias)),
    )
    assert p.head.weight == pytest.approx(rms(vit.classifier.weight))
    t5 = read_parametrization(build("t5"))
    assert t5.head.scale == pytest.approx(32**-0.5) and (t5.score_scale == 1).all()
    assert t5.architecture.tied_embeddings


def test_gains_of_gemma_and_of_qk_norm(build: Any) -> None:
    gemma = build("gemma")
    p = read_parametrization(gemma)
    assert p.norm_gain[2] == pytest.approx(rms(1 + gemma.model.layers[1].input_layernorm.weight))
    assert p.embedding.scale == pytest.approx(math.sqrt(32))
    qwen = build("qwen3")
    attention = qwen.model.layers[1].self_attn
    expected = rms(attention.q_norm.weight) * rms(attention.k_norm.weight) / math.sqrt(6)
    assert read_parametrization(qwen).score_scale[2] == pytest.approx(expected)


class TestRefusals:
    def test_a_parameter_that_is_not_finite(self, build: Any) -> None:
        model = build("llama")
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
        with pytest.raises(InputError, match="layer 2 feed-forward down: the parameter holds NaN or infinite values"):
            read_parametrization(model)

    def test_missing_roles_and_rows(self, build: Any) -> None:
        model = build("gpt2")
        mapping = mapping_of(model)
        first = mapping.sublayers[0]
        fewer = {role: value for role, value in first.weights.items() if role != "value"}
        with pytest.raises(InputError, match="layer 0 attention value: the mapping names no weight of this role"):
            read_parametrization(
                model, replace(mapping, sublayers=[replace(first, weights=fewer), *mapping.sublayers[1:]])
            )
        whole = {**first.weights, "value": "transformer.h.0.attn.c_attn"}
        with pytest.raises(
            InputError, match="layer 0 attention value: the weight has 3072 entries, the architecture 32 x 32"
        ):
            read_parametrization(
                model, replace(mapping, sublayers=[replace(first, weights=whole), *mapping.sublayers[1:]])
            )

    def test_missing_ends(self, build: Any) -> None:
        model = build("gpt2")
        mapping = mapping_of(model)
        for end, name, message in (
            ("embedding", "token", "names no token"),
            ("embedding", "position", "names no position"),
        ):
            broken = replace(mapping, **{end: replace(getattr(mapping, end), **{name: None})})
            with pytest.raises(InputError, match=message):
                read_parametrization(model, broken)
        bert = build("bert")
        mapping = mapping_of(bert)
        with pytest.raises(InputError, match="names no transform"):
            read_parametrization(bert, replace(mapping, head=replace(mapping.head, transform=None)))
