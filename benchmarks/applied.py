"""What a scheme costs: step time of an applied model over the vanilla model's.

24 layers of width 256 with 4 heads (Hugging Face GPT-2 and Llama, in training mode) read 2 x 128 tokens on one thread.
Steps (forward and backward) of three models take turns: vanilla, vanilla again (the control), applied. Each turn gives
two ratios of CPU time (`time.process_time`), applied over vanilla and control over vanilla, and their difference; who
comes first changes from turn to turn, and all three models are made anew every few turns, since where a model lies in
memory costs more than a multiplier. The table gives medians with their standard errors. Compiled: every layer by
itself, by inductor.

    python -m benchmarks.applied [--turns 40] [--schemes deepscalelm ...] [--modes eager compiled] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.models import hugging_face
from benchmarks.timing import summary, write_rows
from signalprop.surgery import apply

# fixed multipliers; trainable ones (per channel); moved norms, which need the stream; multipliers on norms
SCHEMES = ("deepscalelm", "layerscale", "deepnorm", "lns")
FAMILIES = ("gpt2", "llama")
TURNS_OF_A_MODEL = 5
VOCABULARY, TOKENS, BATCH = 1000, 128, 2


def prepared(family: str, scheme: str | None, n_layers: int, compiled: bool) -> nn.Module:
    """A model that has taken a step, so that it is compiled and its gradients have their memory."""
    model = hugging_face(family, n_layers, dropout=0.0 if family == "llama" else 0.1).train()
    if scheme is not None:
        apply(model, scheme, seed=0)
    if compiled:
        for layer in model.transformer.h if family == "gpt2" else model.model.layers:
            layer.compile()
    step(model, torch.zeros(BATCH, TOKENS, dtype=torch.long))
    return model


def step(model: nn.Module, ids: torch.Tensor) -> float:
    """CPU seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=False)
    start = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def compare(family: str, scheme: str, turns: int, n_layers: int, compiled: bool) -> dict[str, Any]:
    """Medians and standard errors of the ratios, and the vanilla step's seconds."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    variants: tuple[str | None, ...] = (None, None, scheme)
    bare, applied, control = [], [], []
    for turn in range(turns):
        if turn % TURNS_OF_A_MODEL == 0:
            made = [prepared(family, variants[i], n_layers, compiled) for i in _order(turn // TURNS_OF_A_MODEL)]
            models = [made[_order(turn // TURNS_OF_A_MODEL).index(i)] for i in range(3)]
            for model in models:
                step(model, ids)
        seconds = [0.0, 0.0, 0.0]
        for i in _order(turn):
            seconds[i] = step(models[i], ids)
        bare.append(seconds[0])
        control.append(seconds[1] / seconds[0])
        applied.append(seconds[2] / seconds[0])
    return {
        "family": family,
        "scheme": scheme,
        "compiled": compiled,
        "n_layers": n_layers,
        "turns": turns,
        "vanilla_seconds": statistics.median(bare),
        "applied": summary(applied),
        "control": summary(control),
        "difference": summary([a - c for a, c in zip(applied, control, strict=True)]),
    }


def _order(turn: int) -> list[int]:
    """All six orders of three, one after the other."""
    first = turn % 3
    rest = [i for i in range(3) if i != first]
    return [first, *(rest if turn // 3 % 2 == 0 else rest[::-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | scheme | mode | vanilla step | applied / vanilla | vanilla / vanilla | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    rows = []
    for family in options.families:
        for mode in options.modes:
            for scheme in options.schemes:
                row = compare(family, scheme, options.turns, options.layers, mode == "compiled")
                rows.append(row)
                cells = [
                    f"{row[key]['median']:.4f} ± {row[key]['standard_error']:.4f}" for key in ("applied", "control")
                ]
                cells.append(f"{row['difference']['median']:+.4f} ± {row['difference']['standard_error']:.4f}")
                milliseconds = f"{1000 * row['vanilla_seconds']:.0f} ms"
                print(f"| {family} | {scheme} | {mode} | {milliseconds} | " + " | ".join(cells) + " |", flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
