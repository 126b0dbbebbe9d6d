"""Models in wrappers, with adapters, in other number formats, and x-transformers' own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.code_bases.language import NanoGPT, cross_entropy
from benchmarks.code_bases.parts import HEADS, LAYERS, LM, WORDS, Case, D, ids, in_list, normal


def distributed() -> nn.Module:
    """In DistributedDataParallel, of one process."""
    if not torch.distributed.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(LM())


def lightning() -> nn.Module:
    """A LightningModule that holds the model."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LM()

        def forward(self, idx: Tensor) -> Any:
            return self.model(idx)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return cross_entropy(self(batch[:, :-1]), batch[:, 1:])

    return Lit()


def lora() -> nn.Module:
    """A model of one's own with LoRA of PEFT."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(LM(), LoraConfig(target_modules=["qkv", "up"], r=4, init_lora_weights=False))


def learnt_tokens(kind: str) -> nn.Module:
    """A GPT-2 with PEFT's prompt or prefix tuning."""
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(vocab_size=WORDS, n_embd=D, n_layer=LAYERS, n_head=HEADS, n_positions=64, use_cache=True)
    config = (PromptTuningConfig if kind == "prompt" else PrefixTuningConfig)(
        task_type="CAUSAL_LM", num_virtual_tokens=4
    )
    return get_peft_model(GPT2LMHeadModel(sizes), config)


def x_transformers(**options: Any) -> nn.Module:
    """The package's own."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=D, depth=LAYERS, heads=HEADS, attn_dim_head=D // HEADS, **options)
    return TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)


def after_norms(model: Any) -> list[nn.Module]:
    """x-transformers' norms on the stream, and the last sum."""
    layers = model.attn_layers.layers
    return [*(norms[2] for norms, _, _ in layers[:-1]), layers[-1][2]]


def _last(output: Any) -> Tensor:
    return (output.logits[:, -1] * normal(3, WORDS)).sum()


def _prompted() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def added(model: nn.Module) -> list[nn.Module]:
    """x-transformers': the modules that are given a branch and the stream."""
    return [m for m in model.modules() if type(m).__name__ == "Residual"]


_GPT2 = in_list("base_model.transformer.h")

CASES = {
    "torch.compile": Case(lambda: torch.compile(LM(), backend="eager"), layers=in_list("_orig_mod.blocks")),
    "DistributedDataParallel": Case(distributed, layers=in_list("module.blocks")),
    "a LightningModule": Case(lightning, layers=in_list("model.blocks"), needs="lightning"),
    "LoRA (PEFT) in a model of one's own": Case(lora, layers=in_list("base_model.model.blocks"), needs="peft"),
    "prompt tuning (PEFT)": Case(lambda: learnt_tokens("prompt"), _prompted, _GPT2, loss=_last, needs="peft"),
    "prefix tuning (PEFT)": Case(lambda: learnt_tokens("prefix"), _prompted, _GPT2, loss=_last, needs="peft"),
    "double precision": Case(lambda: LM().double()),
    "bfloat16": Case(
        lambda: NanoGPT().bfloat16(),
        lambda: (ids(), ids().roll(-1, 1)),
        in_list("transformer.h"),
        loss=lambda out: out[1],
    ),
    "x-transformers": Case(x_transformers, layers=added, needs="x-transformers"),
    "x-transformers, post-norm": Case(
        lambda: x_transformers(pre_norm=False), layers=after_norms, needs="x-transformers"
    ),
}
