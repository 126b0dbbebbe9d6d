"""What a scheme costs: step time of an applied model over the vanilla model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from benchmarks.models import hugging_face
from benchmarks.timing import compared, take_turns
from signalprop.repair import apply

SCHEMES = {
    "deepscalelm": "fixed multipliers",
    "layerscale": "trained multipliers, per channel",
    "deepnorm": "moved norms",
    "lns": "multipliers on norms",
}
COMPILED = ("deepscalelm", "layerscale")  # one that is folded into the code, and one that is not
FAMILIES = {"gpt2": "GPT-2", "llama": "Llama"}
ROUNDS_OF_A_MODEL = 5
LAYERS, VOCABULARY, TOKENS, BATCH = 12, 1000, 128, 2

TITLE = "Applied schemes"
ABOUT = f"""
`python -m benchmarks applied`: forward and backward of {LAYERS} layers of width 256 with 4 heads (Hugging Face, in
training mode), {BATCH} × {TOKENS} tokens, one thread, CPU time. Vanilla, vanilla again (the control) and one model of
every scheme take turns. All are made anew every {ROUNDS_OF_A_MODEL} rounds, in another order: where a model lies in
memory costs more than a multiplier. Compiled: every layer by itself, by inductor.
"""
READING = """\
The floor is 1: a fixed multiplier is one multiplication of a
branch's output, one pass over batch × tokens × width numbers beside at least 12 × width products for each of them
(1/3072 at width 256); compiled, it is fused into the addition after it. A whole compiled model has as many graphs
and breaks as the vanilla one; layer by layer it has up to three graphs instead of one at any depth (layers whose
numbers differ share a graph that takes them as inputs); tests/repair/test_robustness.py counts them."""


def step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        model.zero_grad(set_to_none=False)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return run


def prepared(family: str, scheme: str, compiled: bool) -> nn.Module:
    """A model with a scheme, or as it is (`vanilla`)."""
    model = hugging_face(family, LAYERS, dropout=0.0 if family == "llama" else 0.1).train()
    if not scheme.startswith("vanilla"):
        apply(model, scheme, seed=0)
    if compiled:
        for layer in model.transformer.h if family == "gpt2" else model.model.layers:
            layer.compile()
    return model  # type: ignore[no-any-return]


def compare(family: str, schemes: Sequence[str], rounds: int, compiled: bool) -> str:
    """Steps of a family, all schemes beside the vanilla model."""
    torch.manual_seed(0)
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it goes on uncompiled
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    names = ["vanilla", "vanilla again", *schemes]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for group in range(-(-rounds // ROUNDS_OF_A_MODEL)):
        turned = names[group % len(names) :] + names[: group % len(names)]
        models = {name: prepared(family, name, compiled) for name in turned}
        left = min(ROUNDS_OF_A_MODEL, rounds - group * ROUNDS_OF_A_MODEL)
        for name, found in take_turns({name: step(models[name], ids) for name in names}, left).items():
            seconds[name] += found
    title = f"{FAMILIES[family]}, {'compiled' if compiled else 'eager'}."
    return compared(title, seconds, "vanilla", **{"carried by": SCHEMES})


def measured() -> Iterator[str]:
    """The section of the page."""
    for family in FAMILIES:
        yield compare(family, list(SCHEMES), 15, False)
    for family in FAMILIES:
        for scheme in COMPILED:  # layers of one class share their compiled code, which has room for a few graphs
            yield compare(family, [scheme], 10, True)
