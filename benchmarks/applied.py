"""What a scheme costs: step time of an applied model over the vanilla model's.

python -m benchmarks.applied [--rounds 15 8] [--schemes deepscalelm ...] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.models import hugging_face
from benchmarks.page import table
from benchmarks.timing import command_line, one_thread, shown, summary, take_turns, write_rows
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
`python -m benchmarks.applied`: forward and backward of {LAYERS} layers of width 256 with 4 heads (Hugging Face, in
training mode), {BATCH} × {TOKENS} tokens, one thread, CPU time. Vanilla, vanilla again (the control) and one model of
every scheme take turns. All are made anew every {ROUNDS_OF_A_MODEL} rounds, in another order: where a model lies in
memory costs more than a multiplier. Compiled: every layer by itself, by inductor.
"""
READING = """\
*Difference* is that of the two ratios, round by round. The floor is 1: a fixed multiplier is one multiplication of a
branch's output, one pass over batch × tokens × width numbers beside at least 12 × width products for each of them
(1/3072 at width 256); compiled, it is fused into the addition behind it. A whole compiled model has as many graphs
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


def compare(family: str, schemes: Sequence[str], rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Rows of a family: ratios to the vanilla step and their differences, and its seconds."""
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
    over = {
        name: [own / base for own, base in zip(seconds[name], seconds["vanilla"], strict=True)] for name in names[1:]
    }
    return [
        {
            "family": family,
            "scheme": scheme,
            "compiled": compiled,
            "vanilla_seconds": statistics.median(seconds["vanilla"]),
            "applied": summary(over[scheme]),
            "control": summary(over["vanilla again"]),
            "difference": summary([a - c for a, c in zip(over[scheme], over["vanilla again"], strict=True)]),
        }
        for scheme in schemes
    ]


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page."""
    cells = [
        [
            FAMILIES[row["family"]],
            row["scheme"],
            SCHEMES.get(row["scheme"], ""),
            "compiled" if row["compiled"] else "eager",
            f"{1000 * row['vanilla_seconds']:.0f} ms",
            shown(row["applied"]),
            shown(row["control"]),
            f"{row['difference']['median']:+.3f} ± {row['difference']['standard_error']:.3f}",
        ]
        for row in rows
    ]
    header = ["model", "scheme", "carried by", "mode", "vanilla step", "applied / vanilla", "vanilla / vanilla"]
    return "\n\n".join([table([*header, "difference"], cells), READING])


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, nargs=2, default=[15, 10], help="eager, compiled")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    options = parser.parse_args()
    one_thread()
    rows: list[dict[str, Any]] = []
    for mode, rounds in zip(("eager", "compiled"), options.rounds, strict=True):
        for family in options.families if mode in options.modes else ():
            # layers of one class share their compiled code, which has room for a few graphs: one scheme at a time
            groups = [options.schemes] if mode == "eager" else [[name] for name in options.schemes if name in COMPILED]
            for schemes in groups:
                rows += compare(family, schemes, rounds, mode == "compiled")
                print(section(rows[-len(schemes) :]).partition("\n\n")[0], flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
