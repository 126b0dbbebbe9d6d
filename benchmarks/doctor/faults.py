"""The faults: what is planted, where, and what a doctor should say first."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from benchmarks.doctor import models
from benchmarks.doctor.changes import (
    adapters_times,
    attribute,
    based,
    buffer,
    copied,
    drawn_anew,
    each,
    experts_swapped,
    fan_in_of_the_width,
    fused_by_heads,
    fused_order,
    fused_turned,
    head_apart,
    head_of_zero,
    in_half_precision,
    in_layers,
    interleaved,
    nan_row,
    regrouped,
    reordered,
    scaled_by_depth,
    stretched,
    swapped,
    times_output,
    turned,
    zero,
)
from benchmarks.doctor.table import Fault
from benchmarks.doctor.threads import MORE

CONVENTION = ("weights of another convention",)
NOT_FINITE = ("not finite",)
GUESSING = ("no better than guessing",)
UNLIKE = ("unlike its initialiser",)
FIRST_LOSS = ("first loss far above ln V",)
L, LT, L12, G, GEMMA, B, MOE = (
    "trained llama", "trained llama, tied", "trained llama, 12 layers", "trained gpt2", "trained gemma2",
    "trained bert", "trained mixtral",
)  # fmt: skip
FL, FLT, FG, FGEMMA, FT5, FMOE, FMOE1 = (
    "fresh llama", "fresh llama, tied", "fresh gpt2", "fresh gemma2", "fresh t5", "fresh mixtral",
    "fresh mixtral, top-1",
)  # fmt: skip


def one_direction(gate: torch.Tensor) -> None:
    """Every expert has the first one's row: all scores are equal."""
    gate.copy_(gate[:1].clone().expand_as(gate))


def shifted(by: float):  # type: ignore[no-untyped-def]
    """Norm gains plus a number."""
    return each("norm", change=lambda p: p.add_(by))


