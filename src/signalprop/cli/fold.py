"""`signalprop fold`."""

from __future__ import annotations

from signalprop.cli import checkpoints, output
from signalprop.cli import options as opt
from signalprop.cli.apply import Directory, Out

SCHEMA = "signalprop/fold/1"


def fold(directory: Directory, out: Out, data: opt.Arguments = None, json_file: opt.Json = None) -> None:
    """Multiply a scheme into the weights, for plain transformers.

    DIR is what `signalprop apply` or signalprop.save wrote. The new checkpoint is read by transformers alone and
    compared with the old one before it gets its name.

    \b
    Example: signalprop fold ./deep --out ./plain
    """
    from signalprop.errors import require

    output.check_outputs(json_file)
    checkpoints.check_out(out)
    require("transformers", "models")
    from signalprop import repair
    from signalprop.cli.loading import announce_model, called_with
    from signalprop.diagnosis.loading import quiet
    from signalprop.repair.record import the_record

    quiet()
    announce_model(directory)
    model = repair.load(directory)
    dtype = next(model.parameters()).dtype
    model.float()
    called_with(model, data)
    record = the_record(model)
    with checkpoints.written_whole(out) as folder:
        error = checkpoints.fold_into(model, dtype, folder)
        checkpoints.copy_companions(directory, folder)
    result = {
        "schema": SCHEMA,
        "out": str(out),
        "class_name": type(model).__name__,
        "scheme": record.parametrization.scheme,
        "fold_error": error,
    }
    facts = [
        ("scheme", result["scheme"]),
        ("folded", f"outputs differ by {error:.1e} of the largest, on a tiny batch"),
        ("written", f"{out}, for transformers"),
    ]
    output.deliver(json_file, lambda: result, lambda: output.facts(*facts))
