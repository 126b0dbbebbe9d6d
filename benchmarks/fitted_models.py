"""`fit` on every model whose weights anatomy tells apart: docs/fitted.md.

    python -m benchmarks.fitted_models                      # what docs/fitted.json does not hold yet, then the page
    python -m benchmarks.fitted_models NAME ...             # these anew
    python -m benchmarks.fitted_models --page               # only the page

The models are those of docs/reach.md, small and random, each in a process of its own. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.reach import _line, built, in_a_process
from benchmarks.reach_page import _clean
from benchmarks.timing import compact
from signalprop.attachment.attached import Attached, attach, require_roles
from signalprop.cli.checkpoints import first_output
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.network.kinds import ROLE
from signalprop.repair.fitting import Fit, exact_logits, fit
from signalprop.repair.largest_activations import inner_maps, moves_inner

ROOT = Path(__file__).resolve().parent.parent
REACH, FILE, PAGE = (ROOT / "docs" / name for name in ("reach.json", "fitted.json", "fitted.md"))
TOP = 65504.0  # of fp16
NEAR = 0.05  # likewise of outputs in fp16
HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")  # whose Mamba-2 its family's file knows
IDLE = "does not run"
INSIDE = ("mixed values", "hidden", "input of expert_down", "input of shared_down")
SAME, SAME_IN_SINGLE = 1e-10, 1e-5  # relative differences of outputs up to which the function is the same
Record = dict[str, Any]


def overflowing(attached: Attached, found: Fit) -> None:
    """Streams and what is inside of branches four times beyond fp16, where a weight can bring them back."""

    def needed(*what: str) -> float:
        largest = max((one.before for one in found.activations if one.what in what), default=0.0)
        return 2.0 ** math.ceil(math.log2(4 * TOP / largest)) if largest > 0 else 1.0

    stream = 1.0 if found.held else needed("branch")
    with torch.no_grad():
        for row in attached.rows:
            on_branch, inner = row.placement in ("sandwich", "res-post"), 1.0
            if moves_inner(attached, row) and row.placement != "sandwich":  # there the map after it would be too small
                inner = needed(*INSIDE)
                for held, _ in inner_maps(row):
                    (held.weight.mT if held.transposed else held.weight)[..., held.rows or slice(None), :] *= inner
            if row.placement == "res-post" and row is attached.rows[0]:  # what enters it is not normed
                for table in attached.ends.tables:
                    table.weight.mul_(2.0**10)
            last = [held for role, held in row.weights.items() if ROLE[role].writes]
            for held in last:
                held.weight.mul_(1.0 if row.placement == "sandwich" else (1.0 if on_branch else stream) / inner)
            # others read a stream that a norm on a branch made large, as it is
            if row.placement == "sandwich" or (on_branch and row is attached.rows[-1]):
                norm = cast(Any, row.post_norm if row.placement == "sandwich" else row.norm)
                offset = attached.mapping.gain_offset
                norm.weight.add_(offset).mul_(stream).sub_(offset)


def scanned(name: str) -> Record:
    """What comes of one model: `places` beyond fp16 before and after, what was divided, `error` in float64, `half`."""
    model: Any
    model, inputs = built(name)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    model, inputs = model.eval().double(), _in(inputs, torch.float64)
    try:
        overflowing(require_roles(attach(model, None, inputs)), fit(copy.deepcopy(model), inputs))
        before, (single, half) = exact_logits(model, inputs), _rounded(model, inputs)
        found = fit(model, inputs, margin=1)
    except InputError as error:
        return {"class": type(model).__name__, "reason": _line(error, kind=False)}
    single_now, half_now = _rounded(model, inputs)
    return {
        "class": type(model).__name__,
        "before": sum(one.before > TOP for one in found.activations),
        "after": sorted({one.what for one in found.over}),
        "stream": found.stream,
        "inner": len(found.inner),
        "held": found.held,
        "epsilon": "" if found.matched else found.epsilon,
        "error": _apart(exact_logits(model, inputs), before),
        "single": IDLE if single is None or single_now is None else _apart(single_now, single),
        "half": [IDLE if one is None else _apart(one, before) for one in (half, half_now)],
    }


def _in(inputs: Record, dtype: torch.dtype) -> Record:
    return {k: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for k, x in inputs.items()}


def _rounded(model: nn.Module, inputs: Record) -> list[Tensor | None]:
    """Outputs in float32 and in fp16; None where the model does not run so on this machine."""
    out: list[Tensor | None] = []
    for dtype in (torch.float32, torch.float16):
        try:
            out.append(first_output(copy.deepcopy(model).to(dtype), _in(inputs, dtype)).double())
        except (RuntimeError, ValueError):
            out.append(None)
    return out


def _apart(one: Tensor, other: Tensor) -> float | None:
    """The largest difference over the largest value; None where outputs are not finite."""
    found = float((one - other).abs().max() / other.abs().max())
    return found if math.isfinite(found) else None


INTRODUCTION = """\
# Fitted models

Written by `python -m benchmarks.fitted_models` from `docs/fitted.json`: do not edit.

