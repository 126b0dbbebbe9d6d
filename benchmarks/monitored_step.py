"""What watching every step costs in training: eager, with checkpointing, and compiled layer by layer, at two sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import hugging_face
from benchmarks.timing import compared, take_turns
from signalprop.measurement import Probe

SIZES = {(12, 256): 9, (48, 512): 3}  # layers and width: rounds
WAYS = ("eager", "checkpointed", "compiled")
GOAL = 1.015

TITLE = "Watching every step in training"
ABOUT = f"""
`python -m benchmarks monitored_step`: forward and backward pass of a GPT-2 of Hugging Face (training mode, no dropout,
4 x 128 tokens, float32, one thread, CPU time). *watched* is the same step under a `Probe` with its numbers read, in
turns with the bare one. *checkpointed*: layers run again in the backward pass (non-reentrant); *compiled*: every layer
by itself, as recipes with `compile: true` do. The goal is {GOAL}.
"""


def steps(way: str, layers: int, width: int) -> dict[str, Callable[[], Any]]:
    """A step of the bare model, the same again, and one of a watched copy."""
    torch.manual_seed(0)
    bare = hugging_face("gpt2", layers, width=width, heads=width // 64).train()
    bare.config.use_cache = False
    if way == "checkpointed":
        enable = getattr(bare, "activation_checkpointing_enable", None) or bare.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    watched = copy.deepcopy(bare)
    probe = Probe(watched, compiled=way == "compiled")
    probe.__enter__()  # before anything is compiled
    if way == "compiled":
        for model in (bare, watched):
            for layer in model.transformer.h:
                layer.compile()
    ids = torch.randint(0, 1000, (4, 128))

    def step(model: Any) -> None:
        model.zero_grad()
        F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten()).backward()

    def read() -> None:
        step(watched)
        if probe.profile() is None:
            raise ValueError("the probe did not sample this step")

    return {"bare": partial(step, bare), "bare again": partial(step, bare), "watched": read}


def measured() -> Iterator[str]:
    """The section of the page."""
    for (layers, width), rounds in SIZES.items():
        for way in WAYS:
            torch.compiler.reset()
            seconds = take_turns(steps(way, layers, width), rounds)
            yield compared(f"### {layers} layers of width {width}, {way}", seconds, "bare")
