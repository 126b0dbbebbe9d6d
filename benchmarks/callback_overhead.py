"""What a monitor costs in a run: step time with a SignalMonitor that samples every 50th step, over the bare step.

A 12-layer GPT-2 of width 256 (Hugging Face, in training mode, dropout 0.1) reads 4 x 128 tokens on one thread, CPU time
(`time.process_time`). A run's cost is that of its samples: an unsampled step does the same work as a bare one, but for
one comparison. So ordinary steps, steps with a sample, and ordinary ones again (the control) take turns, in changing
order; what a sample costs more, over 50 steps, is the overhead averaged over a run. Attaching, reading the weights,
predicting the bands, and writing are all in it. `everything`: with attention, rank, alignment, outliers and identity
on 2 sequences besides.

    python -m benchmarks.callback_overhead [--turns 12] [--every 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import hugging_face
from benchmarks.timing import summary, write_rows
from signalprop.monitoring import SignalMonitor

VARIANTS = ("bare", "bare again", "sampled", "everything")
ALSO = ("attention", "rank", "alignment", "outliers", "identity")


def step_timer(vocab: int, folder: Path) -> Callable[[str], float]:
    """A function that runs one training step of a variant and returns its CPU seconds."""
    torch.manual_seed(0)
    model = hugging_face("gpt2", 12, vocab_size=vocab, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (4, 128))
    monitors = {
        "sampled": SignalMonitor(model, every=1, jsonl=folder / "signal.jsonl"),
        "everything": SignalMonitor(model, every=1, jsonl=folder / "everything.jsonl", also=ALSO),
    }

    def step(variant: str) -> float:
        monitor = monitors.get(variant)
        start = time.process_time()
        if monitor is None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            with monitor:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                numbers = monitor.step()
            assert numbers is not None and "signal/outside" in numbers and len(numbers) > 48
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return step


def compare(vocab: int, turns: int, every: int) -> dict[str, Any]:
    """The overhead of variants averaged over a run, in percent of its steps, and the bare step's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        step = step_timer(vocab, Path(folder))
        for variant in VARIANTS:
            step(variant)  # what is done once: imports, caches, the band of the start
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for turn in range(turns):
            first = turn % len(VARIANTS)  # every variant comes first, second, ... equally often
            for variant in VARIANTS[first:] + VARIANTS[:first]:
                seconds[variant].append(step(variant))
    bare = seconds["bare"]
    return {
        "vocab": vocab,
        "every": every,
        "bare_seconds": statistics.median(bare),
        "percent": {
            variant: summary([100 * (s / b - 1) / every for s, b in zip(seconds[variant], bare, strict=True)])
            for variant in VARIANTS[1:]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="steps of each variant")
    parser.add_argument("--every", type=int, default=50, help="steps from one sample to the next")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257, 1000])
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| vocabulary | bare step | " + " | ".join(f"{variant}, %" for variant in VARIANTS[1:]) + " |")
    print("| --- | --- | " + " | ".join("---" for _ in VARIANTS[1:]) + " |", flush=True)
    rows = []
    for vocab in options.vocab:
        row = compare(vocab, options.turns, options.every)
        rows.append(row)
        cells = [
            f"{p['median']:.3f} ± {p['standard_error']:.3f} [{p['low']:.3f}, {p['high']:.3f}]"
            for p in row["percent"].values()
        ]
        print(f"| {vocab} | {1000 * row['bare_seconds']:.0f} ms | " + " | ".join(cells) + " |", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