TRAINED = (
    Fault("gains + 1", L, shifted(1.0), CONVENTION, "1 above"),
    Fault("gains - 1", L, shifted(-1.0), CONVENTION, "1 below"),
    Fault("gains + 1, tied", LT, shifted(1.0), CONVENTION, "1 above"),
    Fault("gains stored around 1 where 1 is added", GEMMA, shifted(1.0), CONVENTION, "1 above"),
    Fault("gains - 1 where 1 is added", GEMMA, shifted(-1.0), CONVENTION, "1 below"),
    Fault("gains + 1, experts", MOE, shifted(1.0), CONVENTION, "1 above"),
    Fault("rotary pairs interleaved", L, interleaved, CONVENTION, "reordered to two halves"),
    Fault("rotary pairs taken apart", L, partial(interleaved, back=True), CONVENTION, "reordered to interleaved"),
    Fault("rotary pairs interleaved, Gemma", GEMMA, interleaved, CONVENTION, "reordered to two halves"),
    Fault("rotary pairs interleaved, experts", MOE, interleaved, CONVENTION, "reordered to two halves"),
    Fault("query heads grouped the other way", L, regrouped, CONVENTION, "query heads"),
    Fault("query heads grouped the other way, Gemma", GEMMA, regrouped, CONVENTION, "query heads"),
    Fault("gate and up swapped", L, partial(swapped, first="gate_proj", second="up_proj"), CONVENTION, "gate and up"),
    Fault("gate and up swapped, Gemma", GEMMA, partial(swapped, first="gate_proj", second="up_proj"), CONVENTION,
          "gate and up"),
    Fault("rotary base of 500,000", L, based(5e5), CONVENTION, "rope_theta = 10000",
          "deepspeedai/DeepSpeed pull 8345"),
    Fault("rotary base of 100", L, based(100.0), CONVENTION, "rope_theta = 10000"),
    Fault("head of a tied model drawn anew", LT, head_apart, (*CONVENTION, "head not loaded"), "head"),
    Fault("head drawn anew", L, each("lm_head", change=lambda p: p.normal_(0, 0.02)), ("head not loaded",), "head"),
    Fault("layers from the last to the first", L, reordered(lambda n: list(range(n))[::-1]), CONVENTION, "opposite"),
    Fault("layers in the order of their names", L12, reordered(lambda n: sorted(range(n), key=str)), CONVENTION,
          "by number"),
    Fault("values transposed", G, fused_turned(2), CONVENTION, "value"),
    Fault("queries transposed", L, turned("q_proj"), CONVENTION, "query"),
    Fault("outputs transposed", L, turned("o_proj"), CONVENTION, "output"),
    Fault("outputs transposed, BERT", B, turned("attention.output.dense"), CONVENTION, "output"),
    Fault("keys, queries, values in this order", G, fused_order(1, 0, 2), CONVENTION, "quer"),
    Fault("values first", G, fused_order(2, 1, 0), CONVENTION, "value"),
    Fault("fused map stored head by head", G, fused_by_heads, CONVENTION, "head by head", "awslabs/slapo pull 46"),
    Fault("keys and values in each other's place", L, partial(swapped, first="k_proj", second="v_proj"), CONVENTION,
          "value", "tenstorrent/tt-mlir issue 8958"),
    Fault("gate and up of experts swapped", MOE, experts_swapped, CONVENTION, "gate and up"),
    Fault("positions two rows off", G, each("wpe", change=lambda p: p.copy_(p.roll(2, 0))), CONVENTION, "2 rows",
          "huggingface/sentence-transformers pull 3879"),
    Fault("biases of queries, keys and values lost", G, each("c_attn.bias", change=zero), ("biases of zeros",), "query",
          "sbryngelson/ANEForge pull 253"),
    Fault("rope_scaling that was not trained", L, stretched(4.0), CONVENTION, "multiplied by 4",
          "Open-Athena/MarinFold pull 198"),
    Fault("adapters with four times their factor", L, adapters_times(4.0), CONVENTION, "lora_alpha",
          "cloneofsimo/lora issue 240"),
    Fault("adapters with a quarter of their factor", L, adapters_times(0.25), CONVENTION, "lora_alpha",
          "cloneofsimo/lora issue 187"),
    Fault("epsilon of norms above the stream's mean square", L, attribute("variance_epsilon", lambda x: 30.0),
          ("norm epsilon",), "epsilon", "nntrainer/nntrainer pull 4318"),
    Fault("float16 overflows", L, in_half_precision(2.0**18), NOT_FINITE, "float16",
          "huggingface/transformers issue 5651"),
    Fault("scores without their factor", L, attribute("scaling", lambda x: 1.0), ("score scale",), "0.25"),
    Fault("scores times sqrt(d_head)", L, attribute("scaling", lambda x: 1 / x), ("score scale",), "0.25"),
    Fault("scores over d_head", L, attribute("scaling", lambda x: x * x), ("score scale",), "0.25"),
    Fault("embeddings times sqrt(d_model)", LT, times_output("embed_tokens", math.sqrt(96)), CONVENTION, "embeddings"),
    Fault("embeddings not times sqrt(d_model)", GEMMA, times_output("embed_tokens", 1 / math.sqrt(96)), CONVENTION,
          "embeddings"),
    Fault("final norm of ones", L, each("model.norm", change=lambda p: p.fill_(1.0)), ("final norm not loaded",),
          "final norm"),
    Fault("final norm of zeros", L, each("model.norm", change=zero), ("norm of zeros",), "final norm"),
    Fault("a layer drawn anew", L, drawn_anew(3), ("layers not loaded",), (3,)),
    Fault("two layers drawn anew", L, drawn_anew(4, 5), ("layers not loaded",), (4, 5)),
    Fault("a layer drawn anew, GPT-2", G, drawn_anew(2), ("layers not loaded",), (2,)),
    Fault("a layer drawn anew, BERT", B, drawn_anew(1), ("layers not loaded",), (1,)),
    Fault("NaN in a row of the table", L, each("embed_tokens", change=nan_row(200)), NOT_FINITE, "embed_tokens.weight"),
    Fault("NaN in a word that the text has", L, each("embed_tokens", change=nan_row(101)), NOT_FINITE,
          "embed_tokens.weight"),
    Fault("infinite gain", L, in_layers((2,), "input_layernorm", change=lambda p: p[3:4].fill_(math.inf)), NOT_FINITE,
          (2,)),
    Fault("NaN in a bias, GPT-2", G, in_layers((4,), "c_fc.bias", change=lambda p: p[7:8].fill_(math.nan)), NOT_FINITE,
          (4,)),
    Fault("rotary frequencies of NaN", L, buffer("inv_freq", lambda b: b.fill_(math.nan)), NOT_FINITE, "inv_freq"),
    Fault("rotary frequencies of 0", L, buffer("inv_freq", zero), ("rotary frequencies",), "inv_freq"),
    Fault("rotary frequencies in bfloat16's noise", L, buffer("inv_freq", lambda b: b.mul_(37.0)),
          ("rotary frequencies", *CONVENTION), "rotary"),
    Fault("output map of zeros", L, in_layers((3,), "o_proj", change=zero), ("zero weights",), (3,)),
    Fault("down map of zeros", L, in_layers((1,), "down_proj", change=zero), ("zero weights",), (1,)),
    Fault("layer times 10", L, in_layers((2,), "down_proj", change=lambda p: p.mul_(10.0)), ("scaled weights",), (2,)),
    Fault("queries of a layer times 8", G, in_layers((3,), "c_attn.weight", change=lambda p: p[:, :96].mul_(8.0)),
          ("scaled queries and keys",), (3,)),
    Fault("a dead head", L, head_of_zero(2, 4), ("dead heads",), (4,)),
    Fault("norm of zeros in a layer", L, in_layers((2,), "post_attention_layernorm", change=zero), ("norm of zeros",),
          (2,)),
    Fault("a layer is a copy of another", L, copied(1, 4), ("equal layers",), (1, 4)),
    Fault("outlying row", L, each("embed_tokens", change=lambda p: p[250].mul_(500.0)), ("outlying rows",), "row 250"),
    Fault("rows of another tokenizer", L, each("embed_tokens", change=lambda p: p.copy_(p[torch.randperm(len(p))])),
          GUESSING, "ln V"),
    Fault("table of zeros", L, each("embed_tokens", change=zero), ("table of zeros",), "token table"),
    Fault("head of zeros", L, each("lm_head", change=zero), ("head of zeros",), "head"),
    Fault("position table of zeros", G, each("wpe", change=zero), ("table of zeros",), "position"),
    Fault("router of zeros", MOE, in_layers((2,), "gate.weight", change=zero), ("router of zeros",), (2,)),
    Fault("all tokens to one expert", MOE, in_layers((1,), "gate.weight", change=one_direction), ("router collapse",),
          (1,)),
)  # fmt: skip

MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FRESH = (
    Fault("the scaled draw on the up map", FL, scaled_by_depth("up_proj", "o_proj"), UNLIKE, "up",
          "karpathy/llama2.c issue 579"),
    Fault("all maps scaled by depth", FL, scaled_by_depth(*MAPS), UNLIKE, "query", "facebookresearch/lingua issue 39"),
    Fault("fan-in of the width everywhere", FL, fan_in_of_the_width, UNLIKE, "query", "tenstorrent/tt-metal 48716"),
    Fault("untied head of deviation 1", FT5, lambda m: m.lm_head.weight.normal_(0, 1), FIRST_LOSS, "head",
          "huggingface/transformers issue 26441"),
    Fault("tied table of deviation 1", FLT, each("embed_tokens", change=lambda p: p.normal_(0, 1)), FIRST_LOSS, "table",
          "pytorch/examples; ModernBERT issue 96"),
    Fault("final norm of zeros", FL, each("model.norm", change=zero), ("all logits are equal", "norm of zeros"),
          "final", "pytorch/torchtitan 4489"),
    Fault("gains of 1 where 1 is added", FGEMMA, each("norm", change=lambda p: p.fill_(1.0)), UNLIKE, "gain",
          "huggingface/transformers issue 40224"),
    Fault("new blocks muted by norms", FL, in_layers((3, 7, 11), "layernorm", change=zero),
          ("no gradient arrives", "norm of zeros"), (3, 7, 11), "TencentARC/LLaMA-Pro issue 28"),
    Fault("gains around 0", FL, each("norm", change=lambda p: p.normal_(0, 0.02)), ("norm gains around 0", *UNLIKE),
          "gain", "Qwen 3.5 in candle"),
    Fault("gains of 2", FL, each("layernorm", change=lambda p: p.fill_(2.0)), UNLIKE, "gain"),
    Fault("head of zeros", FL, each("lm_head", change=zero), ("head of zeros", "all logits are equal"), "head"),
    Fault("table of zeros", FL, each("embed_tokens", change=zero), ("table of zeros",), "token table"),
    Fault("one norm of zeros", FL, in_layers((4,), "input_layernorm", change=zero),
          ("norm of zeros", "no gradient arrives"), (4,)),
    Fault("rotary frequencies of 0", FL, buffer("inv_freq", zero), ("rotary frequencies",), "inv_freq",
          "meta device, to_empty"),
    Fault("rotary frequencies not finite", FL, buffer("inv_freq", lambda b: b.fill_(math.inf)), NOT_FINITE, "inv_freq"),
    Fault("all tokens to one expert", FMOE, in_layers((1, 4), "gate.weight", change=one_direction),
          ("router collapse",), (1, 4), "pytorch/torchtitan issue 1246"),
    Fault("router of deviation 1", FMOE, in_layers((2,), "gate.weight", change=lambda p: p.mul_(50.0)),
          (*UNLIKE, "scaled weights"), (2,)),
    Fault("router of zeros", FMOE, each("gate.weight", change=zero), ("router of zeros",), "router"),
    Fault("top-1 with renormalised weights", FMOE1, lambda m: None, ("router gets no gradient",), "router"),
    Fault("tied weights that are not", FLT, lambda m: head_tied_no_more(m), ("head not tied",), "tie_word_embeddings"),
    Fault("one layer 10 times too large", FL, in_layers((5,), "down_proj", change=lambda p: p.mul_(10.0)),
          ("scaled weights", *UNLIKE), (5,)),
    Fault("scores without their factor", FL, attribute("scaling", lambda x: 1.0), ("score scale",), "0.1768"),
    Fault("biases of 1", FG, each("c_fc.bias", change=lambda p: p.fill_(1.0)), UNLIKE, "bias"),
    Fault("table of deviation 1, tied, GPT-2", FG, each("wte", change=lambda p: p.normal_(0, 1)), FIRST_LOSS, "table"),
    Fault("a layer of NaN", FG, in_layers((2,), "c_proj.weight", change=lambda p: p.fill_(math.nan)), NOT_FINITE, (2,)),
)  # fmt: skip


