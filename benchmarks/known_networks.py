"""Networks that are known to train, and starts that are known to fail: what verdicts are held against.

Shapes are those that were published. Initialisations are the labs' own where these are public, else what transformers
gives the family (`default`). A third of the rows, by the digest of their names, is kept apart: bounds are set without.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme

LENGTH = 128  # tokens, at most


class Known(NamedTuple):
    """One network.

    Attributes:
        name: of the model, or of what is wrong. source: where shape, start and outcome stand.
        preset: its own name. fields: what an Architecture of it has otherwise. scheme, options: its start.
        columns: changes of the table, `Parametrization.with_columns`. expected: of a failure, findings one of which
            tells it; () of what trains.
    """

    name: str
    source: str
    preset: str | None
    fields: dict[str, Any]
    scheme: str
    options: Mapping[str, Any] = MappingProxyType({})
    columns: Mapping[str, float] = MappingProxyType({})
    expected: tuple[str, ...] = ()

    @property
    def kept_apart(self) -> bool:
        """Whether it is looked at only in the end."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0

    def table(self) -> Parametrization:
        """Its numbers."""
        a = Architecture(**self.fields) if self.preset is None else Architecture.preset(self.preset, **self.fields)
        if a.input == "tokens":
            changes = {"seq_len": min(a.seq_len, LENGTH)}
            if a.target_len:
                changes["target_len"] = min(a.target_len, LENGTH)
            a = a.replace(**changes)
        made = scheme(self.scheme, **self.options)(a)
        if not self.columns:
            return made
        columns = {}
        for name, factor in self.columns.items():
            given = made.weights[name.removeprefix("weight__")] if name.startswith("weight__") else getattr(made, name)
            columns[name] = given * factor
        return made.with_columns(**columns)


def _gpt(n_layers: int, d_model: int, n_heads: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "decoder", "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads,
            "vocab_size": 50257, "seq_len": LENGTH, "activation": "gelu_tanh", "dropout": 0.0} | fields  # fmt: skip


def _llama(n_layers: int, d_model: int, n_heads: int, d_ff: int, n_kv_heads: int = 0, **fields: Any) -> dict[str, Any]:
    more = {"n_kv_heads": n_kv_heads} if n_kv_heads else {}
    return {"kind": "decoder", "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "d_ff": d_ff,
            "gated": True, "activation": "silu", "norm": "rmsnorm", "positions": "rotary", "bias": False,
            "norm_bias": False, "vocab_size": 32000, "tied_embeddings": False,
            "seq_len": LENGTH} | more | fields  # fmt: skip


def _encoder(n_layers: int, d_model: int, n_heads: int = 4, **fields: Any) -> dict[str, Any]:
    return {"kind": "encoder", "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads,
            "vocab_size": 32000, "seq_len": LENGTH, "activation": "gelu", "norm_placement": "post",
            "dropout": 0.1} | fields  # fmt: skip


def _post(n_layers: int, d_model: int, n_heads: int, **fields: Any) -> dict[str, Any]:
    return _gpt(n_layers, d_model, n_heads, norm_placement="post", **fields)


_PYTHIA = {"70M": (6, 512, 8), "160M": (12, 768, 12), "410M": (24, 1024, 16), "1B": (16, 2048, 8),
           "1.4B": (24, 2048, 16), "2.8B": (32, 2560, 32), "6.9B": (32, 4096, 32), "12B": (36, 5120, 40)}  # fmt: skip
_CEREBRAS = {"111M": (10, 768, 12), "256M": (14, 1088, 17), "590M": (18, 1536, 12), "1.3B": (24, 2048, 16),
             "2.7B": (32, 2560, 32), "6.7B": (32, 4096, 32), "13B": (40, 5120, 40)}  # fmt: skip
_GPT3 = {"350M": (24, 1024, 16), "760M": (24, 1536, 16), "2.7B": (32, 2560, 32), "6.7B": (32, 4096, 32),
         "13B": (40, 5120, 40), "175B": (96, 12288, 96)}  # fmt: skip
_OPT = {"1.3B": (24, 2048, 32), "2.7B": (32, 2560, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56),
        "66B": (64, 9216, 72), "175B": (96, 12288, 96)}  # fmt: skip
