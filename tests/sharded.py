"""A process whose model is sharded (FSDP2): what is said of it is what was said before. For test_sharded.py.

python sharded.py RANK N FOLDER
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

import signalprop as sp
from signalprop.errors import InputError
from tiny import gpt2, llama


class Own(torch.nn.Module):
    """Packed attention, of no family."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16)
        one = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(one, 2, enable_nested_tensor=False).layers

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)  # every process draws the same weights
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    half = transformers.GPTJConfig(n_embd=32, n_layer=3, n_head=2, rotary_dim=8, vocab_size=40)  # proved by its twin
    for model in (llama(), gpt2(), Own(), transformers.GPTJForCausalLM(half).bfloat16()):
        torch.manual_seed(0)
        model.eval()
        name = type(model).__name__
        wanted = sp.scheme("xavier")
        said = [str(sp.anatomy(model)).partition("\n")[2], str(sp.check(model, wanted)).replace(name, "").split()]
        layers = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        again = [
            str(sp.anatomy(model)).partition("\n")[2],
            str(sp.check(model, wanted)).replace(f"FSDP{name}", "").split(),
        ]
        assert said == again, (said, again)
        with pytest.raises(InputError, match="sharded over processes"):
            sp.diagnose(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
