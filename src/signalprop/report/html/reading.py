"""From files to what a report is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop.files.validation import typed
from signalprop.report.html.parts import Reader
from signalprop.report.html.registry import parts


@typed
def read(path: str | Path) -> dict[str, Any]:
    """What a file or the directory of a run (`path`) holds, by name (of the file, where it has no names of its own).

    Reads the JSON of predict, measure, compare, diagnose, kernel, schemes and reproduce, the .npz of
    `kernel --matrices`, the JSONL of a SignalMonitor, directories of training runs and of sweeps, and a sweep's
    `results.json`.

    Raises:
        InputError: nothing there, damaged, of a newer version, or something that a report cannot show. The line names
            the file.
    """
    source = Path(path)
    if source.is_dir():
        return _folder(source)
    if source.suffix == ".npz":
        return next(part.arrays(source) for part in parts() if part.arrays is not None)
    if source.suffix == ".jsonl":
        return next(part.lines(source) for part in parts() if part.lines is not None)
    data = read_json(source)
    schema = data.get("schema") if isinstance(data, dict) else None
    readers = _readers()
    reader = readers.get(schema) if isinstance(schema, str) else None
    if reader is None:
        raise InputError(f"{source}: {_refusal(schema, data, readers)}")
    try:
        return reader(source, data)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _folder(source: Path) -> dict[str, Any]:
    for part in parts():
        found = None if part.folder is None else part.folder(source)
        if found is not None:
            return found
    raise InputError(f"{source} is not the directory of a training run or of a sweep; give one, or a file of results")


def _readers() -> dict[str, Reader]:
    return {schema: reader for part in parts() for schema, reader in part.readers.items()}


def _refusal(schema: Any, data: Any, readers: dict[str, Reader]) -> str:
    known = ", ".join(sorted(readers))
    if not isinstance(schema, str):
        what = "an object without a schema" if isinstance(data, dict) else f"a {type(data).__name__}"
        return f"it holds {what}; a report shows files with the schema {known}, and directories of runs and sweeps"
    kind, _, version = schema.rpartition("/")
    if any(item.rpartition("/")[0] == kind for item in readers) and version.isdecimal():
        return f"it has schema {schema!r:.60}, newer than this version reads; update with: pip install -U signalprop"
    return f"a report cannot show schema {schema!r:.60}; it shows {known}, and directories of runs and sweeps"