What [`fit`](applying.md#fit-a-number-format) does to a trained checkpoint that overflows fp16, and to every model of
[reach.md](reach.md) of which it is known what the weights are.
"""

SCANNED = """\
## Every model whose weights are known

Small random models of transformers {transformers} and others, in float64: what ends a branch, values, and up where
nothing curved follows it are multiplied until streams and what is inside of branches are four times beyond fp16
(sandwich norms: streams alone, since what is before their second norm would have to become too small for fp16; norms on
branches alone: the stream after the last of them, since others read it as it is). Then
`fit` with one power of two to stay free.

{counts}

* *over*: how many of the watched activations were beyond fp16. After it none is, in every model.
* *divided by*: the stream; *inside*: branches with a factor of their own.
* *same function*: largest difference of outputs in float64 over the largest output, then of outputs in float32, on the
  inputs of [reach.md](reach.md): models of text and images read text, so that norms of their projectors do not run.
* *in fp16*: the same difference of outputs computed in fp16, before and after (∞: not finite; empty: does not run in
  fp16 here).
"""


def text_of(stored: Record) -> str:
    """The page."""
    parts = [INTRODUCTION]
    for one in stored["checkpoints"].values():
        parts.append(_of_checkpoint(one))
    models = stored["models"]
    fitted = {name: record for name, record in models.items() if "error" in record}
    refused = {name: record for name, record in models.items() if "error" not in record}
    parts.append(SCANNED.format(**stored["versions"], counts=_counts(fitted, refused)))
    head = ["model", "class", "over", "divided by", "inside", "same function", "in float32", "in fp16: before", "after"]
    parts.append(compact([*head, "note"], [_row(name, record) for name, record in fitted.items()]))
    if refused:
        rows = [[f"`{name}`", _clean(record["reason"])] for name, record in refused.items()]
        parts += ["### Refused", compact(["model", "why"], rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _of_checkpoint(one: Record) -> str:
    rows = [
        [name, *(_perplexity(held[when]) for when in ("before", "after")),
         *(_number(held[when]["largest"]) for when in ("before", "after"))]
        for name, held in one["types"].items()
    ]  # fmt: skip
    head = ["computed in", "perplexity", "fitted", "largest entry of the stream", "fitted"]
    tokens = next(iter(one["types"].values()))["before"]["tokens"]
    before, after = (_number(one["format_error"][when]) for when in ("before", "after"))
    return (
        f"## {one['name']}\n\nPerplexity of {tokens} tokens of public-domain speeches, before and after `signalprop "
        f"fit --format fp16` on other passages of the same text: the stream is divided by {one['stream']:g}, epsilon "
        f"{one['epsilon']}. fp16 ends at {one['top']:.0f}.\n\n{compact(head, rows)}\n\nOutputs in float64 differ by "
        f"{one['error']:.0e} of the largest; in fp16 they differ from those in float64 by {before} before, {after} "
        f"after. Gains 1 + weight are off by up to {one['gain_rounding']:.1e} where fp16 holds the weight. This is a "
        "record of November 2026; what measured it is `benchmarks/fitted_models.py` in the repository at 71b7067."
    )


def _perplexity(held: Record) -> str:
    return "not a number" if held["not_finite"] else f"{held['perplexity']:.2f}"


def _counts(fitted: dict[str, Record], refused: dict[str, Record]) -> str:
    """The summary."""
    every = list(fitted.values())
    half = [one["half"][1] for one in every if one["half"][1] != IDLE]
    rows = {
        "tried": len(fitted) + len(refused),
        "beyond fp16 before": sum(one["before"] > 0 for one in every),
        "beyond fp16 after": sum(bool(one["after"]) for one in every),
        f"same function in float64, to {SAME:.0e}": sum(_within(one["error"], SAME) for one in every),
        f"and in float32, to {SAME_IN_SINGLE:.0e}": sum(
            _within(one["error"], SAME) and one["single"] != IDLE and _within(one["single"], SAME_IN_SINGLE)
            for one in every
        ),
        "only inside of branches, since no weight divides the stream": sum(bool(one["held"]) for one in every),
        "epsilon stays, or that of other norms goes with it: another function, by up to 1e-3": sum(
            bool(one["epsilon"]) for one in every
        ),
        f"outputs in fp16 within {NEAR:g} of those in float64 (of {len(half)} that run in fp16 on this machine)": sum(
            _within(one, NEAR) for one in half
        ),
        "refused": len(refused),
    }
    return compact(["", "models"], [[words, str(n)] for words, n in rows.items()])


def _within(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def _row(name: str, one: Record) -> list[str]:
    notes = [f"{what} still over" for what in one["after"]]
    notes += [f"stream not divided: {one['held']}"] if one["held"] else []
    notes += [f"epsilon {one['epsilon']}"] if one["epsilon"] else []
    before, after = map(_number, one["half"])
    divided, same = f"{one['stream']:g}", map(_number, (one["error"], one["single"]))
    numbers = [str(one["before"]), divided, str(one["inner"]), *same, before, after]
    return [f"`{name}`", one["class"], *numbers, _clean("; ".join(notes))]


def _number(value: float | str | None) -> str:
    """A number; infinity where outputs were not finite; nothing where there were none."""
    if isinstance(value, str):
        return ""
    return "∞" if value is None else f"{value:.3g}" if value >= 1 else f"{value:.0e}"


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="config types, or models of others")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    import transformers.models.llama.modeling_llama  # what most models need, once for all processes

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    stored = read_json(FILE) if FILE.is_file() else {"models": {}, "checkpoints": {}}
    stored["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    if not given.page:
        reached = read_json(REACH)["models"]
        known = [name for name, one in reached.items() if name in HYBRIDS or "stream" in one.get("predicted", {})]
        todo = given.names or [name for name in known if name not in stored["models"]]
        for i, name in enumerate(todo):
            stored["models"][name] = in_a_process(name, scanned)
            print(f"{i + 1}/{len(todo)} {name}: {stored['models'][name]}", flush=True)
        stored["models"] = {name: stored["models"][name] for name in known if name in stored["models"]}
    write_json(FILE, stored)
    write_text(PAGE, text_of(stored))


if __name__ == "__main__":
    main()
