"""`signalprop fit`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signalprop.cli import checkpoints, output
from signalprop.cli import options as opt
from signalprop.cli.apply import Directory, Out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from signalprop.repair.fitting import Activation, Fit

SCHEMA = "signalprop/fit/1"
_FAR = 0.3  # of the largest output: more than rounding moves a deep model


def fit(
    directory: Directory,
    out: Out,
    data: opt.Data = None,
    device: opt.Device = "cpu",
    json_file: opt.Json = None,
) -> None:
    """Rescale a model so that its activations fit float16.

    Weights are divided by powers of two; the function stays. Exit status 1 if something that no weight can move is
    still too large.

    \b
    Example: signalprop fit ./my-checkpoint --out ./fitted
    """
    from signalprop.errors import require

    output.check_outputs(json_file)
    checkpoints.check_out(out)
    place = opt.usable(device)
    require("transformers", "models")
    from signalprop.attachment.anatomy import attach
    from signalprop.cli.loading import announce_model, architecture_of, arrays_in, called_with, load_model
    from signalprop.data.model_batches import model_batch
    from signalprop.diagnosis.loading import quiet
    from signalprop.measurement.measuring import arguments_of
    from signalprop.repair.fitting import fit as fitted

    quiet()
    announce_model(directory)
    model = load_model(directory)
    stored = checkpoints.stored_type(model)
    _exact(model).to(place)
    called, read = called_with(model, arrays_in(data)), str(data)
    attached = attach(model)
    if called is None:
        batch, read = model_batch(architecture_of(attached, {}), directory, data, 4, 0)
    arguments = arguments_of(attached, batch if called is None else called)
    before = checkpoints.first_output(model, arguments)
    found = fitted(attached, arguments)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "out": str(out) if found.changed else None,
        "class_name": type(model).__name__,
        "read": read,
        **found.to_json(),
        "error": checkpoints.difference(before, checkpoints.first_output(model, arguments)),
        "stored_error": None,
        "float16_error": {"before": None, "after": None},
    }
    if result["out"]:
        with checkpoints.written_whole(out) as folder:
            model.to(stored).save_pretrained(folder)  # type: ignore[operator]
            checkpoints.copy_companions(directory, folder)
            del model, attached
            gc.collect()
            again = _exact(load_model(folder)).to(place)
            error = checkpoints.difference(before, checkpoints.first_output(again, arguments))
            result["stored_error"] = checkpoints.refused_beyond(
                error, stored, "fitted", "try a smaller margin= of signalprop.fit, or a checkpoint in float32"
            )
            del again
            result["float16_error"] = {
                when: _in_float16(source, arguments, before)
                for when, source in (("before", directory), ("after", folder))
            }
    output.deliver(json_file, lambda: result, lambda: _show(found, result), failure=_failure(found, result))


def _exact(model: Any) -> Any:
    """In float64, which transformers' faster ways to compute experts do not have."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def _failure(found: Fit, result: dict[str, Any]) -> str | None:
    """What still does not fit."""
    over = sorted({f"{one.where} {one.what}" for one in found.over})
    if over:
        return f"still beyond float16, where no weight can rescale it: {', '.join(over[:4])}"
    if result["out"] and (after := result["float16_error"]["after"]) is None:
        return "every activation fits, but outputs in float16 are not finite; do weights exceed its range?"
    if result["out"] and after > _FAR:
        return (
            f"every activation fits, but outputs in float16 differ by {after:.1e} of the largest: some module squares "
            "or sums numbers beyond its range; try a larger margin= of signalprop.fit"
        )
    return None


def _in_float16(source: Path, arguments: dict[str, Any], exact: Tensor) -> float | None:
    """How far outputs computed in float16 are from the exact ones."""
    import torch

    from signalprop.cli.loading import load_model

    model = load_model(source).half().to(exact.device)
    given = {key: x.half() if torch.is_floating_point(x) else x for key, x in arguments.items()}
    return checkpoints.difference(exact, checkpoints.first_output(model, given))


def _show(found: Fit, result: dict[str, Any]) -> None:
    from signalprop.repair.fitting import LARGEST
    from signalprop.results.text import number, text_table

    rows = _largest_of_each(found.activations)
    limit = LARGEST / 2**found.margin
    lines = [
        [one.what, one.where, number(one.before), number(one.after), _verdict(one, LARGEST, limit)] for one in rows
    ]
    output.echo(text_table(["what", "where", "before", "after", "verdict"], lines, left=2))
    facts = [("float16", f"largest number {LARGEST:.0f}; the margin is {found.margin} powers of two")]
    if not found.changed:
        fits = "fits" if found.within else "has nothing too large that weights could rescale"
        facts.append(("fit", f"the model {fits} as it is" + ("" if result["out"] else "; nothing was written")))
    else:
        inner = f"; {len(found.inner)} branches inside, by up to {max(found.inner.values()):g}" if found.inner else ""
        facts += [("divided", f"the stream by {found.stream:g}{inner}"), ("epsilon", found.epsilon)]
        facts.append(("function", f"outputs differ by {_relative(result['error'])} in float64"))
    if found.held:
        facts.append(("stream", f"not divided: {found.held}"))
    if result["out"]:
        facts.append(("as stored", f"read back, outputs differ by {_relative(result['stored_error'])} in float64"))
    if any(value is not None for value in result["float16_error"].values()):
        was, now = (_relative(result["float16_error"][when]) for when in ("before", "after"))
        facts.append(("in float16", f"outputs differ from those in float64 by {was} before, {now} after"))
    facts.append(("read", result["read"]))
    if result["out"]:
        facts.append(("written", f"{result['out']}, for transformers"))
    output.echo()
    output.facts(*facts)


def _relative(error: float | None) -> str:
    return "infinity (not finite)" if error is None else f"{error:.1e} of the largest"


def _verdict(one: Activation, top: float, limit: float) -> str:
    return "over" if one.after > top else "inside the margin" if one.after > limit else "fits"


def _largest_of_each(activations: Sequence[Activation]) -> list[Activation]:
    """Of every kind of place the one that is largest before."""
    found: dict[str, Activation] = {}
    for one in activations:
        if one.what not in found or max(one.before, one.after) > max(found[one.what].before, found[one.what].after):
            found[one.what] = one
    return list(found.values())