_MEGATRON = {"1.2B": (40, 1536, 16), "2.5B": (54, 1920, 20), "8.3B": (72, 3072, 24)}
_LLAMA = {"13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920), "65B": (80, 8192, 64, 22016)}
_NEOX = {
    "positions": "rotary",
    "rotary_fraction": 0.25,
    "parallel": True,
    "tied_embeddings": False,
    "activation": "gelu",
}
_PRESETS = {
    "GPT-2": "gpt2", "GPT-2 medium": "gpt2-medium", "GPT-2 large": "gpt2-large", "GPT-2 XL": "gpt2-xl",
    "OPT 125M": "opt-125m", "Llama 7B": "llama-7b", "BERT base": "bert-base", "BERT large": "bert-large",
    "RoBERTa base": "roberta-base", "ViT base": "vit-base", "ViT small": "vit-small", "DeiT base": "deit-base",
    "T5 small": "t5-small", "T5 base": "t5-base", "BART base": "bart-base", "BART large": "bart-large",
    "Llama 3 8B": "llama3-8b", "Mistral 7B": "mistral-7b", "Mixtral 8x7B": "mixtral-8x7b",
    "OLMoE 1B-7B": "olmoe-1b-7b", "Qwen2 0.5B": "qwen2-0.5b", "Qwen3 8B": "qwen3-8b",
    "Qwen3 30B-A3B": "qwen3-30b-a3b", "Gemma 2 9B": "gemma2-9b", "LFM2 1.2B": "lfm2-1.2b", "Phi 1.5": "phi-1.5",
    "Falcon 7B": "falcon-7b", "OLMo 2 7B": "olmo2-7b", "Whisper tiny": "whisper-tiny",
    "Whisper small": "whisper-small", "S2T small": "s2t-small",
}  # fmt: skip

GOOD: list[Known] = [
    *(Known(name, "released model; default", preset, {}, "huggingface") for name, preset in _PRESETS.items()),
    *(Known(f"GPT-3 {n}", "Brown et al. 2020, table 2.1; initialisation of GPT-2", None, _gpt(*shape), "gpt2")
      for n, shape in _GPT3.items()),
    *(Known(f"OPT {n}", "Zhang et al. 2022, section 2.2: 0.006, outputs / sqrt(2 L)", None,
            _gpt(*shape, activation="relu"), "gpt2", {"std": 0.006}) for n, shape in _OPT.items()),
    *(Known(f"Cerebras-GPT {n}", "Dey et al. 2023, table 1 and appendix A", None, _gpt(*shape), "gpt2")
      for n, shape in _CEREBRAS.items()),
    *(Known(f"Pythia {n}", "Biderman et al. 2023: small init; outputs smaller yet (Wang)", None,
            _gpt(*shape, **_NEOX), "takase", {"scaled_embedding": False}) for n, shape in _PYTHIA.items()),
    Known("GPT-NeoX 20B", "Black et al. 2022, section 2.1", None, _gpt(44, 6144, 64, **_NEOX), "takase",
          {"scaled_embedding": False}),
    *(Known(f"Megatron-LM {n}", "Shoeybi et al. 2019, table 2 and section 3", None, _gpt(*shape), "gpt2")
      for n, shape in _MEGATRON.items()),
    Known("MT-NLG 530B", "Smith et al. 2022, section 3.2: 0.004", None, _gpt(105, 20480, 128), "gpt2", {"std": 0.004}),
    *(Known(f"Llama {n}", "Touvron et al. 2023, table 2; default", None, _llama(*shape), "fixed")
      for n, shape in _LLAMA.items()),
    Known("Llama 2 70B", "Touvron et al. 2023b; default", None, _llama(80, 8192, 64, 28672, 8), "fixed"),
    Known("Llama 3 405B", "Dubey et al. 2024, table 3; default", None, _llama(126, 16384, 128, 53248, 8), "fixed"),
    Known("DeepSeek LLM 7B", "Bi et al. 2024, table 2: 0.006", None, _llama(30, 4096, 32, 11008), "fixed",
          {"std": 0.006}),
    Known("DeepSeek LLM 67B", "Bi et al. 2024, table 2: 0.006", None, _llama(95, 8192, 64, 22016, 8), "fixed",
          {"std": 0.006}),
    Known("TinyLlama 1.1B", "Zhang et al. 2024; small init of its code", None, _llama(22, 2048, 32, 5632, 4), "takase",
          {"scaled_embedding": False}),
    Known("Qwen2.5 72B", "Qwen 2024; default", None, _llama(80, 8192, 64, 29568, 8, vocab_size=152064), "fixed"),
    Known("Mistral Large 123B", "configuration; default", None, _llama(88, 12288, 96, 28672, 8), "fixed"),
    Known("Nemotron-4 15B", "Parmar et al. 2024: 0.0134", None,
          _llama(32, 6144, 48, 24576, 8, gated=False, activation="relu", norm="layernorm"), "fixed", {"std": 0.0134}),
    Known("PaLM 8B", "Chowdhery et al. 2022: fan-in", None,
          _llama(32, 4096, 16, 16384, 1, d_head=256, parallel=True), "fixed", {"std": 1 / 64}),
    Known("PaLM 540B", "Chowdhery et al. 2022: fan-in", None,
          _llama(118, 18432, 48, 73728, 1, d_head=256, parallel=True), "fixed", {"std": 1 / math.sqrt(18432)}),
    Known("OLMo 2 32B", "OLMo 2025: 0.02", "olmo2-7b", {"n_layers": 64, "d_model": 5120, "n_heads": 40, "d_ff": 27648},
          "fixed"),
    Known("GLM-130B", "Zeng et al. 2023: DeepNorm", None, _post(70, 12288, 96, gated=True, d_ff=32768), "deepnorm"),
    Known("DeepNet, 200 layers", "Wang et al. 2022, figure 1", None, _encoder(200, 512, 8), "deepnorm"),
    Known("DeepNet, 1000 layers", "Wang et al. 2022, abstract", None, _encoder(1000, 512, 8), "deepnorm"),
    Known("DeepScaleLM BERT, 192 layers", "TGS, table 4", None, _encoder(192, 256), "deepscalelm"),
    Known("DeepScaleLM BERT, 768 layers", "TGS, table 4", None, _encoder(768, 128, 2), "deepscalelm"),
    Known("DeepScaleLM GPT, 192 layers", "TGS, table 8", None, _gpt(192, 256, 4), "deepscalelm"),
    Known("LNS 130M", "COD, table 1", "llama-130m", {}, "lns"),
    Known("LNS 1B", "COD, table 1", "llama-1b", {}, "lns"),
    Known("LNS 7B", "COD, section 5", "llama-7b", {}, "lns"),
    Known("Mix-LN 130M", "COD, table 1", "llama-130m", {}, "mix-ln"),
    Known("Admin 60 layers", "Liu et al. 2020, table 2", None, _encoder(60, 512, 8), "admin"),
    Known("ReZero 64 layers", "Bachlechner et al. 2020, section 5", None, _gpt(64, 256, 4), "rezero"),
    Known("ViT large", "Dosovitskiy et al. 2021, table 1; default", "vit-base",
          {"n_layers": 24, "d_model": 1024, "n_heads": 16, "d_ff": 4096}, "huggingface"),
    Known("ViT huge", "Dosovitskiy et al. 2021, table 1; default", "vit-base",
          {"n_layers": 32, "d_model": 1280, "n_heads": 16, "d_ff": 5120}, "huggingface"),
    Known("MiniCPM 2.4B", "Hu et al. 2024, section 3", None, _llama(40, 2304, 36, 5760), "minicpm"),
    Known("Transformer base, post-norm, 6 layers", "Vaswani et al. 2017", None, _encoder(6, 512, 8, activation="relu"),
          "xavier"),
]  # fmt: skip

_VANISH, _EXPLODE = ("vanishing gradient",), ("exploding gradient",)
_GROW, _IDLE, _ALIKE, _FP16 = ("stream growth",), ("idle layers",), ("rank collapse",), ("fp16 overflow",)
_HOT, _EPS = ("one-hot attention",), ("norm epsilon",)

BAD: list[Known] = [
    *(Known(f"post-norm BERT, Xavier, {n} layers", "TGS, tables 4 and 11: does not train", None, _encoder(n, 256),
            "xavier", expected=_VANISH + _ALIKE) for n in (48, 96, 192, 768)),
    *(Known(f"post-norm GPT, 0.02, {n} layers", "DeepNet, figure 1; TGS table 8: diverges", None, _post(n, 512, 8),
            "fixed", expected=_VANISH + _ALIKE) for n in (48, 100, 200)),
    Known("post-norm translation encoder, 60 layers", "Liu et al. 2020, table 2: diverges", None, _encoder(60, 512, 8),
          "xavier-uniform", expected=_VANISH + _ALIKE),
    Known("post-norm translation encoder, 100 layers", "Wang et al. 2022, table 1: diverges", None,
          _encoder(100, 512, 8), "xavier-uniform", expected=_VANISH + _ALIKE),
    *(Known(f"no skips, no norms, {n} layers", "He et al. 2023, section 5: no progress", None,
            _gpt(n, 256, 4, norm_placement="none"), "xavier", columns={"skip": 0.0}, expected=_ALIKE + _VANISH)
      for n in (12, 36)),
    *(Known(f"no norms, Xavier, {n} layers", "Zhang et al. 2019; Bachlechner et al. 2020: diverges", None,
            _gpt(n, 256, 4, norm_placement="none"), "xavier", expected=_GROW + _EXPLODE + _FP16 + _ALIKE)
      for n in (24, 64, 128)),
    *(Known(f"no norms, gated, {n} layers", "products of branches grow doubly; own runs", None,
            _llama(n, 256, 4, 688, norm_placement="none"), "xavier", expected=_GROW + _EXPLODE + _FP16)
      for n in (12, 20)),
    *(Known(f"scores {factor} times too large, {n} layers", "Zhai et al. 2023; Dehghani et al. 2023: entropy collapse",
            None, _gpt(n, 512, 8), "xavier", columns={"score_scale": factor}, expected=_HOT + _EXPLODE)
      for factor, n in ((16.0, 12), (32.0, 24), (64.0, 12))),
    Known("scores without 1/sqrt(d_head)", "Vaswani et al. 2017, section 3.2.1", None, _gpt(12, 768, 6), "xavier",
          columns={"score_scale": math.sqrt(128)}, expected=_HOT + _EXPLODE),
    Known("scores without 1/sqrt(d_head), encoder", "Vaswani et al. 2017, section 3.2.1", None,
          _encoder(12, 768, 6, norm_placement="pre"), "xavier", columns={"score_scale": math.sqrt(128)},
          expected=_HOT + _EXPLODE),
    *(Known(f"GPT, weights of {std:g}, {n} layers", "scores of variance above 1000; Takase et al. 2023", None,
            _gpt(n, 768, 12), "fixed", {"std": std}, expected=_HOT + _EXPLODE) for std, n in ((0.3, 12), (0.2, 24))),
    *(Known(f"Llama, weights of {std:g}, {n} layers", "as above", None, _llama(n, 1024, 16, 2752), "fixed",
            {"std": std}, expected=_HOT + _EXPLODE) for std, n in ((0.1, 24), (0.5, 12))),
    *(Known(f"{family}, weights of {std:g}", "layers do nothing at the start; own runs", None, fields, "fixed",
            {"std": std}, expected=_IDLE + _EPS)
      for family, fields, std in (("GPT", _gpt(12, 768, 12), 1e-4), ("Llama", _llama(24, 1024, 16, 2752), 1e-4),
                                  ("GPT", _gpt(48, 768, 12), 1e-5))),
    *(Known(f"branches muted by {factor:g}, {n} layers", "LLaMA-Pro issue 28: blocks that never learn", None,
            _gpt(n, 512, 8), "xavier", columns={"branch": factor}, expected=_IDLE)
      for factor, n in ((1e-4, 24), (1e-6, 12))),
    Known("norm gains of 1e-3", "gains read around 0, candle issue on Qwen3.5", None, _llama(12, 512, 8, 1376),
          "fixed", columns={"norm_gain": 1e-3}, expected=_IDLE + _EPS),
    *(Known(f"skip of {skip:g}, {n} layers", "He et al. 2016b, section 3: scaled shortcuts fail", None,
            _gpt(n, 512, 8), "xavier", columns={"skip": skip}, expected=_VANISH + _ALIKE + _EXPLODE + _GROW)
      for skip, n in ((0.5, 48), (0.3, 96), (1.5, 48))),
    *(Known(f"skip of {skip:g} without norms, {n} layers", "He et al. 2016b, section 3", None,
            _gpt(n, 256, 4, norm_placement="none"), "fixed", columns={"skip": skip},
            expected=_VANISH + _ALIKE + _EXPLODE + _GROW + _FP16) for skip, n in ((0.7, 48), (1.3, 48))),
    *(Known(f"rank collapse, post-norm without feed-forward gain, {n} layers",
            "Dong et al. 2021; Noci et al. 2022", None, _encoder(n, 256, dropout=0.0), "xavier",
            columns={"weight__down": 0.1}, expected=_ALIKE + _VANISH) for n in (24, 96)),
    Known("fp16, branches of 0.5, 48 layers", "activations beyond 65504", None, _gpt(48, 1024, 16), "fixed",
          {"std": 0.5}, expected=_FP16 + _HOT + _EXPLODE),
    Known("fp16, no norms, 0.1", "activations beyond 65504", None, _gpt(24, 768, 12, norm_placement="none"), "fixed",
          {"std": 0.1}, expected=_FP16 + _GROW + _EXPLODE),
    Known("Pre-LN, branches that double, 60 layers", "each branch of the stream's size; own runs", None,
          _gpt(60, 512, 8, norm_placement="none", activation="relu"), "xavier", {"gain": 2.0},
          expected=_GROW + _EXPLODE + _FP16),
    Known("post-norm, gains of 0.1", "norm gains that shrink the stream", None, _encoder(24, 512, 8), "xavier",
          columns={"norm_gain": 0.1}, expected=_VANISH + _EXPLODE + _ALIKE + _EPS),
]  # fmt: skip
