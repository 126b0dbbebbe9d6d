"""Tokens per second of a training step: the model that signalprop builds against others of its shape."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import signalprop as sp
from benchmarks.models import copied, hugging_face, loaded
from benchmarks.timing import compared, take_turns

VOCABULARY = 1000


@dataclass(frozen=True)
class Shape:
    """Layers, width, heads, and what a step reads."""

    layers: int
    width: int
    heads: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.batch} x {self.tokens} tokens"


SHAPES = (Shape(12, 256, 4, 4, 128), Shape(4, 512, 8, 2, 256), Shape(24, 128, 2, 4, 128))
FAMILIES = {"gpt2": "GPT-2", "bert": "BERT", "llama": "Llama"}

TITLE = "Training throughput"
ABOUT = f"""
`python -m benchmarks throughput`: a whole training step (forward, cross-entropy, backward, fused AdamW; vocabulary of
{VOCABULARY:,}, no dropout) of a built model over the Hugging Face model of its shape, one thread, CPU time. Hugging
Face, Hugging Face again (the control) and built take turns; with GPT-2 also the decoder in the manner of nanoGPT
(`benchmarks.models.Decoder`: one map for query, key and value, `scaled_dot_product_attention`, GELU). There all have
the same weights, and compute the same logits, which is checked first. Llama keeps no cache of keys and values.
Compiled: the whole model, by inductor.
"""
READING = """\
The floor is the matrix products: 6 × parameters × tokens operations per step, four fifths of the time and more, and the
same in all of these models (a fused map for query, key and value is one larger product instead of three). What is left
are the passes of norms, activations and additions over the stream."""


def logits_of(output: Any) -> torch.Tensor:
    """What a model predicts."""
    return output if isinstance(output, torch.Tensor) else output.logits


def step(model: nn.Module, name: str, ids: torch.Tensor) -> Callable[[], None]:
    """One training step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        logits = logits_of(model(**{name: ids}))
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def built_as(model: nn.Module) -> nn.Module:
    """The built model of a Hugging Face model's shape."""
    return sp.build(sp.scheme("huggingface")(sp.Architecture.from_hf(model)), seed=0)


def models(family: str, shape: Shape) -> dict[str, tuple[nn.Module, str]]:
    """Models of one shape with the names of their inputs.

    Raises:
        ValueError: models that are to compute the same do not.
    """
    size = {"width": shape.width, "heads": shape.heads, "tokens": shape.tokens, "vocab_size": VOCABULARY}
    changes = {"activation_function": "gelu"} if family == "gpt2" else {}
    first, second = (hugging_face(family, shape.layers, **size, **changes) for _ in range(2))
    for model in (first, second):
        model.config.use_cache = False  # of keys and values, which training has no use for
    out = {
        "Hugging Face": (first, "input_ids"),
        "Hugging Face again": (second, "input_ids"),
        "built": (built_as(first), "inputs"),
    }
    if family == "gpt2":
        out["nanoGPT-style"] = (copied(first), "ids")
        loaded(out["built"][0], out["nanoGPT-style"][0])
        ids = torch.arange(2 * shape.tokens).reshape(2, -1) % VOCABULARY
        with torch.no_grad():
            logits = [logits_of(out[name][0].eval()(ids)) for name in ("Hugging Face", "built", "nanoGPT-style")]
        if max(float((other - logits[0]).abs().max()) for other in logits[1:]) > 1e-4 * float(logits[0].abs().max()):
            raise ValueError("the models do not compute the same function")
    return {name: (model.train(), argument) for name, (model, argument) in out.items()}


def compare(family: str, shape: Shape, mode: str, rounds: int = 10) -> str:
    """Steps of all models of a shape."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    ids = torch.randint(3, VOCABULARY, (shape.batch, shape.tokens))
    steps = {}
    for name, (model, argument) in models(family, shape).items():
        if mode == "compiled":
            model.compile()
        steps[name] = step(model, argument, ids)
    seconds = take_turns(steps, rounds, warm_up=2)
    count = shape.batch * shape.tokens
    speed = {name: f"{count / statistics.median(values):,.0f}" for name, values in seconds.items()}
    return compared(f"{FAMILIES[family]}, {shape}, {mode}.", seconds, "Hugging Face", **{"tokens/s": speed})


def measured() -> Iterator[str]:
    """The section of the page."""
    for family in FAMILIES:
        yield compare(family, SHAPES[0], "eager")
    for shape in SHAPES[1:]:
        yield compare("gpt2", shape, "eager")
    yield compare("gpt2", SHAPES[1], "compiled")  # compiling takes longer than the steps: the one of 4 layers
