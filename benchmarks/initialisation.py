"""What transformers' own initialisation really draws, family by family: writes docs/initialisation.md.

    python -m benchmarks.initialisation            # check the installed transformers, write the page
    python -m benchmarks.initialisation --page     # only write the page from docs/initialisation.json

Every family is built from a small configuration of 12 layers (of each stack) with the initialiser's default settings,
and checked against the scheme `huggingface`, which says what that initialiser is meant to draw. Results are kept by
version of transformers in docs/initialisation.json, so that releases can be compared: run it under each.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

from signalprop.attachment.families_table import FAMILIES
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.repair.checks import Check, Row, check

STORE = Path("docs/initialisation.json")
PAGE = Path("docs/initialisation.md")
LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY = 12, 64, 176, 4, 500
SEED = 0

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY, "max_position_embeddings": 48, **_IDS,
}  # fmt: skip
_IMAGE = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
    "image_size": 32, "patch_size": 8, "num_labels": 10,
}  # fmt: skip
_BOTH = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "vocab_size": VOCABULARY,
    "decoder_start_token_id": 1, **_IDS,
}  # fmt: skip
_SPEECH = {**_BOTH, "max_source_positions": 24, "max_target_positions": 24}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
# per family: classes of the model and of its configuration, and what the configuration is given
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _COMMON),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _COMMON),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 48, **_IDS},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 16}),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 16}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", _COMMON),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", _COMMON),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_COMMON, "ffn_hidden_size": HIDDEN}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _COMMON),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_COMMON, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH}),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _IMAGE),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": WIDTH, "d_kv": 16, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS,
         "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**_BOTH, "max_position_embeddings": 48}),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**_SPEECH, "num_mel_bins": 16, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        {**_SPEECH, "max_source_positions": 96, "input_feat_per_channel": 16, "conv_channels": WIDTH},
    ),
}  # fmt: skip


def result(family: str) -> dict[str, Any]:
    """The check of one family as the installed transformers initialises it."""
    import torch
    import transformers

    model_class, config_class, options = MODELS[family]
    if not hasattr(transformers, model_class):
        return {"refused": f"there is no {model_class}"}
    torch.manual_seed(SEED)
    try:
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
        found = check(model, "huggingface")
    except (InputError, ValueError, TypeError, AttributeError) as error:  # another release, other configurations
        return {"refused": " ".join(str(error).split())[:200]}
    return {
        "model": model_class,
        "ok": found.ok,
        "looked_at": len(found.rows),
        "wrong": sorted({f"{row.kind or row.place} {row.name}" for row in found.wrong}),
        "n_wrong": len(found.wrong),
        "notes": list(found.notes),
        "remarks": sorted({f"{row.name}: {row.note}" for row in found.rows if row.note and row.verdict == "ok"}),
        **{role: pooled(found, role) for role in ("output", "down")},
    }


def pooled(found: Check, role: str) -> dict[str, float]:
    """Wanted and measured standard deviation of a role over all its layers, with the standard error."""
    rows: list[Row] = [row for row in found.rows if row.name == role and row.measured is not None]
    squares = [float(row.measured or 0) ** 2 for row in rows]
    errors = [row.standard_error**2 for row in rows]
    return {
        "wanted": math.sqrt(sum(float(row.wanted or 0) ** 2 for row in rows) / len(rows)),
        "measured": math.sqrt(sum(squares) / len(rows)),
        "standard_error": math.sqrt(sum(errors)) / len(rows),
    }


def measure() -> dict[str, Any]:
    """Every family under the installed transformers."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    lacking = sorted(set(FAMILIES) - set(MODELS))
    if lacking:
        raise InputError(f"no configuration for {', '.join(lacking)}; add one to MODELS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families = {family: result(family) for family in MODELS}
    return {"torch": torch.__version__.partition("+")[0], "families": families}


def page(store: dict[str, Any]) -> str:
    """The document: the newest release in full, then all releases by family."""
    versions = sorted(store, key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    newest = store[versions[0]]
    lines = [
        "# What transformers initialises",
        "",
        f"Generated by `python -m benchmarks.initialisation` from `{STORE}`: do not edit. Every supported family is "
        f"built from a configuration of {LAYERS} layers (of each stack), width {WIDTH}, feed-forward {HIDDEN} (GPT-2: "
        f"{4 * WIDTH}), at the default settings of its initialiser, seed {SEED}, and looked at with "
        '`signalprop.check(model, "huggingface")`: every weight\'s standard deviation and mean, every bias, gain and '
        "multiplier, against what the family's `_init_weights` is meant to draw. A right model fails once in 10,000 "
        "times. The columns in the middle are standard deviations of the two matrices that write to the residual "
        "stream, over all layers, with the standard error of the measured one.",
        "",
        f"## transformers {versions[0]} (torch {newest['torch']})",
        "",
        "| family | looked at | attention output: wanted, measured | feed-forward down: wanted, measured | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family, item in newest["families"].items():
        if "refused" in item:
            lines.append(f"| {family} | - | - | - | not checked: {item['refused']} |")
            continue
        numbers = [f"{_std(item[role]['wanted'])}, {_std(item[role]['measured'])} ± {item[role]['standard_error']:.1e}"
                   for role in ("output", "down")]  # fmt: skip
        lines.append(f"| {family} | {item['looked_at']} | {numbers[0]} | {numbers[1]} | {_verdict(item)} |")
    lines += ["", "Parameters that no scheme speaks of, and that were not looked at:", ""]
    for family, item in newest["families"].items():
        lines += [f"- {family}: {note.partition(': ')[2]}" for note in item.get("notes", []) if "speaks" in note]
    if len(versions) > 1:
        lines += ["", "## Releases", "", f"| family | {' | '.join(versions)} |", f"| --- |{' --- |' * len(versions)}"]
        for family in newest["families"]:
            cells = [_short(store[version]["families"].get(family, {"refused": "-"})) for version in versions]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        lines += ["", *_differences(store, versions)]
    return "\n".join(lines).rstrip() + "\n"


def _differences(store: dict[str, Any], versions: list[str]) -> list[str]:
    """What is wrong in which release, in words."""
    out = []
    for version in versions:
        for family, item in store[version]["families"].items():
            if item.get("ok", True):
                continue
            parts = []
            for role, name in (("output", "attention output"), ("down", "feed-forward down")):
                numbers = item[role]
                if abs(numbers["measured"] - numbers["wanted"]) > 6 * numbers["standard_error"]:
                    parts.append(
                        f"{name} {_std(numbers['measured'])} ± {numbers['standard_error']:.1e} instead of "
                        f"{_std(numbers['wanted'])}"
                    )
            what = "; ".join(parts) or ", ".join(item["wrong"])
            out.append(
                f"- transformers {version}, {family}: {item['n_wrong']} of {item['looked_at']} are wrong: {what}."
            )
    return out


def _std(value: float) -> str:
    return f"{value:.4g}"


def _verdict(item: dict[str, Any]) -> str:
    return "right" if item["ok"] else f"**{item['n_wrong']} wrong**: {', '.join(item['wrong'])}"


def _short(item: dict[str, Any]) -> str:
    if "refused" in item:
        return "-"
    return "right" if item["ok"] else f"**{item['n_wrong']} wrong**"


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    store: dict[str, Any] = read_json(STORE) if STORE.is_file() else {}
    if not arguments.page:
        import transformers

        store[transformers.__version__] = measured = measure()
        for family, item in measured["families"].items():
            print(f"{family}: {item['refused'] if 'refused' in item else _verdict(item)}")
        write_json(STORE, store)
    write_text(PAGE, page(store))


if __name__ == "__main__":
    main()
