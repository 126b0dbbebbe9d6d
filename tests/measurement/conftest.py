"""Tiny models of every supported Hugging Face family, built from configurations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 97


def _common(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": VOCABULARY, "max_position_embeddings": 40, "initializer_range": 0.2, "pad_token_id": 1,
        "bos_token_id": 2, "eos_token_id": 3,
    } | changes  # fmt: skip


def _gpt2(**changes: Any) -> dict[str, Any]:
    return {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 40,
        "initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 3,
    } | changes  # fmt: skip


def _t5(**changes: Any) -> dict[str, Any]:
    return {
        "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0,
    } | changes  # fmt: skip


def _vit(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 10, "initializer_range": 0.2,
    } | changes  # fmt: skip


def _opt(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": VOCABULARY,
        "max_position_embeddings": 40, "init_std": 0.2, "dropout": 0.1, "word_embed_proj_dim": 32,
    } | changes  # fmt: skip


def _fairseq(**changes: Any) -> dict[str, Any]:
    return {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY,
        "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2, "dropout": 0.1,
        "init_std": 0.2,
    } | changes  # fmt: skip


def _speech(**changes: Any) -> dict[str, Any]:
    return _fairseq(max_target_positions=20, **changes)


_WHISPER = {
    "max_source_positions": 12, "num_mel_bins": 6, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_S2T = {"max_source_positions": 48, "input_feat_per_channel": 6, "conv_channels": 24}
_FALCON = {"hidden_dropout": 0.1, "ffn_hidden_size": 48, "bias": True}
_DROP = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_GQA = {"num_key_value_heads": 2}
_GEMMA3 = {
    "head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 9, "sliding_window_pattern": 2,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("sliding_attention", 10_000.0), ("full_attention", 50_000.0))
    },
}  # fmt: skip
# angles of another base are not the same to the last bit
_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_OLMO3 = {"sliding_window": 9, **_BASE}
_GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 8.0,
}  # fmt: skip
_EXAONE4 = {"sliding_window": 9, "sliding_window_pattern": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _common(**_DROP)),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _common(**_DROP)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _gpt2()),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _common(**_GQA)),
    "mistral": ("MistralForCausalLM", "MistralConfig", _common(**_GQA, sliding_window=9)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _common(**_GQA)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _common(**_GQA, head_dim=6)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        _common(
            num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=24,
            mlp_only_layers=[0], num_key_value_heads=2, experts_implementation="eager",
        ),
    ),
    "flex_olmo": (
        "FlexOlmoForCausalLM", "FlexOlmoConfig",
        _common(num_experts=6, num_experts_per_tok=2, num_key_value_heads=2, experts_implementation="eager"),
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM", "Glm4MoeConfig",
        _common(
            num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, n_group=4, topk_group=2,
            routed_scaling_factor=2.5, num_key_value_heads=2, experts_implementation="eager",
        ),
    ),
    "lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        _common(
            **_GQA, block_auto_adjust_ff_dim=False, pad_token_id=0,
            full_attn_idxs=[1],
        ),
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _common(**_GQA, head_dim=6)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _common(**_GQA, **_GEMMA3)),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", _common(**_DROP)),
    "vit": ("ViTForImageClassification", "ViTConfig", _vit(**_DROP)),
    "t5": ("T5ForConditionalGeneration", "T5Config", _t5()),
    "t5-gated": ("T5ForConditionalGeneration", "T5Config", _t5(feed_forward_proj="gated-gelu")),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _common(hidden_dropout=0.1)),
    "gpt_neox-sequential": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _common(use_parallel_residual=False)),
    "opt": ("OPTForCausalLM", "OPTConfig", _opt()),
    "opt-post": ("OPTForCausalLM", "OPTConfig", _opt(do_layer_norm_before=False)),
    "opt-open": ("OPTForCausalLM", "OPTConfig", _opt(_remove_final_layer_norm=True)),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _common(**_GQA)),
    "phi": ("PhiForCausalLM", "PhiConfig", _common(resid_pdrop=0.1, embd_pdrop=0.1)),
    "falcon": ("FalconForCausalLM", "FalconConfig", _common(**_FALCON)),
    "falcon-grouped": (
        "FalconForCausalLM", "FalconConfig", _common(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon-one-norm": (
        "FalconForCausalLM", "FalconConfig",
        _common(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon-heads": ("FalconForCausalLM", "FalconConfig", _common(**_FALCON, multi_query=False)),
    "falcon-sequential": (
        "FalconForCausalLM", "FalconConfig", _common(parallel_attn=False, ffn_hidden_size=48),
    ),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _vit(**_DROP)),
    "bart": ("BartForConditionalGeneration", "BartConfig", _fairseq(max_position_embeddings=40)),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _speech(**_WHISPER)),
    "speech_to_text": ("Speech2TextForConditionalGeneration", "Speech2TextConfig", _speech(**_S2T)),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", _common(**_DROP)),
    "camembert": ("CamembertForMaskedLM", "CamembertConfig", _common(**_DROP)),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _t5()),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _common(**_GQA, **_BASE, no_rope_layer_interval=2)),
    "internlm3": ("LlamaForCausalLM", "InternLM3Config", _common(**_GQA, head_dim=6)),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", _common(**_GQA)),
    "ministral": ("MinistralForCausalLM", "MinistralConfig", _common(**_GQA, head_dim=6)),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", _common(**_GQA, head_dim=6)),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", _common(**_GQA, **_OLMO3)),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", _common(**_GQA, **_EXAONE4)),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", _common(**_GQA, head_dim=6)),
    "jais2": ("Jais2ForCausalLM", "Jais2Config", _common(**_GQA)),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _common(**_GQA)),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        _common(**_GQA, head_dim=6, query_pre_attn_scalar=9, sliding_window=9, attn_logit_softcapping=2.0,
                final_logit_softcapping=None),
    ),
    **{
        f"gemma4{name}": (
            "Gemma4ForCausalLM", "Gemma4TextConfig",
            _common(
                **_GQA, head_dim=6, global_head_dim=12, sliding_window=9, hidden_size_per_layer_input=0,
                layer_types=["sliding_attention", "full_attention", "full_attention"], **more,
            ),
        )
        for name, more in (("", {}), ("-shared", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}))
    },
    "granite": ("GraniteForCausalLM", "GraniteConfig", _common(**_GQA, **_GRANITE)),
    "cohere": ("CohereForCausalLM", "CohereConfig", _common(**_GQA, logit_scale=0.5)),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", _common(**_GQA, logit_scale=1.0, sliding_window=9)),
    "glm": ("GlmForCausalLM", "GlmConfig", _common(**_GQA, head_dim=8)),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _common(**_GQA, head_dim=8)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _common(**_GQA, resid_pdrop=0.1, embd_pdrop=0.1, sliding_window=9)),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", _common(local_attention=10)),
    "cwm": ("CwmForCausalLM", "CwmConfig", _common(**_GQA, **_BASE, head_dim=6, sliding_window=9)),
    "eurobert": ("EuroBertForMaskedLM", "EuroBertConfig", _common(**_GQA)),
    "ernie": ("ErnieForMaskedLM", "ErnieConfig", _common(**_DROP)),
    "data2vec-text": ("Data2VecTextForMaskedLM", "Data2VecTextConfig", _common(**_DROP)),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _fairseq(max_position_embeddings=40)),
    "mpnet-bare": ("MPNetModel", "MPNetConfig", _common(**_DROP)),
    "bert-bare": ("BertModel", "BertConfig", _common(**_DROP)),
    "gpt2-bare": ("GPT2Model", "GPT2Config", _gpt2()),
    "llama-bare": ("LlamaModel", "LlamaConfig", _common(**_GQA)),
    "t5-encoder": ("T5EncoderModel", "T5Config", _t5()),
    "bart-bare": ("BartModel", "BartConfig", _fairseq(max_position_embeddings=40)),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", _common(**_DROP)),
}  # fmt: skip
# Of these another model above has the same modules; they are tried with the slow tests.
ALIKE = {
    "mistral", "qwen2", "internlm3", "arcee", "ministral", "seed_oss", "cwm", "smollm3", "olmo3", "jais2", "eurobert",
    "roberta", "xlm-roberta", "camembert", "ernie", "data2vec-text", "mbart", "mt5", "exaone4", "hunyuan_v1_dense",
    "bart-bare", "mpnet-bare", "gpt2-bare",
}  # fmt: skip


def models(names: Iterable[str] = MODELS) -> list[Any]:
    """Names of models as parameters of a test."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in sorted(names)]


# a release of transformers may be older than a family
AVAILABLE = set(dir(transformers))  # names alone: the modules are imported by the tests that need them
MODELS = {name: row for name, row in MODELS.items() if {row[0], row[1]} <= AVAILABLE}
Build = Callable[..., nn.Module]


def fresh(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A freshly seeded model of a row of MODELS, with other numbers in its configuration."""
    torch.manual_seed(seed)
    model_class, config_class, options = MODELS[name]
    model: nn.Module = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**options, **changes}))
    return model


def moved(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The same with biases and gains away from 0 and 1, so that nothing hides behind them."""
    model = fresh(name, seed, **changes)
    with torch.no_grad():
        for at, p in model.named_parameters():
            if p.ndim == 1 and "score" not in at:
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture
def build() -> Build:
    """build(name, **changes of the config) -> a freshly seeded model."""
    return moved


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
