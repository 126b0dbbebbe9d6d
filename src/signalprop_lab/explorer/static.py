"""The explorer as one file that needs no server: `assets/closed_form.js` predicts what the server would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.data.batches import default_statistics
from signalprop.families import find
from signalprop.files.storage import read_json, write_text
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Architecture
from signalprop.network.presets import PRESETS
from signalprop.prediction import cheapest
from signalprop.prediction_notes import (
    EQUAL_TOKENS,
    LARGE_SCORES,
    LOGITS,
    QUERY_SIZES,
    SCORES,
    SPREAD,
    UNSTABLE,
    gate_growth,
)
from signalprop.report import findings
from signalprop.report.html.curves import Curve
from signalprop.report.html.page import asset as of_report
from signalprop.report.html.page import embedded, library
from signalprop.report.html.signal import glance_block, signal_section
from signalprop.schemes import SCHEMES
from signalprop.theory.two_rows import FILE
from signalprop_lab.explorer.curves import predicted
from signalprop_lab.explorer.page import Kept, asset, explorer_page
from signalprop_lab.explorer.settings import PRINTS, Settings

_KINDS = ("encoder", "decoder")
# Schemes that `schemes.js` has.
_OFFERED = (
    "admin", "bamboo", "deepnorm", "deepscalelm", "deepscalelm-simple", "ds-init", "fixed", "fixup", "gpt2",
    "huggingface", "layerscale", "lns", "mix-ln", "noci", "normalised-skip", "pytorch", "rezero", "sandwich",
    "skipinit", "stable-resnet", "t-fixup", "takase", "xavier", "xavier-uniform",
)  # fmt: skip
_SCRIPTS = ("softmax.js", "two_rows.js", "activations.js", "closed_form.js", "schemes.js", "offline.js", "explore.js")
_OF_REPORT = ("format.js", "charts.js", "tables.js", "sections.js", "library.js")
_BOUNDS = (
    "GRADIENT_RATIO", "GRADIENT_EXCESS", "UPPER_RATIO", "RANK_COLLAPSE", "STREAM_GROWTH", "LATE_SHARE", "NARROW",
    "FP16_MAX", "LARGEST_IN_STDS",
)  # fmt: skip
_INPUTS = ("token_correlation", "segment_correlation", "target_correlation", "loss_fraction")


def write_static(path: str | Path) -> None:
    """Write the explorer as one HTML file, whole or not at all."""
    write_text(path, page())


def page() -> str:
    """The HTML: controls for what `closed_form.js` predicts, and everything that it needs."""
    script = "\n".join([*map(of_report, _OF_REPORT), *map(asset, _SCRIPTS)])
    carried = library(script)
    return explorer_page(
        Kept(
            kinds=_KINDS,
            presets=presets(),
            schemes=_OFFERED,
            fidelities={"moments": "moments: averages over positions"},
            hint="not on this page, but in signalprop predict: token kernels (right for decoders), encoder-decoders, "
            f"images, speech, bands, and the schemes {', '.join(sorted(SCHEMES.keys() - set(_OFFERED)))}",
            served="This file is complete: it predicts in the browser, by signalprop's formulas, and needs no server.",
            policy=f'<meta http-equiv="Content-Security-Policy" content="{carried["policy"]}">',
            style="\n".join(f"<style>\n{text}\n</style>" for text in (of_report("page.css"), asset("explore.css"))),
            scripts=f'<script type="application/json" id="closed-form">{embedded(_closed_form())}</script>\n'
            f'<script type="application/gzip" id="library">{carried["library"]}</script>\n<script>{script}</script>',
            credit=carried["credit"],
        )
    )


def _closed_form() -> dict[str, Any]:
    """What `offline.js` reads: presets, bounds of warnings, and a section and a table whose numbers it replaces."""
    start = predicted(Settings(n_layers=1, fidelity="moments")).profile
    curve = Curve("", f"predicted ({start.fidelity})", start)
    section = signal_section([curve])
    for block in section["blocks"]:
        block["series"] = []
    gpt2 = Settings(preset="gpt2", kind="decoder").table()
    why = cheapest(gpt2, default_statistics(gpt2.architecture))[1].partition(": ")[2]
    return {
        "two_rows": read_json(FILE),
        "presets": presets(),
        "template": section,
        "bounds": {name: getattr(findings, name) for name in _BOUNDS}
        | {"LARGE_SCORES": LARGE_SCORES, "SPREAD": SPREAD},
        "growths": {name: gate_growth(name) for name in {item.name for item in ACTIVATIONS.values()}},
        "words": {
            "prints": PRINTS,
            "table": glance_block([curve]),
            "decoder": f"moments are only a rough guide here: {why}; signalprop predict takes token kernels",
            "scores": SCORES.format("@"),
            "spread": UNSTABLE.format("@"),
            "logits": LOGITS.format("@"),
            "sizes": QUERY_SIZES,
            "equal": EQUAL_TOKENS,
        },
    }


def presets() -> dict[str, dict[str, Any]]:
    """What `schemes.js` needs of every preset that the page can predict.

    One stack that reads tokens, of attention and feed-forwards as they were before 2024: no kind of sublayer with
    settings of its own, and heads that are together as wide as the stream.
    """
    found = {name: Architecture.preset(name) for name in PRESETS}
    return {name: _fields(a) for name, a in found.items() if _is_plain(a)}


def _is_plain(a: Architecture) -> bool:
    usual = all(settings == type(settings).model_validate({}) for settings in a.settings.values())
    as_wide = a.n_heads * a.d_head == a.d_model
    return a.kind in _KINDS and a.input == "tokens" and a.branches is None and usual and as_wide


def _fields(a: Architecture) -> dict[str, Any]:
    names = ("n_heads", "n_kv_heads", "d_model", "d_ff", "dropout", "attention_dropout", "embedding_dropout")
    statistics = {kind: default_statistics(a.replace(kind=kind)) for kind in _KINDS}
    return {name: getattr(a, name) for name in (*names, "norm_placement", "final_norm")} | {
        "inputs": {kind: {name: getattr(of, name) for name in _INPUTS} for kind, of in statistics.items()},
        "fixed": {
            "gated": a.gated, "parallel": a.parallel, "qkNorm": a.qk_norm, "bias": a.bias,
            "norm": a.norm, "eps": a.norm_eps,
            "positions": a.positions, "rotaryBase": a.rotary_base, "rotaryFraction": a.rotary_fraction,
            "nSegments": a.n_segments, "embeddingNorm": a.embedding_norm, "embeddingScale": a.embedding_scale,
            "vocab": a.vocab_size, "tied": a.has_tied_head, "headTransform": a.head_transform, "drawn": _drawn(a),
        },
    }  # fmt: skip


def _drawn(a: Architecture) -> str | None:
    """How the family draws its weights: all alike, or those that write to the stream as GPT-2 does."""
    family = find(a.family)
    if family is None:
        return None
    weights = family.initialisation.weights(a)
    return "alike" if len(set(weights.values())) == 1 else "gpt2"
