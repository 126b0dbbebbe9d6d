"""Known architectures by name: what they have otherwise than their family, as published."""

from __future__ import annotations

from typing import Any, NamedTuple

from signalprop.errors import unknown


class Preset(NamedTuple):
    """The defaults of a family (`signalprop.families`; None: of an Architecture), and fields that differ."""

    family: str | None
    fields: dict[str, Any] = {}


_CONV, _FULL = ("gated_convolution", "feed_forward"), ("attention", "feed_forward")
_QWEN3 = {"n_layers": 36, "n_kv_heads": 8, "d_ff": 12288, "rotary_base": 1_000_000.0, "seq_len": 4096}
_NO_WINDOW = {"attention": {"window": 0}}

PRESETS: dict[str, Preset] = {
    # The papers' own encoder: three embedding tables, ReLU, no norm on the embeddings (TGS sections 2 and 3).
    "tgs": Preset(
        None,
        {
            "n_layers": 192, "d_model": 256, "n_heads": 4, "activation": "relu", "n_segments": 2, "vocab_size": 32000,
            "dropout": 0.1,
        },
    ),
    "bert-base": Preset("bert"),
    "bert-large": Preset("bert", {"n_layers": 24, "d_model": 1024}),
    "roberta-base": Preset("roberta", {"n_segments": 1, "norm_eps": 1e-5, "seq_len": 512}),
    "gpt2": Preset("gpt2"),
    "gpt2-medium": Preset("gpt2", {"n_layers": 24, "d_model": 1024}),
    "gpt2-large": Preset("gpt2", {"n_layers": 36, "d_model": 1280}),
    "gpt2-xl": Preset("gpt2", {"n_layers": 48, "d_model": 1600}),
    "llama-7b": Preset("llama"),
    "llama-130m": Preset("llama", {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 2048, "seq_len": 256}),
    "llama-1b": Preset("llama", {"n_layers": 24, "d_model": 2048, "n_heads": 32, "d_ff": 5461, "seq_len": 256}),
    "llama3-8b": Preset(
        "llama",
        {
            "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 128256, "rotary_base": 500_000.0, "seq_len": 8192,
            "norm_eps": 1e-5,
        },
    ),
    "mistral-7b": Preset("mistral", {"norm_eps": 1e-5, "seq_len": 2048, "settings": _NO_WINDOW}),
    "qwen2-0.5b": Preset(
        "qwen2",
        {
            "n_layers": 24, "d_model": 896, "n_heads": 14, "n_kv_heads": 2, "d_ff": 4864, "rotary_base": 1_000_000.0,
            "seq_len": 2048, "tied_embeddings": True,
        },
    ),
    "qwen3-0.6b": Preset(
        "qwen3",
        _QWEN3
        | {"n_layers": 28, "d_model": 1024, "n_heads": 16, "d_head": 128, "d_ff": 3072, "tied_embeddings": True},
    ),
    "qwen3-8b": Preset("qwen3", _QWEN3),
    "qwen3-30b-a3b": Preset(
        "qwen3_moe",
        {
            "n_layers": 48, "d_head": 128, "settings": {"experts": {"normalised": True}}, "rotary_base": 1_000_000.0,
            "seq_len": 4096,
        },
    ),
    "mixtral-8x7b": Preset("mixtral", {"seq_len": 4096}),
    "olmoe-1b-7b": Preset("olmoe", {"d_ff": 1024}),
    "gemma2-9b": Preset(
        "gemma2",
        {
            "n_layers": 42, "d_model": 3584, "n_heads": 16, "n_kv_heads": 8, "d_ff": 14336, "settings": _NO_WINDOW,
            "embedding_scale": 3584**0.5,
        },
    ),
    "lfm2-1.2b": Preset(
        "lfm2",
        {
            "n_layers": 16, "d_model": 2048, "n_heads": 32, "d_ff": 8192, "seq_len": 4096,
            "branches": tuple(_FULL if i in (2, 5, 8, 10, 12, 14) else _CONV for i in range(16)),
        },
    ),
    "gpt-neox": Preset("gpt_neox"),
    "vit-base": Preset("vit", {"n_classes": 1000}),
    "vit-small": Preset("vit", {"n_classes": 1000, "d_model": 384}),
    "t5-small": Preset("t5"),
    "t5-base": Preset("t5", {"n_layers": 12, "d_model": 768}),
    "opt-125m": Preset("opt"),
    "olmo2-7b": Preset(
        "olmo2", {"norm_eps": 1e-6, "vocab_size": 100352, "rotary_base": 500_000.0, "seq_len": 4096}
    ),
    "phi-1.5": Preset("phi"),
    "falcon-7b": Preset("falcon"),
    "deit-base": Preset("deit", {"n_classes": 1000}),
    "bart-base": Preset("bart", {"n_layers": 6, "d_model": 768, "attention_dropout": 0.1}),
    "bart-large": Preset("bart", {"attention_dropout": 0.1}),
    "whisper-tiny": Preset("whisper"),
    "whisper-base": Preset("whisper", {"n_layers": 6, "d_model": 512}),
    "whisper-small": Preset("whisper", {"n_layers": 12, "d_model": 768}),
    "s2t-small": Preset("speech_to_text", {"attention_dropout": 0.1}),
}  # fmt: skip


def preset_instead(name: object) -> str:
    """What to add to the refusal of a preset's name where a model is expected; '' of any other name."""
    if str(name) not in PRESETS:
        return ""
    return f"; {name} is a preset, a network without weights, which signalprop predict, measure and compare take"


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none.
    """
    if name not in tuple(PRESETS):  # a tuple, so that an unhashable name is merely unknown
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
