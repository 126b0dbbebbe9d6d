"""What a monitor costs in a run: step time with a SignalMonitor that samples every 50th step, over the bare step."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.models import hugging_face
from benchmarks.timing import shown, summary, table, take_turns
from signalprop.monitoring import SignalMonitor

NAMES = {
    "bare again": "bare again (control)",
    "streams": "signal without attention",
    "sampled": "signal",
    "everything": "everything",
}
ALSO = ("attention", "rank", "alignment", "outliers", "identity")

TITLE = "Monitoring a run"
ABOUT = """
`python -m benchmarks callback_overhead`: a 12-layer GPT-2 of width 256 (Hugging Face, in training mode, dropout 0.1)
reads 4 × 128 tokens on one thread, CPU time. A run's cost is that of its samples: an unsampled step does the same
work as a bare one, but for one comparison. So ordinary steps, steps with a sample, and ordinary ones again take
turns; what a sample costs more, over 50 steps, is the overhead averaged over a run, in percent. Attaching, reading
the weights, predicting the bands, and writing are all in it. *Everything*: with attention, rank, alignment, outliers
and identity on 2 sequences besides.
"""


def steps(
    vocab: int,
    folder: Path,
    *,
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    batch: int = 4,
    tokens: int = 128,
    device: torch.device | None = None,
) -> dict[str, Callable[[], None]]:
    """A training step of every variant."""
    torch.manual_seed(0)
    size = {"width": width, "heads": heads, "tokens": tokens}
    model = hugging_face("gpt2", layers, vocab_size=vocab, dropout=0.1, **size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (batch, tokens), device=device)

    def bare() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(monitor: SignalMonitor) -> Callable[[], None]:
        def step() -> None:
            with monitor:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                numbers = monitor.step()
            if numbers is None or "signal/outside" not in numbers or len(numbers) <= 4 * layers:
                raise ValueError("the monitor did not sample this step")
            optimizer.step()
            optimizer.zero_grad()

        return step

    streams = SignalMonitor(model, every=1, jsonl=folder / "streams.jsonl", also=())
    sampled = SignalMonitor(model, every=1, jsonl=folder / "signal.jsonl")
    everything = SignalMonitor(model, every=1, jsonl=folder / "everything.jsonl", also=ALSO)
    monitors = {"streams": streams, "sampled": sampled, "everything": everything}
    return {"bare": bare, "bare again": bare} | {name: watched(monitor) for name, monitor in monitors.items()}


def measured(rounds: int = 10, every: int = 50) -> Iterator[str]:
    """The section of the page: the overhead averaged over a run, in percent of its steps."""
    rows = []
    for vocab in (1000, 50257):
        with tempfile.TemporaryDirectory() as folder:
            seconds = take_turns(steps(vocab, Path(folder)), rounds)
        bare = seconds["bare"]
        found = [
            summary([100 * (own / other - 1) / every for own, other in zip(seconds[name], bare, strict=True)])
            for name in NAMES
        ]
        rows.append([str(vocab), f"{1000 * statistics.median(bare):.0f} ms", *map(shown, found)])
    yield table(["vocabulary", "bare step", *(f"{words}, %" for words in NAMES.values())], rows)
