"""What watching every sublayer costs a training step: signalprop's Probe beside hooks by hand and other packages."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers import PEERS, DidNotRun, result_of
from benchmarks.peers.watched_steps import BATCH, LAYERS, TOKENS, WIDTH
from benchmarks.timing import compared

ROUNDS = 9
FEW = {"torchinstruments": 3}  # rounds of what takes ten times a step
WATCHERS = ("torch-module-monitor", "torchinstruments", "unit-scaling", "nnsight", "transformer-lens")
GOAL = 1.015  # eager, over the bare step

TITLE = "Watching a training step"
ABOUT = f"""
`python -m benchmarks watching`: forward and backward pass of a {LAYERS}-layer GPT-2 of width {WIDTH} (Hugging Face, no
dropout), eager, {BATCH} x {TOKENS} tokens, float32, one thread, CPU time; every step is watched and its numbers read.
One table for every peer, whose steps take turns with the others in one process of its environment.

| variant | records on every step |
| --- | --- |
| `signalprop` | mean, variance and token correlation of all streams and branches, and of the gradients there |
| `hooks by hand` | variance and token correlation of blocks, attention and feed-forwards, and of their gradients |
| `torch-module-monitor` | those two numbers of the same modules, forward only |
| `torchinstruments` | nine statistics of every module's output and gradient, histograms; written to files |
| `unit-scaling` | scales of every tensor of the graph and of its gradient |
| `nnsight` | the blocks' outputs, cached, and the two numbers of each |
| `transformer-lens` | blocks' and branches' outputs of its own model, cached, and the two numbers of each |
"""
READING = f"""
The goal was {GOAL} over the bare step. Peers that record less, or forward only, do less work; no two record the same.
"""


def measured() -> Iterator[str]:
    """The section of the page."""
    for peer in WATCHERS:
        try:
            seconds = result_of(peer, "benchmarks.peers.watched_steps", peer, str(FEW.get(peer, ROUNDS)))
        except DidNotRun as reason:
            yield f"### {' '.join(PEERS[peer])}\n\nDid not run here: {reason}"
        else:
            yield compared(f"### {' '.join(PEERS[peer])}", seconds, "bare")