def head_tied_no_more(model: nn.Module) -> None:
    """The configuration ties the head, the parameter is another."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # type: ignore[union-attr, operator]


def _own(fault: str):  # type: ignore[no-untyped-def]
    return lambda _: models.decoder(fault)


def _zero_over_zero(_: nn.Module) -> nn.Module:
    """The row of a word that is read is 0 (a padding id), no positions are added, and norms have no epsilon."""
    model = models.decoder()
    model.tokens.weight[int(models.words()[0].tokens[0, 5])] = 0  # type: ignore[index]
    model.positions.weight.zero_()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.0
    return model


WIRING = (
    Fault("no 1/sqrt(d_head)", "own", _own("no scale"), ("score scale",), "0.1768", "several"),
    Fault("times sqrt(d_head)", "own", _own("times"), ("score scale",), "0.1768", "OmniTokenizer issue 14"),
    Fault("over sqrt(d_model)", "own", _own("by width"), ("score scale",), "0.1768", "a ViT, issue 1"),
    Fault("over d_head", "own", _own("by d"), ("score scale",), "0.1768"),
    Fault("scaled after the softmax", "own", _own("after"), ("attention weights",), "softmax", "a ViT, issue 2"),
    Fault("softmax over queries", "own", _own("wrong axis"), ("attention weights",), "softmax"),
    Fault("attention over the batch", "own", _own("over the batch"), ("reads other sequences",), "batch"),
    Fault("no causal mask", "own", _own("no mask"), ("reads ahead",), "later"),
    Fault("a skip forgotten, attention", "own", _own("no skip, attention"), ("no skip",), (5,)),
    Fault("a skip forgotten, feed-forward", "own", _own("no skip, feed-forward"), ("no skip",), (5,)),
    Fault("the skip carries the norm's output", "own", _own("norm on the skip"), ("norm on the skip",), "norm",
          least="note"),
    Fault("a row of the mask allows nothing", "own", _own("hidden row"), NOT_FINITE, "mask",
          "pytorch/pytorch issue 103749"),
    Fault("a norm without epsilon reads zeros", "own", _zero_over_zero, NOT_FINITE, "epsilon",
          "VeriSilicon/TIM-VX pull 589"),
    Fault("a doubled skip", "own", _own("doubled skip"), ("doubled skip",), (5,)),
)  # fmt: skip

FAULTS = (*TRAINED, *FRESH, *WIRING, *MORE)
