"""Tokens per second of a training step: the model that signalprop builds against the Hugging Face one of its shape.

    python -m benchmarks.throughput [--rounds N] [--families ...] [--modes eager compiled] [--device cpu] [--json FILE]

A step is forward, cross-entropy, backward and AdamW, on one thread. Three models take turns in changing order, so that
a busy machine slows all alike: Hugging Face, Hugging Face again (the control), built. Every round gives two ratios of
speed; the table gives their medians with standard errors. On the CPU its own time is taken (`time.process_time`), on a
GPU the clock's, with all work done. Compiled: the whole model, as `compile: true` in a recipe does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import signalprop as sp
from benchmarks.models import hugging_face
from benchmarks.timing import summary, write_rows

VOCABULARY = 1000


@dataclass(frozen=True)
class Shape:
    """Layers, width, heads, and what a step reads."""

    layers: int
    width: int
    heads: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.batch} x {self.tokens} tokens"


SHAPES = (Shape(12, 256, 4, 4, 128), Shape(4, 512, 8, 2, 256), Shape(24, 128, 2, 4, 128))


def step(model: nn.Module, name: str, ids: torch.Tensor) -> Callable[[], None]:
    """One training step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        logits = model(**{name: ids}).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ids.is_cuda:
            torch.cuda.synchronize()

    return run


def ratios(steps: list[Callable[[], None]], rounds: int, clock: Callable[[], float]) -> tuple[list[Any], list[float]]:
    """For every step how much faster it is than the first, and its median seconds."""
    times = np.zeros((rounds, len(steps)))
    for run in steps:
        run()
        run()
    for i in range(rounds):
        for j in np.random.default_rng(i).permutation(len(steps)):
            began = clock()
            steps[j]()
            times[i, j] = clock() - began
    return [summary(column) for column in (times[:, :1] / times).T.tolist()], np.median(times, 0).tolist()


def models(family: str, shape: Shape, device: str) -> list[tuple[nn.Module, str]]:
    """Hugging Face twice, and the built model of the same shape, with the names of their inputs."""
    size = {"width": shape.width, "heads": shape.heads, "tokens": shape.tokens, "vocab_size": VOCABULARY}
    first, second = (hugging_face(family, shape.layers, **size) for _ in range(2))
    for model in (first, second):
        model.config.use_cache = False  # of keys and values, which training has no use for
    built = sp.build(sp.scheme("huggingface")(sp.Architecture.from_hf(first)), seed=0)
    named = [(first, "input_ids"), (second, "input_ids"), (built, "inputs")]
    return [(model.train().to(device), name) for model, name in named]


def compare(family: str, shape: Shape, mode: str, rounds: int, device: str) -> dict[str, Any]:
    """A row of the table."""
    torch._dynamo.reset()
    ids = torch.randint(3, VOCABULARY, (shape.batch, shape.tokens), generator=torch.Generator().manual_seed(0))
    found = models(family, shape, device)
    if mode == "compiled":
        for model, _ in found:
            model.compile()
    clock = time.process_time if device == "cpu" else time.perf_counter
    (_, control, built), seconds = ratios([step(m, name, ids.to(device)) for m, name in found], rounds, clock)
    tokens = shape.batch * shape.tokens
    return {
        "family": family,
        "shape": vars(shape),
        "mode": mode,
        "hugging_face_tokens_per_second": tokens / seconds[0],
        "built_tokens_per_second": tokens / seconds[2],
        "built": built,
        "control": control,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--families", nargs="+", default=["bert", "llama", "gpt2"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="indices of SHAPES")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | shape | mode | Hugging Face | built | built / Hugging Face | Hugging Face / Hugging Face |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for family in options.families:
        for mode in options.modes:
            for shape in (SHAPES[i] for i in options.shapes):
                row = compare(family, shape, mode, options.rounds, options.device)
                rows.append(row)
                speeds = [f"{row[f'{who}_tokens_per_second']:,.0f} tokens/s" for who in ("hugging_face", "built")]
                cells = [f"{row[k]['median']:.3f} ± {row[k]['standard_error']:.3f}" for k in ("built", "control")]
                print(f"| {family} | {shape} | {mode} | {' | '.join([*speeds, *cells])} |", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
