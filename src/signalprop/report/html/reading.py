"""From files to what a report is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from signalprop.diagnosis import result as diagnosis
from signalprop.diagnosis.result import Diagnosis
from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop.network import parametrization
from signalprop.network.parametrization import Parametrization
from signalprop.report.html import kernels
from signalprop.report.html.kernels import Kernels
from signalprop.results import comparison, profile
from signalprop.results.comparison import Comparison, compare
from signalprop.results.profile import Profile
from signalprop_lab.report import reproductions, sweeps
from signalprop_lab.report.reproductions import Reproduced
from signalprop_lab.report.runs import Run, read_run
from signalprop_lab.report.sweeps import Swept
from signalprop_lab.training import tables

Readable = Profile | Comparison | Diagnosis | Parametrization | Kernels | Run | Swept | Reproduced
_PAIR = "signalprop/diagnoses/1"


def read(path: str | Path) -> dict[str, Readable]:
    """What a file or the directory of a run (`path`) holds, by name (of the file, where it has no names of its own).

    Reads the JSON of predict, measure, compare, diagnose, kernel, schemes and reproduce, the .npz of
    `kernel --matrices`, directories of training runs and of sweeps, and a sweep's `results.json`.

    Raises:
        InputError: nothing there, damaged, of a newer version, or something that a report cannot show. The line names
            the file.
    """
    source = Path(path)
    if source.is_dir() and sweeps.is_sweep(source):
        return dict.fromkeys([source.resolve().name], *read(sweeps.results_of(source)).values())
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
        return reader(source, data)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _refusal(schema: Any, data: Any) -> str:
    known = ", ".join(sorted(_READERS))
    if not isinstance(schema, str):
        what = "an object without a schema" if isinstance(data, dict) else f"a {type(data).__name__}"
        return f"it holds {what}; a report shows files with the schema {known}, and directories of runs and sweeps"
    kind, _, version = schema.rpartition("/")
    if any(item.rpartition("/")[0] == kind for item in _READERS) and version.isdecimal():
        return f"it has schema {schema!r:.60}, newer than this version reads; update with: pip install -U signalprop"
    return f"a report cannot show schema {schema!r:.60}; it shows {known}, and directories of runs and sweeps"


def _comparison(source: Path, data: dict[str, Any]) -> dict[str, Readable]:
    predicted, measured = (Profile.from_json(data.get(side)) for side in ("predicted", "measured"))
    return {source.stem: compare(predicted, measured)}


def _diagnoses(source: Path, data: dict[str, Any]) -> dict[str, Readable]:
    found, other = (Diagnosis.from_json(data.get(side)) for side in ("diagnosis", "against"))
    return {source.stem: found, f"{source.stem}, against": other}


_READERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Readable]]] = {
    profile.SCHEMA: lambda source, data: {source.stem: Profile.from_json(data)},
    comparison.SCHEMA: _comparison,
    diagnosis.SCHEMA: lambda source, data: {source.stem: Diagnosis.from_json(data)},
    _PAIR: _diagnoses,
    parametrization.SCHEMA: lambda source, data: {source.stem: Parametrization.from_json(data)},
    kernels.SCHEMA: lambda _, data: dict(kernels.of_json(data)),
    reproductions.SCHEMA: lambda _, data: dict(reproductions.of_json(data)),
    reproductions.SCHEMA_OF_MANY: lambda _, data: dict(reproductions.of_json(data)),
    tables.SCHEMA: lambda source, data: {source.stem: sweeps.of_results(data, source.parent)},
}
