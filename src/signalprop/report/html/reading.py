"""From files to what a report is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from signalprop import comparison, parametrization, profile
from signalprop.comparison import Comparison, compare
from signalprop.diagnosis import result as diagnosis
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.parametrization import Parametrization
from signalprop.profile import Profile
from signalprop.report.html import kernels
from signalprop.report.html.kernels import Kernels
from signalprop.report.html.runs import Run, read_run
from signalprop.storage import read_json

Readable = Profile | Comparison | Diagnosis | Parametrization | Kernels | Run
_PAIR = "signalprop/diagnoses/1"


def read(path: str | Path) -> dict[str, Readable]:
    """What a file or the directory of a run holds, by name (of the file, where it has no names of its own).

    Reads the JSON of predict, measure, compare, diagnose, kernel and schemes, the .npz of `kernel --matrices`, and
    directories of training runs.

    Raises:
        InputError: nothing there, damaged, of a newer version, or something that a report cannot show. The line names
            the file.
    """
    source = Path(path)
    if source.is_dir():
        return {source.resolve().name: read_run(source)}
    if source.suffix == ".npz":
        return dict(kernels.of_arrays(source))
    data = read_json(source)
    schema = data.get("schema") if isinstance(data, dict) else None
    reader = _READERS.get(schema) if isinstance(schema, str) else None
    if reader is None:
        raise InputError(f"{source}: {_refusal(schema, data)}")
    try:
        return reader(source.stem, data)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _refusal(schema: Any, data: Any) -> str:
    known = ", ".join(sorted(_READERS))
    if not isinstance(schema, str):
        what = "an object without a schema" if isinstance(data, dict) else f"a {type(data).__name__}"
        return f"it holds {what}; a report shows files with the schema {known}, and directories of runs"
    kind, _, version = schema.rpartition("/")
    if any(item.rpartition("/")[0] == kind for item in _READERS) and version.isdecimal():
        return f"it has schema {schema!r:.60}, newer than this version reads; update with: pip install -U signalprop"
    return f"a report cannot show schema {schema!r:.60}; it shows {known}, and directories of runs"


def _comparison(name: str, data: dict[str, Any]) -> dict[str, Readable]:
    predicted, measured = (Profile.from_json(data.get(side)) for side in ("predicted", "measured"))
    return {name: compare(predicted, measured)}


def _diagnoses(name: str, data: dict[str, Any]) -> dict[str, Readable]:
    found, other = (Diagnosis.from_json(data.get(side)) for side in ("diagnosis", "against"))
    return {name: found, f"{name}, against": other}


_READERS: dict[str, Callable[[str, dict[str, Any]], dict[str, Readable]]] = {
    profile.SCHEMA: lambda name, data: {name: Profile.from_json(data)},
    comparison.SCHEMA: _comparison,
    diagnosis.SCHEMA: lambda name, data: {name: Diagnosis.from_json(data)},
    _PAIR: _diagnoses,
    parametrization.SCHEMA: lambda name, data: {name: Parametrization.from_json(data)},
    kernels.SCHEMA: lambda _, data: dict(kernels.of_json(data)),
}
