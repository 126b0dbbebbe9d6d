"""What watching every sublayer costs a compiled step: taps inside the graph over the graph without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
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

READING = """
Both goals are met: 1.02 without checkpointing, 1.03 with it. Inductor drops copies that do nothing, and with them any
marks of what is kept for the backward pass; so the marks stand on something that is computed.
"""


def variants(
    checkpointing: bool,
    *,
    layers: int = LAYERS,
    width: int = 256,
    heads: int = 4,
    batch: int = 4,
    tokens: int = 128,
    device: torch.device | None = None,
    backend: str = "inductor",
    mode: str | None = None,
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """A step of every variant; and whether losses and gradients are those of the bare graph (`same_loss`,
    `same_gradients`), and how far the numbers are from those of hooks (`apart`)."""
    torch.manual_seed(0)
    plain = hugging_face("gpt2", layers, width=width, heads=heads, tokens=tokens).to(device).train()
    plain.config.use_cache = False
    if checkpointing:
        enable = getattr(plain, "activation_checkpointing_enable", None) or plain.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    ids = torch.randint(0, 1000, (batch, tokens), device=device)

    def step(model: Any) -> Any:
        model.zero_grad()
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return loss.detach().clone()  # a CUDA graph writes the next one into the same place

    with Probe(plain) as hooks:
        step(plain)
        expected = hooks.profile()
    bare, watched = copy.deepcopy(plain), copy.deepcopy(plain)
    probe = Probe(watched, compiled=True)
    probe.__enter__()  # before anything is compiled
    own, other = (torch.compile(model, fullgraph=True, backend=backend, mode=mode) for model in (watched, bare))
    checked: dict[str, Any] = {"same_loss": torch.equal(step(own), step(other))}
    found = probe.profile()
    pairs = zip(watched.parameters(), bare.parameters(), strict=True)
    checked["same_gradients"] = all(torch.equal(p.grad, q.grad) for p, q in pairs)
    if found is None or expected is None:
        raise ValueError("the probe did not sample this step")
    checked["apart"] = _apart(found, expected)

    def read() -> None:
        step(own)
        if probe.profile() is None:
            raise ValueError("the probe did not sample this step")

    bare_step = partial(step, other)
    return {"bare": bare_step, "bare again": bare_step, "watched": partial(step, own), "read": read}, checked


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
        steps, checked = variants(checkpointing)
        if not checked["same_loss"] or not checked["same_gradients"]:
            raise ValueError("the watched step is another than the bare one")
        if checked["apart"] > 2e-6:
            raise ValueError("the numbers are not those of hooks")
        yield compared(title, take_turns(steps, ROUNDS, warm_up=1), "bare")
