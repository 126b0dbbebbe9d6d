"""The reference transformer against Hugging Face's implementations, with their weights copied into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from signalprop.models import Transformer, build
from signalprop.models.ends import Embeddings
from signalprop.models.sublayers import Sublayer
from signalprop.network.architecture import Architecture
from signalprop.schemes import scheme

TOKENS = torch.tensor([[5, 9, 2, 7, 9, 1, 3], [4, 4, 8, 6, 2, 9, 5]])
KEEP = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


def perturbed(model: Any) -> Any:
    """The model in float64 and evaluation mode, with every parameter (gains and biases too) moved off its start."""
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ours(model: Any, **changes: Any) -> Transformer:
    a = Architecture.from_hf(model, **changes)
    return build(scheme("huggingface")(a), seed=0, dtype=torch.float64).eval()


def copy(into: nn.Module, module: nn.Module, rows: slice = slice(None), transposed: bool = False) -> None:
    """Weight and bias of a linear map (or of some of its outputs), a norm or a table."""
    with torch.no_grad():
        weight = module.weight.T if transposed else module.weight
        assert into.weight.shape == weight[rows].shape
        into.weight.copy_(weight[rows])
        theirs = getattr(module, "bias", None)
        assert (theirs is None) == (getattr(into, "bias", None) is None)
        if theirs is not None:
            into.bias.copy_(theirs[rows])


def split(into: nn.Module, fused: nn.Module, transposed: bool) -> None:
    d = into.query.weight.shape[0]
    for i, role in enumerate(("query", "key", "value")):
        copy(getattr(into, role), fused, slice(i * d, (i + 1) * d), transposed)


def pairs(sublayers: list[Sublayer]) -> list[tuple[Sublayer, Sublayer]]:
    return list(zip(sublayers[::2], sublayers[1::2], strict=True))


def tables(into: Embeddings, token: nn.Module, position: nn.Module | None = None) -> None:
    copy(into.token, token)
    if position is not None:
        copy(into.position, position)


def gpt2() -> tuple[Any, Transformer]:
    config = hf.GPT2Config(attn_implementation="eager", vocab_size=20, n_positions=16, n_embd=24, n_layer=3, n_head=3)
    model = perturbed(hf.GPT2LMHeadModel(config))
    own = ours(model)
    tables(own.decoder.embedding, model.transformer.wte, model.transformer.wpe)
    for (attention, feed_forward), block in zip(pairs(own.sublayers()), model.transformer.h, strict=True):
        copy(attention.norm, block.ln_1)
        split(attention.branch.function, block.attn.c_attn, transposed=True)
        copy(attention.branch.function.output, block.attn.c_proj, transposed=True)
        copy(feed_forward.norm, block.ln_2)
        copy(feed_forward.branch.function.up, block.mlp.c_fc, transposed=True)
        copy(feed_forward.branch.function.down, block.mlp.c_proj, transposed=True)
    copy(own.decoder.final_norm, model.transformer.ln_f)
    return model, own


def _llama_like(model: Any) -> tuple[Any, Transformer]:
    own = ours(model)
    tables(own.decoder.embedding, model.model.embed_tokens)
    for (attention, feed_forward), block in zip(pairs(own.sublayers()), model.model.layers, strict=True):
        copy(attention.norm, block.input_layernorm)
        copy(feed_forward.norm, block.post_attention_layernorm)
        for role, name in zip(
            ("query", "key", "value", "output"), ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True
        ):
            copy(getattr(attention.branch.function, role), getattr(block.self_attn, name))
        for role in ("gate", "up", "down"):
            copy(getattr(feed_forward.branch.function, role), getattr(block.mlp, f"{role}_proj"))
    copy(own.decoder.final_norm, model.model.norm)
    copy(own.head, model.lm_head)
    return model, own


SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def llama() -> tuple[Any, Transformer]:
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, rope_theta=500.0)
    return _llama_like(perturbed(hf.LlamaForCausalLM(config)))


def qwen2() -> tuple[Any, Transformer]:
    return _llama_like(perturbed(hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, num_key_value_heads=4))))


def qwen3() -> tuple[Any, Transformer]:
    model = perturbed(hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)))
    for block in model.model.layers:  # a parametrization knows QK-norm gains only as the score scale
        nn.init.ones_(block.self_attn.q_norm.weight)
        nn.init.ones_(block.self_attn.k_norm.weight)
    return _llama_like(model)


def gpt_neox() -> tuple[Any, Transformer]:
    config = hf.GPTNeoXConfig(**SMALL, rotary_pct=0.5, max_position_embeddings=16)
    model = perturbed(hf.GPTNeoXForCausalLM(config))
    own = ours(model)
    tables(own.decoder.embedding, model.gpt_neox.embed_in)
    for (attention, feed_forward), block in zip(pairs(own.sublayers()), model.gpt_neox.layers, strict=True):
        copy(attention.norm, block.input_layernorm)
        copy(feed_forward.norm, block.post_attention_layernorm)
        fused = block.attention.query_key_value  # features of a head stand together: query, key, value
        order = torch.arange(fused.weight.shape[0]).view(4, 3, -1).transpose(0, 1).flatten()
        with torch.no_grad():
            fused_sorted = nn.Linear(32, len(order), dtype=torch.float64)
            fused_sorted.weight.copy_(fused.weight[order])
            fused_sorted.bias.copy_(fused.bias[order])
        split(attention.branch.function, fused_sorted, transposed=False)
        copy(attention.branch.function.output, block.attention.dense)
        copy(feed_forward.branch.function.up, block.mlp.dense_h_to_4h)
        copy(feed_forward.branch.function.down, block.mlp.dense_4h_to_h)
    copy(own.decoder.final_norm, model.gpt_neox.final_layer_norm)
    copy(own.head, model.embed_out if hasattr(model, "embed_out") else model.lm_head)
    return model, own


def bert() -> tuple[Any, Transformer]:
    model = perturbed(hf.BertForMaskedLM(hf.BertConfig(**SMALL, max_position_embeddings=16)))
    own = ours(model)
    embeddings = model.bert.embeddings
    tables(own.encoder.embedding, embeddings.word_embeddings, embeddings.position_embeddings)
    copy(own.encoder.embedding.segment, embeddings.token_type_embeddings)
    copy(own.encoder.embedding.norm, embeddings.LayerNorm)
    for (attention, feed_forward), block in zip(pairs(own.sublayers()), model.bert.encoder.layer, strict=True):
        for role in ("query", "key", "value"):
            copy(getattr(attention.branch.function, role), getattr(block.attention.self, role))
        copy(attention.branch.function.output, block.attention.output.dense)
        copy(attention.norm, block.attention.output.LayerNorm)
        copy(feed_forward.branch.function.up, block.intermediate.dense)
        copy(feed_forward.branch.function.down, block.output.dense)
        copy(feed_forward.norm, block.output.LayerNorm)
    transform = model.cls.predictions.transform
    copy(own.head.transform, transform.dense)
    copy(own.head.norm, transform.LayerNorm)
    copy(own.head, model.cls.predictions.decoder)
    return model, own


@pytest.mark.parametrize("make", [gpt2, llama, qwen2, qwen3, gpt_neox, bert], ids=lambda make: make.__name__)
def test_logits_are_those_of_hugging_face(make: Callable[[], tuple[Any, Transformer]]) -> None:
    model, own = make()
    with torch.no_grad():
        for keep in (None, KEEP):
            expected = model(TOKENS, attention_mask=keep).logits
            got = own(TOKENS, keep=None if keep is None else keep.bool()).logits
            real = torch.ones_like(TOKENS, dtype=torch.bool) if keep is None else keep.bool()
            assert_close(got[real], expected[real])


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert float(expected.std()) > 1e-2
    # rotary angles are formed in float32 on both sides, in another order
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))


def test_bert_reads_segments() -> None:
    model, own = bert()
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        assert_close(own(TOKENS, segments=segments).logits, model(TOKENS, token_type_ids=segments).logits)


def test_t5_encoder_decoder_with_relative_positions() -> None:
    config = hf.T5Config(
        vocab_size=20,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        tie_word_embeddings=True,
    )
    model = perturbed(hf.T5ForConditionalGeneration(config))
    own = ours(model)
    copy(own.encoder.embedding.token, model.shared)
    for stack, theirs in ((own.encoder, model.encoder), (own.decoder, model.decoder)):
        copy(stack.relative.table, theirs.block[0].layer[0].SelfAttention.relative_attention_bias)
        copy(stack.final_norm, theirs.final_layer_norm)
        layers = [layer for block in theirs.block for layer in block.layer]
        for sublayer, layer in zip(stack.sublayers, layers, strict=True):
            copy(sublayer.norm, layer.layer_norm)
            function = sublayer.branch.function
            if hasattr(layer, "DenseReluDense"):
                copy(function.up, layer.DenseReluDense.wi)
                copy(function.down, layer.DenseReluDense.wo)
            else:
                attention = layer.SelfAttention if hasattr(layer, "SelfAttention") else layer.EncDecAttention
                for role, name in zip(("query", "key", "value", "output"), "qkvo", strict=True):
                    copy(getattr(function, role), getattr(attention, name))
    longer = torch.arange(150).remainder(20).expand(2, -1)  # past the last distance bucket
    with torch.no_grad():
        for tokens, keep in ((TOKENS, KEEP), (longer, None)):
            decoder_tokens = tokens.flip(1)
            expected = model(input_ids=tokens, attention_mask=keep, decoder_input_ids=decoder_tokens).logits
            got = own(tokens, keep=None if keep is None else keep.bool(), decoder_tokens=decoder_tokens).logits
            assert_close(got, expected)


def test_vit_on_patches() -> None:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    model = perturbed(hf.ViTForImageClassification(config))
    own = ours(model)
    embeddings = model.vit.embeddings
    with torch.no_grad():
        own.encoder.embedding.patch.weight.copy_(embeddings.patch_embeddings.projection.weight.flatten(1))
        own.encoder.embedding.patch.bias.copy_(embeddings.patch_embeddings.projection.bias)
        # Hugging Face adds row 0 of the position table to the class token, as we do
        own.encoder.embedding.class_token.copy_(embeddings.cls_token.flatten())
        own.encoder.embedding.position.weight.copy_(embeddings.position_embeddings[0])
    for (attention, feed_forward), block in zip(pairs(own.sublayers()), vit_layers(model), strict=True):
        copy(attention.norm, block.layernorm_before)
        copy(feed_forward.norm, block.layernorm_after)
        linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
        targets = [attention.branch.function.query, attention.branch.function.key, attention.branch.function.value]
        targets += [
            attention.branch.function.output,
            feed_forward.branch.function.up,
            feed_forward.branch.function.down,
        ]
        for target, linear in zip(targets, linears, strict=True):
            copy(target, linear)
    copy(own.encoder.final_norm, model.vit.layernorm)
    copy(own.head, model.classifier)
    torch.manual_seed(1)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(3, 16, 48)
    with torch.no_grad():
        assert_close(own(patches).logits, model(images).logits)


def vit_layers(model: Any) -> Any:
    return model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer
