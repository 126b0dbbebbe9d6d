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
by itself, as recipes with `compile: true` do. *floor*: plain hooks on the same tensors, written for this one model,
that take of each the two reductions without which no variance and no token correlation is known (the norms of its
tokens, and the sums over its tokens) and do nothing with them. The goal is {GOAL}.
"""


def floor(model: Any) -> Callable[[], Any]:
    """Hook the streams, branches and gradients of a GPT-2; what is called before every step."""
    found: list[Any] = []
    last: list[int] = []  # an addition hands one gradient to both of its terms

    def reduced(x: torch.Tensor) -> None:
        found.append((torch.linalg.vector_norm(x, dim=-1), x.sum(1)))

    def flows(gradient: torch.Tensor) -> None:
        if last[-1:] != [gradient.data_ptr()]:
            last[:] = [gradient.data_ptr()]
            reduced(gradient)

    def seen(x: torch.Tensor) -> None:
        reduced(x.detach())
        x.register_hook(flows)

    def output(_: Any, __: Any, given: Any) -> None:
        seen(given[0] if isinstance(given, tuple) else given)

    for layer in model.transformer.h:
        for branch in (layer.attn, layer.mlp):
            branch.register_forward_hook(output)
    for norm in [norm for layer in model.transformer.h for norm in (layer.ln_1, layer.ln_2)] + [model.transformer.ln_f]:
        norm.register_forward_pre_hook(lambda _, given: seen(given[0]))
    return lambda: (found.clear(), last.clear())


def steps(way: str, layers: int, width: int) -> dict[str, Callable[[], Any]]:
    """A step of the bare model, the same again, one of a watched copy, and the floor."""
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

    variants = {"bare": partial(step, bare), "bare again": partial(step, bare), "watched": read}
    if way == "eager":
        by_hand = copy.deepcopy(bare)
        begin = floor(by_hand)
        variants["floor"] = lambda: (begin(), step(by_hand))
    return variants


def measured() -> Iterator[str]:
    """The section of the page."""
    for (layers, width), rounds in SIZES.items():
        for way in WAYS:
            torch.compiler.reset()
            seconds = take_turns(steps(way, layers, width), rounds)
            yield compared(f"### {layers} layers of width {width}, {way}", seconds, "bare")
