"""What a checkpoint says to `advise`: the network at its start, and what is wrong with its weights as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from signalprop.data.batches import shortened
from signalprop.data.model_batches import model_batch
from signalprop.errors import InputError, require
from signalprop.files.storage import read_json
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.results.findings import Findings
from signalprop.results.verdicts import FIRST_STEPS, findings_of
from signalprop.schemes.base import parametrized


class Subject(NamedTuple):
    """A network at its start, and what is wrong where that is known otherwise: `found`, `seen` as of `advise`."""

    table: Parametrization
    found: Findings | None = None
    seen: str = ""


def is_checkpoint(source: str | Path) -> bool:
    """Whether it names a directory with weights in safetensors, or a GGUF file."""
    path = Path(source)
    return path.suffix.lower() == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))


def of_checkpoint(path: Path) -> Subject:
    """Fresh weights are predicted by their sizes; trained ones are measured, on 4 sequences of the default text."""
    require("torch", "models")
    from signalprop.attachment.anatomy import attach
    from signalprop.diagnosis.loading import load, read_model
    from signalprop.measurement import measure
    from signalprop.prediction import has_trained_norms, parametrization_of_model
    from signalprop.studies import with_gradient

    model = read_model(path) if path.is_dir() else load(path).model
    if not has_trained_norms(model):
        start = parametrization_of_model(model)
        short = replace(start, architecture=shortened(start.architecture))
        return Subject(short, None, f"weights of {path}, by their sizes; signalprop diagnose tests them")
    found = attach(model)
    if found.mapping.arguments is None:
        raise InputError(
            f"a {type(model).__name__} does not read text or images alone; measure it with what it is "
            "called with, then sp.advise(architecture, found=profile.findings)"
        )
    architecture = shortened(found.mapping.architecture)
    batch, read = model_batch(architecture, path if path.is_dir() else None, None, 4, 0)
    profile = measure(found, batch, backward=with_gradient(architecture, True)[0])
    seen = f"trained weights of {path}, measured on {read}; signalprop diagnose tests them; changes need a new start"
    return Subject(at_start(path, architecture), findings_of(profile, FIRST_STEPS), seen)


def at_start(path: Path, architecture: Architecture | None = None, scheme: str | None = None) -> Parametrization:
    """The network of a checkpoint as its scheme draws it: that one which it carries, where none is named.

    Args:
        architecture: of its model, where that is known; None: as its configuration says.
    """
    a = shortened(Architecture.from_hf(path) if architecture is None else architecture)
    carried = carried_by(path) if scheme is None else None
    return parametrized(a, scheme) if carried is None else parametrized(a, carried.scheme, **carried.options)


def carried_by(path: Path) -> Parametrization | None:
    """The table of the scheme that the checkpoint in a directory carries: configurations alone say nothing of it."""
    record = path / "signalprop.json"
    if not record.is_file():
        return None
    data = read_json(record)
    if not isinstance(data, dict) or "parametrization" not in data:
        raise InputError(f"{record} is not the record of an applied model; save the model again")
    return Parametrization.from_json(data["parametrization"])
