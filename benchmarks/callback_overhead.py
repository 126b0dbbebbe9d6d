"""What a monitor costs in a run: step time with a SignalMonitor that samples every 50th step, over the bare step.

python -m benchmarks.callback_overhead [--rounds 10] [--every 50] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import hugging_face
from benchmarks.page import table
from benchmarks.timing import command_line, one_thread, shown, summary, take_turns, write_rows
from signalprop.monitoring import SignalMonitor

NAMES = {"bare again": "bare again (control)", "sampled": "signal", "everything": "everything"}
ALSO = ("attention", "rank", "alignment", "outliers", "identity")

TITLE = "Monitoring a run"
ABOUT = """
`python -m benchmarks.callback_overhead`: a 12-layer GPT-2 of width 256 (Hugging Face, in training mode, dropout 0.1)
reads 4 × 128 tokens on one thread, CPU time. A run's cost is that of its samples: an unsampled step does the same
work as a bare one, but for one comparison. So ordinary steps, steps with a sample, and ordinary ones again take
turns; what a sample costs more, over 50 steps, is the overhead averaged over a run, in percent. Attaching, reading
the weights, predicting the bands, and writing are all in it. *Everything*: with attention, rank, alignment, outliers
and identity on 2 sequences besides.
"""


def steps(vocab: int, folder: Path) -> dict[str, Callable[[], None]]:
    """A training step of every variant."""
    torch.manual_seed(0)
    model = hugging_face("gpt2", 12, vocab_size=vocab, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (4, 128))

    def bare() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(monitor: SignalMonitor) -> Callable[[], None]:
        def step() -> None:
            with monitor:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                numbers = monitor.step()
            if numbers is None or "signal/outside" not in numbers or len(numbers) <= 48:
                raise ValueError("the monitor did not sample this step")
            optimizer.step()
            optimizer.zero_grad()

        return step

    sampled = SignalMonitor(model, every=1, jsonl=folder / "signal.jsonl")
    everything = SignalMonitor(model, every=1, jsonl=folder / "everything.jsonl", also=ALSO)
    return {"bare": bare, "bare again": bare, "sampled": watched(sampled), "everything": watched(everything)}


def compare(vocab: int, rounds: int, every: int) -> dict[str, Any]:
    """The overhead of variants averaged over a run, in percent of its steps, and the bare step's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = take_turns(steps(vocab, Path(folder)), rounds)  # the first round, of things done once, is not counted
    bare = seconds["bare"]
    return {
        "vocab": vocab,
        "every": every,
        "bare_seconds": statistics.median(bare),
        "percent": {
            name: summary([100 * (own / other - 1) / every for own, other in zip(seconds[name], bare, strict=True)])
            for name in NAMES
        },
    }


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page."""
    return table(
        ["vocabulary", "bare step", *(f"{words}, %" for words in NAMES.values())],
        [
            [
                str(row["vocab"]),
                f"{1000 * row['bare_seconds']:.0f} ms",
                *(shown(row["percent"][name]) for name in NAMES),
            ]
            for row in rows
        ],
    )


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each variant")
    parser.add_argument("--every", type=int, default=50, help="steps from one sample to the next")
    parser.add_argument("--vocab", type=int, nargs="+", default=[1000, 50257])
    options = parser.parse_args()
    one_thread()
    rows = [compare(vocab, options.rounds, options.every) for vocab in options.vocab]
    print(section(rows))
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
