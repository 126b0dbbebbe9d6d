"""Small models in training, for the tests of monitoring; run as a script, one process of its test with several."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

logging.getLogger("transformers").setLevel(logging.ERROR)
VOCABULARY, LENGTH = 60, 24


def gpt2(n_layers: int = 3, **changes: Any) -> nn.Module:
    """GPT-2 in training mode, dropout included, freshly seeded."""
    torch.manual_seed(0)
    common = {"n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**common, n_layer=n_layers, bos_token_id=0, eos_token_id=0, **changes)).train()


def llama(n_layers: int = 3, experts: int = 0, **changes: Any) -> nn.Module:
    """Llama in training mode, or Mixtral with some experts."""
    torch.manual_seed(0)
    common = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    common |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_hidden_layers": n_layers, **changes}
    if experts:
        routed = MixtralConfig(**common, num_local_experts=experts, output_router_logits=True)
        return MixtralForCausalLM(routed).train()
    return LlamaForCausalLM(LlamaConfig(**common)).train()


def sequences(n: int = 4, seed: int = 1) -> Tensor:
    """Tokens that can be learned: each follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, VOCABULARY, (n,), generator=generator)]
    for _ in range(LENGTH - 1):
        noise = torch.randint(0, 3, (n,), generator=generator)
        ids.append((ids[-1] * 7 + 3 + noise) % VOCABULARY)
    return torch.stack(ids, 1)


def other(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of another kind, and arguments with labels."""
    torch.manual_seed(0)
    ids, mask = sequences(), torch.ones(4, LENGTH, dtype=torch.long)
    wide = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    if family == "bert":
        mask[1, 10:] = 0
        config = BertConfig(**wide, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3)
        model: nn.Module = BertForSequenceClassification(config)
        return model.train(), {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 0])}
    if family == "vit":
        model = ViTForImageClassification(ViTConfig(**wide, image_size=16, patch_size=4, num_channels=3, num_labels=3))
        return model.train(), {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}
    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=2, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train(), {
        "input_ids": ids,
        "labels": sequences(seed=2)[:, :10].contiguous(),
    }


def batches(n: int) -> Iterator[Tensor]:
    """Batches of a training run."""
    return (sequences(seed=10 + k) for k in range(n))


def hooks(model: nn.Module) -> int:
    """How many hooks are on."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def train(model: nn.Module, steps: int, monitor: Any = None, *, lr: float = 1e-3, accumulate: int = 1) -> list[float]:
    """The losses of some AdamW steps, of a seeded run."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for ids in batches(steps):
        for part in ids.chunk(accumulate):
            loss = model(input_ids=part, labels=part).loss / accumulate
            loss.backward()
            losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(rank: int, size: int, folder: Path) -> None:
    """Train with DistributedDataParallel, with a monitor and without; rank 0 writes what came of it."""
    import torch.distributed as dist

    from signalprop.monitoring import SignalMonitor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    losses, models = {}, []
    for name in ("bare", "monitored"):
        inner = gpt2()
        models.append(inner)
        model = nn.parallel.DistributedDataParallel(inner)
        if name == "bare":
            losses[name] = train(model, 5)
            continue
        path = folder / f"rank{rank}.jsonl"
        with SignalMonitor(model, every=2, jsonl=path) as monitor:
            losses[name] = train(model, 5, monitor)
    same = all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": losses, "same": same, "hooks": hooks(models[1])}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
