"""Memory and time of `signalprop diagnose` on a model of 1.1 billion parameters: `python -m benchmarks.diagnosing`.

The shape is TinyLlama's, the weights are random, in bfloat16, in a directory of their own (2.2 GB, removed afterwards).
The command runs in a process of its own; the peak is that of its resident memory, mapped files included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BOUND = 8.0  # GiB
SHAPE = {
    "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


def write(folder: Path) -> int:
    """The checkpoint, layer by layer of random numbers; how many parameters it has."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.normal_(0.0, 0.02)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="an existing checkpoint instead")
    parser.add_argument("options", nargs="*", help="further options of diagnose, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "model"
        if given.folder is None:
            print(f"{write(folder) / 1e9:.2f} billion parameters", flush=True)
        options = given.options or ["--tokens", "1024", "--seq-len", "512", "--batch-size", "2"]
        arguments = ["diagnose", str(folder), "--dtype", "auto", *options, "--json", os.devnull]
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "signalprop", *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    peak = usage.ru_maxrss / 2**20
    print(f"peak {peak:.2f} GiB (bound {BOUND:g}), {seconds:.0f} s: {' '.join(options)}")
    return int(peak > BOUND or os.waitstatus_to_exitcode(status) != 0)


if __name__ == "__main__":
    raise SystemExit(main())
