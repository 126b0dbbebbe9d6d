"""`signalprop anatomy`."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from signalprop.streams.streams import Streams


_LARGEST = 200_000_000  # parameters of a model that is initialised for a look at it


def anatomy(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory (of one without weights the config.json), or .gguf file."
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Where the model runs: cpu, cuda, ...; meta: structure only, in seconds for a model of any size.",
        ),
    ] = "cpu",
    inside: opt.Inside = None,
    data: opt.Arguments = None,
    json_file: opt.Json = None,
) -> None:
    """Find and prove a model's residual stream, branches and norms.

    One forward pass is followed addition by addition; a second one tests that stream = skip * stream + multiplier *
    branch, a third one what every weight is. In half precision, a random model of the same configuration proves it.

    \b
    Example: signalprop anatomy ./my-checkpoint
    """
    from signalprop.diagnosis.loading import stored_in_half

    output.check_outputs(json_file)
    streams = None
    if device == "cpu" and inside is None and data is None and (n := stored_in_half(model)):
        with suppress(InputError):  # on the weights it would prove less, to their rounding, and take longer
            streams, weights, lines = _found(_model(Path(model), meta=True), numbers=n)
    if streams is None or not (streams.proved and weights["proved"]):
        from signalprop.cli.loading import at, called_with

        place = device if device == "meta" else opt.usable(device)
        whole = _model(Path(model), meta=device == "meta")
        live = at(whole if next(whole.parameters()).is_meta else whole.to(place), inside)
        called_with(live, data)
        streams, weights, lines = _found(live)
    output.deliver(
        json_file,
        lambda: {**streams.to_json(), "weights": weights},
        lambda: output.echo("\n".join([str(streams), *lines])),
    )


def _found(live: nn.Module, numbers: int | None = None) -> tuple[Streams, dict[str, Any], list[str]]:
    """The streams, and what every weight is, as far as that can be proved: as a JSON value, and in words.

    Args:
        numbers: that the model has to have.
    """
    from signalprop.attachment.anatomy import anatomy as found_in
    from signalprop.attachment.found_roles import mapping_of_roles, roles_of, without_replay
    from signalprop.attachment.twin import first_twin, with_proofs

    if numbers is not None and sum(p.numel() for p in live.parameters()) != numbers:
        raise InputError("the files hold another model than config.json says")
    found = found_in(live).streams
    branches: list[dict[str, Any]] = []
    lines: list[str] = []
    try:
        twin = first_twin(live, found) if without_replay(live, found) else None
        roles = roles_of(live, found=found) if twin is None else roles_of(twin)
        if not found.numbers:
            found = with_proofs(found, roles.found)
        for label, one in zip(roles.labels, roles.proof.branches, strict=True):
            what = {"why": one} if isinstance(one, str) else {"is": one.words, "error": one.error}
            weights = {} if isinstance(one, str) else {role: path for role, (path, _) in one.weights.items()}
            branches.append({"branch": label, **what, **weights})
        known = [row for row in branches if "why" not in row]
        largest = max((float(row["error"]) for row in known), default=0.0)
        proved = f"of {len(known)} of {len(branches)} branches, by replay in float64 (error {largest:.0e})"
        alike = Counter(re.sub(r"\.\d+(?=[. ])", ".*", _words(row)) for row in branches)
        lines = [
            f"weights proved      {proved}",
            *(["  in a random model of the same configuration"] * (twin is not None)),
            *(f"  {n} x {what}" for what, n in alike.items()),
        ]
        a = mapping_of_roles(live if twin is None else twin, roles).architecture
    except InputError as error:
        why = str(error).partition(" only the stream is known: ")[2] or str(error)
        said: dict[str, Any] = {"proved": False, "why": why} | ({"sublayers": branches} if lines else {})
        return (
            found,
            said,
            [*lines, f"{'not predicted' if lines else 'weights':<20}{'' if lines else 'not known: '}{why}"],
        )
    heads = f"{a.n_heads} heads, {a.n_kv_heads} of keys, positions {a.positions}, {a.kind}"
    inside = f"{a.d_ff} features inside, {'gated ' if a.gated else ''}{a.activation}"
    said = {"proved": True, "sublayers": branches}
    return found, said, [*lines, f"architecture        {heads}; {inside}"]


def _words(row: dict[str, Any]) -> str:
    """A branch in one line."""
    if "why" in row:
        return f"not proved: {row['why']}"
    return f"{row['is']}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("branch", "is", "error"))


def _model(directory: Path, *, meta: bool) -> nn.Module:
    """The model with its weights; with fresh ones, or without numbers, if it has none."""
    from signalprop.cli.loading import announce_model, load_model
    from signalprop.diagnosis.loading import folder_of, read_structure
    from signalprop.prediction import cost_of_model

    kept = ("*.safetensors", "*.gguf", "*.bin")
    file = sources.is_gguf(str(directory))
    weights = file or not directory.exists() or any(any(folder_of(directory).glob(pattern)) for pattern in kept)
    if file and meta:
        raise InputError("--device meta reads a config.json, which a .gguf file does not have; leave it out")
    if weights and not meta:
        announce_model(directory, less="" if file else "modules without numbers (--device meta)")
        return load_model(directory)
    empty = read_structure(directory)
    n = sum(p.numel() for p in empty.parameters())
    if meta or n > _LARGEST:
        return empty
    output.announce([cost_of_model(n)], less="modules without numbers (--device meta)")
    return load_model(directory, random_init=True)
