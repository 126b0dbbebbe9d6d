"""What watching every sublayer costs a compiled step: taps inside the graph over the graph without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.models import hugging_face
from benchmarks.timing import compared, take_turns
from signalprop.measurement import Probe
from signalprop.results.profile import Profile

LAYERS, ROUNDS = 12, 15

TITLE = "Watching a compiled step"
ABOUT = f"""
`python -m benchmarks compiled_probes`: forward and backward pass of a {LAYERS}-layer GPT-2 of width 256 (Hugging Face,
training mode, no dropout), compiled as one graph (inductor), 4 × 128 tokens, float32, one thread, CPU time; the layers
run again in the backward pass in the second table (non-reentrant checkpointing). Every step is watched: the sums of all
2L + 1 streams and 2L branches and of the gradients there are made inside the graph, and *read* is what it takes to
bring them to the host and make the Profile. That losses and gradients are those of the bare graph, bit for bit, and
that the numbers are those of hooks on the uncompiled model is checked first.
"""


def variants(checkpointing: bool) -> dict[str, Callable[[], Any]]:
    """A step of every variant."""
    torch.manual_seed(0)
    plain = hugging_face("gpt2", LAYERS).train()
    plain.config.use_cache = False
    if checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 1000, (4, 128))

    def step(model: Any) -> Any:
        model.zero_grad()
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return loss.detach()

    with Probe(plain) as hooks:
        step(plain)
        expected = hooks.profile()
    bare, watched = copy.deepcopy(plain), copy.deepcopy(plain)
    probe = Probe(watched, compiled=True)
    probe.__enter__()  # before anything is compiled
    own, other = (torch.compile(model, fullgraph=True) for model in (watched, bare))
    same_loss = torch.equal(step(own), step(other))
    found = probe.profile()
    if not same_loss or not all(
        torch.equal(p.grad, q.grad) for p, q in zip(watched.parameters(), bare.parameters(), strict=True)
    ):
        raise ValueError("the watched step is another than the bare one")
    if found is None or expected is None or _apart(found, expected) > 2e-6:
        raise ValueError("the numbers are not those of hooks")

    def read() -> None:
        step(own)
        if probe.profile() is None:
            raise ValueError("the probe did not sample this step")

    return {"bare": lambda: step(other), "bare again": lambda: step(other), "watched": lambda: step(own), "read": read}


def _apart(found: Profile, expected: Profile) -> float:
    """The largest difference of two measured Profiles."""
    largest = 0.0
    for own, other in ((found.forward, expected.forward), (found.gradient, expected.gradient)):
        assert own is not None and other is not None
        for point, series in other.items():
            largest = max(
                largest,
                float(np.abs(own[point].variance / series.variance - 1).max()),
                float(np.abs(own[point].token_correlation - series.token_correlation).max()),
            )
    return largest


def measured() -> Iterator[str]:
    """The section of the page."""
    for title, checkpointing in (("### One graph", False), ("### With checkpointing", True)):
        torch.compiler.reset()
        yield compared(title, take_turns(variants(checkpointing), ROUNDS, warm_up=1), "bare")
