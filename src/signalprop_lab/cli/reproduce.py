"""`signalprop reproduce`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop_lab.reproductions.registry import Row
    from signalprop_lab.reproductions.result import Reproduction, Settings

SCHEMA = "signalprop/reproductions/1"


def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Figures and tables, e.g. tgs-fig1; none: list them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all that runs on any machine.")] = False,
    scale: Annotated[
        str,
        typer.Option("--scale", help="small (seconds to a minute each), or paper (the paper's shapes and samples)."),
    ] = "small",
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="MODEL", help="Trained model for cod-fig2: a directory or a .gguf file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a picture and JSON of each into a directory.")
    ] = None,
    device: opt.Device = "cpu",
    json_file: opt.Json = None,
) -> None:
    """Reproduce the papers' figures and tables, with verdicts.

    Verdicts are computed: confirmed, every check holds; partly; contradicted, none holds and one fails. Exit status 1
    if one is contradicted or breaks.

    \b
    Example: signalprop reproduce tgs-fig12 tgs-tab24 --out figures
    """
    from signalprop.errors import InputError, require
    from signalprop.files.storage import make_folder
    from signalprop.results.text import columns
    from signalprop_lab.reproductions.registry import ROWS, find
    from signalprop_lab.reproductions.result import SCALES, Settings, slug

    if scale not in SCALES:
        raise InputError(f"--scale is {scale!r:.40}; expected {' or '.join(SCALES)}")
    if ids and everything:
        raise InputError("--all and names of figures exclude each other; give one of the two")
    rows = list(dict.fromkeys(find(name) for name in ids or ())) or list(ROWS)
    if everything:
        rows = [row for row in rows if row.runs]
    output.check_outputs(json_file)
    if not (ids or everything):
        lines = columns([f"{row.id}{'' if row.runs else f' ({row.needs})'}" for row in rows])
        note = "`signalprop reproduce ID`: what the paper claims, and ours where it runs here"
        output.deliver(
            json_file,
            lambda: {"schema": SCHEMA, "rows": [row.to_json() for row in rows]},
            lambda: output.echo(f"{lines}\n\n{note}"),
        )
        return
    place = "cpu" if device == "cpu" else opt.usable(device)  # many rows need no PyTorch
    settings = Settings(scale=scale, checkpoint=checkpoint, device=place)
    if len(rows) == 1 and rows[0].checkpoint and checkpoint is None:
        raise InputError(f"{rows[0].id}: {rows[0].missing}")
    if out is not None:
        require("matplotlib", "report")
        try:
            make_folder(out)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror or error}; name another directory") from None
        output.check_outputs(*(out / f"{slug(row.id)}{kind}" for row in rows for kind in (".json", ".png")))
    if checkpoint is not None and len(rows) > 1 and any(row.checkpoint for row in rows):
        require("torch", "models")
        from signalprop.diagnosis.loading import load

        load(checkpoint)  # what is wrong with it is reported before the work on the other rows
    found, broken, unwritten = [], [], []
    for row in rows:
        try:
            one = _run(row, settings, alone=len(rows) == 1)
        except Exception as error:
            if len(rows) == 1:
                raise
            broken.append(row.id)
            one = row.not_run(settings, f"failed: {type(error).__name__}: {' '.join(str(error).split())}")
        unwritten += [] if out is None else _save(out, one)
        print(f"{row.id}: {one.verdict}" + (f", {one.seconds:.0f} s" if one.seconds else ""), file=sys.stderr)
        found.append(one)

    def show() -> None:
        for one in found:
            output.echo(_text(one) + "\n")
        if len(found) > 1:
            output.echo(_summary(found))
        if out is not None:
            output.echo(f"written to {out}")

    bad = [one.id for one in found if one.verdict == "contradicted"]
    against = (("contradicted", bad), ("failed", broken), ("not written", unwritten))
    output.deliver(
        json_file,
        lambda: {"schema": SCHEMA, "reproductions": [one.to_json() for one in found]},
        show,
        failure="; ".join(f"{word}: {', '.join(names)}" for word, names in against if names) or None,
    )


def _save(out: Path, one: Reproduction) -> list[str]:
    """Write picture and JSON of a reproduction; why not, where that fails."""
    from signalprop_lab.reproductions.pictures import save

    try:
        save(out, one)
    except Exception as error:  # its numbers are still handed out with all others
        return [f"{one.id} ({' '.join(str(error).split())})"]
    return []


def _run(row: Row, settings: Settings, *, alone: bool) -> Reproduction:
    """Run a row with its progress; of several rows, away from a terminal, their names say enough."""
    from signalprop_lab.reproductions.registry import run

    bar = alone or sys.stderr.isatty()
    if not bar and row.runs:
        print(f"{row.id}: {row.title}", file=sys.stderr, flush=True)
    with output.progress(row.id) if bar else nullcontext() as step:
        return run(row, settings if step is None else replace(settings, progress=step))


def _text(one: Reproduction) -> str:
    """A reproduction in words: the checks as a table, then what was reduced and what explains it."""
    from signalprop.results.text import listing

    head = f"{one.id}: {one.title} ({one.source})"
    said = [("claim", one.claim), ("verdict", f"{one.verdict}: {one.reason}")]
    if one.findings is not None:
        said += [
            (check.state, f"{check.what}: paper {check.paper}, ours {check.shown}; holds from {check.criterion}")
            for check in one.checks
        ]
        said += [("reduced", one.findings.reduced), *(("note", line) for line in one.findings.notes)]
        said.append(("time", f"{one.seconds:.1f} s"))
    return f"{head}\n{listing(said)}"


def _summary(found: Sequence[Reproduction]) -> str:
    from signalprop.results.text import text_table

    def cells(one: Reproduction) -> list[Any]:
        held = sum(check.state == "holds" for check in one.checks)
        return [one.id, one.verdict, f"{held} of {len(one.checks)}" if one.checks else "-", f"{one.seconds:.0f} s"]

    return text_table(["figure", "verdict", "checks hold", "time"], [cells(one) for one in found], left=2)
