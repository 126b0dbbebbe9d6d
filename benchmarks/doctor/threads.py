"""More faults from public threads: configurations, conversions and code that load without a word and are wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.doctor import models
from benchmarks.doctor.changes import blocks, each, in_layers, named, reordered, zero
from benchmarks.doctor.table import Fault

CONVENTION = ("weights of another convention",)
SETTING = ("another configuration",)
L, LT, G, B, MOE = "trained llama", "trained llama, tied", "trained gpt2", "trained bert", "trained mixtral"
CAPS, QWEN, WINDOW = "trained gemma2, low caps", "trained qwen3", "trained mistral, window of 4"
GRANITE, NEOX, OPT = "trained granite", "trained gpt_neox", "trained opt"


def configured(**changes: Any) -> Callable[[Any], nn.Module]:
    """The same weights in a model of a configuration that differs."""

    def plant(model: Any) -> nn.Module:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, value)
        other: nn.Module = type(model)(config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return plant


def rolled(*words: str, by: int = 1) -> Callable[[Any], None]:
    """Rows of tables are some places off."""
    return each(*words, change=lambda p: p.copy_(p.roll(by, 0)))


def by_thirds(model: Any) -> None:
    """GPT-NeoX's fused map stored as thirds, where it reads head by head."""
    heads = model.config.num_attention_heads
    for layer in blocks(model):
        for p in layer.attention.query_key_value.parameters():
            p.copy_(p.clone().unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(p.shape))


def without_scales(bits: float, rows: bool) -> Callable[[Any], None]:
    """Whole numbers whose scales, of a tensor or of a row, were lost on loading."""

    def plant(model: Any) -> None:
        for p in blocks(model).parameters():
            if p.ndim == 2:
                largest = p.abs().amax(1, keepdim=True) if rows else p.abs().max()
                p.copy_((p * bits / largest).round())

    return plant


def eight_bit_floats(model: Any) -> None:
    """float8_e4m3fn without the scale of each tensor."""
    for p in blocks(model).parameters():
        if p.ndim == 2:
            p.copy_((p * 448 / p.abs().max()).to(torch.float8_e4m3fn).float())


def new_rows(model: Any) -> None:
    """The last 24 rows of a tied table are new, as nn.Embedding draws them."""
    for p in named(model, "embed_tokens"):
        p[-24:].normal_(0, 1)


def same_head(model: Any) -> None:
    """Tied on loading, and trained apart: the head of the file is lost."""
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)


def merged_and_applied(model: Any) -> nn.Module:
    """Adapters on a base that they have been merged into."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    outer: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]))
    for module in outer.modules():
        if hasattr(module, "lora_B"):
            module.lora_B["default"].weight.normal_(0, 0.3)
    peft: nn.Module = outer.eval()
    return peft


def experts_rolled(model: Any) -> None:
    """Experts are one place off, and the router is not."""
    for p in named(model, "experts"):
        p.copy_(p.roll(1, 0))


def nobody_chooses(model: Any) -> None:
    """One expert of layer 2 is last for every token: its scores are those of the others' mean, much lower."""
    gate = named(blocks(model)[2], "gate.weight")[0]
    with torch.no_grad():
        held: list[torch.Tensor] = []
        hook = blocks(model)[2].post_attention_layernorm.register_forward_hook(lambda m, a, out: held.append(out))
        model(torch.from_numpy(models.text_of("mixtral")[0].tokens))
        hook.remove()
    mean = held[0].flatten(0, 1).mean(0)
    gate[3] = -2 * gate.norm(dim=1).max() * mean / mean.norm()


def layers_equal(_: nn.Module) -> nn.Module:
    """All layers are copies of one, as nn.TransformerEncoder makes them."""
    model = models.decoder()
    for block in model.blocks[1:]:
        block.load_state_dict(model.blocks[0].state_dict())
    return model


def head_copied(_: nn.Module) -> nn.Module:
    """The head begins as a copy of the table, which was to be the same parameter."""
    model = models.decoder()
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    return model


def own(fault: str) -> Callable[[Any], nn.Module]:
    """A decoder with a fault in its code."""
    return lambda _: models.decoder(fault)


