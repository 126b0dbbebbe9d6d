"""Known architectures by name: what they have otherwise than their family, as published."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from signalprop.errors import unknown


class Preset(NamedTuple):
    """The defaults of a family (`signalprop.families`; None: of an Architecture), and fields that differ."""

    family: str | None
    fields: dict[str, Any]


def _like(family: str | None, **fields: Any) -> Preset:
    return Preset(family, fields)


_CONV, _FULL = ("gated_convolution", "feed_forward"), ("attention", "feed_forward")
_QWEN3 = {"n_layers": 36, "n_kv_heads": 8, "d_ff": 12288, "rotary_base": 1_000_000.0, "seq_len": 4096}
_NO_WINDOW = {"attention": {"window": 0}}

PRESETS: dict[str, Preset] = {
    # The papers' encoder: three embedding tables, ReLU, no norm on the embeddings (TGS sections 2 and 3).
    "tgs": _like(
        None, n_layers=192, d_model=256, n_heads=4, activation="relu", n_segments=2, vocab_size=32000, dropout=0.1
    ),
    "bert-base": _like("bert"),
    "bert-large": _like("bert", n_layers=24, d_model=1024),
    "roberta-base": _like("roberta", n_segments=1, norm_eps=1e-05, seq_len=512),
    "gpt2": _like("gpt2"),
    "gpt2-medium": _like("gpt2", n_layers=24, d_model=1024),
    "gpt2-large": _like("gpt2", n_layers=36, d_model=1280),
    "gpt2-xl": _like("gpt2", n_layers=48, d_model=1600),
    "llama-7b": _like("llama"),
    "llama-130m": _like("llama", n_layers=12, d_model=768, n_heads=12, d_ff=2048, seq_len=256),
    "llama-1b": _like("llama", n_layers=24, d_model=2048, n_heads=32, d_ff=5461, seq_len=256),
    "llama3-8b": _like(
        "llama", n_kv_heads=8, d_ff=14336, vocab_size=128256, rotary_base=500000.0, seq_len=8192, norm_eps=1e-05
    ),
    "mistral-7b": _like("mistral", norm_eps=1e-05, seq_len=2048, settings=_NO_WINDOW),
    "qwen2-0.5b": _like(
        "qwen2",
        n_layers=24,
        d_model=896,
        n_heads=14,
        n_kv_heads=2,
        d_ff=4864,
        rotary_base=1000000.0,
        seq_len=2048,
        tied_embeddings=True,
    ),
    "qwen3-0.6b": _like(
        "qwen3",
        **(
            _QWEN3
            | {"n_layers": 28, "d_ff": 3072, "d_model": 1024, "n_heads": 16, "d_head": 128, "tied_embeddings": True}
        ),
    ),
    "qwen3-8b": _like("qwen3", **_QWEN3),
    "qwen3-30b-a3b": _like(
        "qwen3_moe",
        n_layers=48,
        d_head=128,
        settings={"experts": {"normalised": True}},
        rotary_base=1000000.0,
        seq_len=4096,
    ),
    "mixtral-8x7b": _like("mixtral", seq_len=4096),
    "olmoe-1b-7b": _like("olmoe", d_ff=1024),
    "gemma2-9b": _like(
        "gemma2",
        n_layers=42,
        d_model=3584,
        n_heads=16,
        n_kv_heads=8,
        d_ff=14336,
        settings=_NO_WINDOW,
        embedding_scale=3584**0.5,
    ),
    "lfm2-1.2b": _like(
        "lfm2",
        n_layers=16,
        d_model=2048,
        n_heads=32,
        d_ff=8192,
        seq_len=4096,
        branches=tuple(_FULL if i in (2, 5, 8, 10, 12, 14) else _CONV for i in range(16)),
    ),
    "gpt-neox": _like("gpt_neox"),
    "vit-base": _like("vit", n_classes=1000),
    "vit-small": _like("vit", n_classes=1000, d_model=384),
    "t5-small": _like("t5"),
    "t5-base": _like("t5", n_layers=12, d_model=768),
    "opt-125m": _like("opt"),
    "olmo2-7b": _like("olmo2", norm_eps=1e-06, vocab_size=100352, rotary_base=500000.0, seq_len=4096),
    "phi-1.5": _like("phi"),
    "falcon-7b": _like("falcon"),
    "deit-base": _like("deit", n_classes=1000),
    "bart-base": _like("bart", n_layers=6, d_model=768, attention_dropout=0.1),
    "bart-large": _like("bart", attention_dropout=0.1),
    "whisper-tiny": _like("whisper"),
    "whisper-base": _like("whisper", n_layers=6, d_model=512),
    "whisper-small": _like("whisper", n_layers=12, d_model=768),
    "s2t-small": _like("speech_to_text", attention_dropout=0.1),
}


def preset_instead(name: object) -> str:
    """What to add to the refusal of a preset's name where a model is expected; '' of any other name."""
    if _plain(name) not in _PLAIN:
        return ""
    return f"; {name} is a preset, a network without weights, which signalprop predict, measure and compare take"


def preset(name: str) -> Preset:
    """The preset of that name, however it is written: GPT2 and GPT-2 are gpt2."""
    found = _PLAIN.get(_plain(name))
    if found is None:
        raise unknown("preset", name, PRESETS)
    return PRESETS[found]


def _plain(name: object) -> str:
    return re.sub(r"[-_ ]", "", str(name)).lower()


_PLAIN = {_plain(name): name for name in PRESETS}
