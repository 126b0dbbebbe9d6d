"""What a training probe costs: step time with every sublayer's points, forward and backward, over the bare step.

A 12-layer GPT-2 of width 256 (Hugging Face, in training mode) reads 4 x 128 tokens on one thread. Steps
(forward, backward, AdamW) of four variants take turns: bare, bare again (the control), probed, and probed on
every tenth turn only. The number is CPU
time (`time.process_time`; attaching, reading the Profile and detaching included): ten turns of a variant over
the ten bare steps among them. The table gives the median of these ratios, its standard error, and the
quartiles.

    python -m benchmarks.probe_overhead [--groups 12] [--vocab 50257 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models import hugging_face
from benchmarks.timing import summary, write_rows
from signalprop.probes import Probe

VARIANTS = ("bare", "bare again", "every step", "every 10th step")


def step_timer(vocab: int) -> Callable[[bool], float]:
    """A function that runs one training step, probed or not, and returns its CPU seconds."""
    torch.manual_seed(0)
    model = hugging_face("gpt2", 12, vocab_size=vocab, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (4, 128))

    def step(probed: bool) -> float:
        start = time.process_time()
        if probed:
            with Probe(model) as probe:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                profile = probe.profile()
            assert profile is not None and profile.gradient is not None
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return step


def compare(vocab: int, groups: int) -> dict[str, Any]:
    """Ratios to the bare step by variant, and the bare step's seconds."""
    step = step_timer(vocab)
    for i in range(4):
        step(i % 2 == 1)
    ratios: dict[str, list[float]] = {variant: [] for variant in VARIANTS[1:]}
    bare = []
    for _ in range(groups):
        seconds = dict.fromkeys(VARIANTS, 0.0)
        for turn in range(10):
            first = turn % 4  # every variant comes first, second, ... equally often
            for variant in VARIANTS[first:] + VARIANTS[:first]:
                seconds[variant] += step(variant == "every step" or (variant == "every 10th step" and turn == 5))
        bare.append(seconds["bare"] / 10)
        for variant in ratios:
            ratios[variant].append(seconds[variant] / seconds["bare"])
    return {
        "vocab": vocab,
        "bare_seconds": statistics.median(bare),
        "ratios": {variant: summary(values) for variant, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=12, help="groups of ten turns")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257, 1000])
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| vocabulary | bare step | " + " | ".join(VARIANTS[1:]) + " |")
    print("| --- | --- | " + " | ".join("---" for _ in VARIANTS[1:]) + " |", flush=True)
    rows = []
    for vocab in options.vocab:
        row = compare(vocab, options.groups)
        rows.append(row)
        cells = [
            f"{r['median']:.3f} ± {r['standard_error']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
            for r in row["ratios"].values()
        ]
        print(f"| {vocab} | {1000 * row['bare_seconds']:.0f} ms | " + " | ".join(cells) + " |", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