SWITCHES = (
    Fault("twice as many heads", L, configured(num_attention_heads=12, num_key_value_heads=4, head_dim=8), SETTING,
          "num_attention_heads", "huggingface/transformers issue 6540"),
    Fault("feed-forwards after attention", NEOX, configured(use_parallel_residual=False), SETTING,
          "use_parallel_residual", "ml-explore/mlx-lm pull 586"),
    Fault("rotary positions on all of a head", NEOX,
          configured(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
          SETTING, "partial_rotary_factor", "lablup/mlxcel pull 928"),
    Fault("fused map stored as thirds", NEOX, by_thirds, CONVENTION, "thirds", "lablup/mlxcel pull 928"),
    Fault("logits not divided", GRANITE, configured(logits_scaling=1.0), (*SETTING, *CONVENTION), "logits",
          "vllm-project/vllm pull 52158"),
    Fault("branches not multiplied", GRANITE, configured(residual_multiplier=1.0), SETTING, "residual_multiplier",
          "OpenNMT/CTranslate2 pull 1882"),
    Fault("embeddings not multiplied", GRANITE, configured(embedding_multiplier=1.0), (*SETTING, *CONVENTION),
          "embedding", "OpenNMT/CTranslate2 pull 1882"),
    Fault("no window", WINDOW, configured(sliding_window=None), SETTING, "sliding_window",
          "sgl-project/sglang pull 4823"),
    Fault("no cap of logits", CAPS, configured(final_logit_softcapping=None), SETTING, "final_logit_softcapping",
          "apple/ml-cross-entropy issue 48"),
    Fault("no cap of scores", CAPS, configured(attn_logit_softcapping=None), SETTING, "attn_logit_softcapping"),
    Fault("one expert for two", MOE, configured(num_experts_per_tok=1), SETTING, "num_experts_per_tok"),
)  # fmt: skip
WEIGHTS = (
    Fault("query and key norms left at 1", QWEN, each("q_norm", "k_norm", change=lambda p: p.fill_(1.0)),
          ("norm gains not loaded",), "q_norm", "unslothai/unsloth pull 2452"),
    Fault("query norms left at 1", QWEN, each("q_norm", change=lambda p: p.fill_(1.0)),
          ("norm gains not loaded",), "q_norm"),
    Fault("norms of the layers left at 1", L, each("layernorm", change=lambda p: p.fill_(1.0)),
          ("norm gains not loaded",), "layernorm"),
    Fault("rows of the table one off", L, rolled("embed_tokens"), CONVENTION, "1 row", "gerstung-lab/Delphi issue 20"),
    Fault("rows of the head one off", L, rolled("lm_head", by=-1), CONVENTION, "1 row"),
    Fault("table one row off, tied", LT, rolled("embed_tokens", by=3), CONVENTION, "3 rows"),
    Fault("int8 without scales of rows", L, without_scales(127, True), ("scales lost",), "whole numbers",
          "Lightricks/LTX-2 pull 172"),
    Fault("int8 without scales of tensors", L, without_scales(127, False), ("scales lost",), "whole numbers"),
    Fault("float8 without scales", L, eight_bit_floats, ("scales lost",), "448",
          "unslothai/unsloth issue 6200"),
    Fault("logits 8 times too large", L, each("lm_head", change=lambda p: p.mul_(8)), CONVENTION, "logits"),
    Fault("new rows of deviation 1", LT, new_rows, ("outlying rows",), "rows",
          "huggingface/transformers issue 6562"),
    Fault("head tied that was trained apart", L, same_head, ("head not loaded", *CONVENTION), "head"),
    Fault("adapters merged and applied", L, merged_and_applied, CONVENTION, "left out", "huggingface/peft issue 2368"),
    Fault("layers one place off", L, reordered(lambda n: [*range(1, n), 0]), CONVENTION, "place"),
    Fault("experts one place off", MOE, experts_rolled, CONVENTION, "experts"),
    Fault("an expert that nobody chooses", MOE, nobody_chooses, ("unused experts",), (2,)),
    Fault("dead units", OPT, in_layers((2,), "fc1.bias", change=lambda p: p.fill_(-30.0)), ("dead units",), (2,)),
    Fault("biases of the norms lost", G, each("ln_1.bias", "ln_2.bias", "ln_f.bias", change=zero),
          ("biases of zeros",), "ln"),
    Fault("norm of the embeddings left at its start", B,
          lambda m: (m.bert.embeddings.LayerNorm.reset_parameters()), ("norm gains not loaded",), "embeddings"),
    Fault("trained for the word after next", "trained llama, two ahead", lambda m: None, ("labels shifted",), "2",
          "huggingface/transformers issue 47394"),
    Fault("trained for the word itself", "trained llama, the same word", lambda m: None, ("labels shifted",), "itself",
          "huggingface/transformers issue 27517"),
)  # fmt: skip
CODE = (
    Fault("head that copies the table", "own", head_copied, ("head not tied",), "token table"),
    Fault("dropout in evaluation", "own", own("dropout"), ("differs between calls",), "evaluation mode",
          "Coderx7/SimpleNet issue 2"),
    Fault("the stream is detached", "own", own("detached"), ("no gradient arrives",), (0, 1, 2, 3, 4),
          "huggingface/transformers issue 21381"),
    Fault("norm over the tokens", "own", own("norm over tokens"), ("reads ahead", "norm over tokens"), ""),
    Fault("norm over the batch", "own", own("norm over batch"), ("reads other sequences",), "batch"),
    Fault("an inverted mask", "own", own("inverted mask"), ("reads ahead",), "later"),
    Fault("a mask that is one off", "own", own("mask one off"), ("reads ahead",), "later"),
    Fault("padding is read", "own encoder", own("padding"), ("padding is read",), "padding",
          "AI4Bharat/IndicBERT issue 20"),
    Fault("all layers drawn as copies of one", "own", layers_equal, ("equal layers",), tuple(range(12)),
          "pytorch/pytorch issue 86274"),
)  # fmt: skip
MORE = (*SWITCHES, *WEIGHTS, *CODE)
