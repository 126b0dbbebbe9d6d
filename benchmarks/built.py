"""Step time of the built model over the Hugging Face one of the same shape and weights, beside Hugging Face twice.

    python -m benchmarks.built [--rounds N]

12 layers, width 256, 4 heads, 4 x 128 tokens, forward and backward, one thread; CPU time, paired and interleaved, so
that a busy machine slows all three alike. The ratio is a median over rounds with its standard error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import signalprop as sp
from benchmarks.models import hugging_face
from benchmarks.timing import summary

LAYERS, TOKENS, BATCH, VOCABULARY = 12, 128, 4, 1000


def step(model: Any, name: str, ids: torch.Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        logits = model(**{name: ids}).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()

    return run


def ratios(steps: list[Callable[[], None]], rounds: int) -> list[dict[str, float]]:
    """The CPU time of every step over that of the first."""
    times = np.zeros((rounds, len(steps)))
    for run in steps:
        run()
    for i in range(rounds):
        for j in np.random.default_rng(i).permutation(len(steps)):
            began = time.process_time()
            steps[j]()
            times[i, j] = time.process_time() - began
    return [summary(column) for column in (times / times[:, :1]).T.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    for family in ("bert", "gpt2", "llama"):
        first, second = hugging_face(family, LAYERS), hugging_face(family, LAYERS)
        architecture = sp.Architecture.from_hf(first)
        built = sp.build(sp.scheme("huggingface")(architecture), seed=0)
        steps = [step(first, "input_ids", ids), step(second, "input_ids", ids), step(built, "inputs", ids)]
        _, control, ratio = ratios(steps, rounds)
        print(
            f"{family:6} built / Hugging Face {ratio['median']:.3f} +- {ratio['standard_error']:.3f}   "
            f"Hugging Face / Hugging Face {control['median']:.3f} +- {control['standard_error']:.3f}"
        )


if __name__ == "__main__":
    main()
