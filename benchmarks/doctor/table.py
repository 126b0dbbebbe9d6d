"""Judging: a fault is named where the first finding is the one that is expected and says the place."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.doctor import models
from signalprop.diagnosis.run import diagnose
from signalprop.errors import InputError


class Fault(NamedTuple):
    """One planted fault.

    Attributes:
        name: in words. model: `trained NAME`, `fresh NAME` of `models`, or `own` for a decoder in
            plain PyTorch (`own encoder`: its text is for an encoder).
        plant: changes the model (or gives another). kinds: findings any of which names it.
        place: what the finding has to say of its place: layers, or words of its text. source: where people met it.
        least: severity from which findings count: `note` for what may be meant, too.
    """

    name: str
    model: str
    plant: Callable[[Any], Any]
    kinds: tuple[str, ...]
    place: tuple[int, ...] | str = ""
    source: str = ""
    least: str = "warning"


class Healthy(NamedTuple):
    """A model with nothing wrong."""

    name: str
    build: Callable[[], Any]
    text: str = ""  # whose text; '': the default


class Row(NamedTuple):
    """What was said of one."""

    name: str
    model: str
    verdict: str
    first: str
    seconds: float
    source: str = ""


def build(name: str, folder: Any = None) -> tuple[Any, Any]:
    """A model, and the text to read with it (None: the default)."""
    kind, _, rest = name.partition(" ")
    if kind == "trained":
        return models.trained(rest, folder), models.text_of(rest)
    if kind == "own":
        return models.decoder(), models.masked_words() if rest == "encoder" else models.words()
    return models.fresh(rest), None


def said(model: nn.Module, text: Any, least: Any = "warning") -> list[Any]:
    """Findings of a model, the first first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return list(diagnose(model, text, jacobian_sequences=0).findings.at_least(least))


def placed(fault: Fault, finding: Any) -> bool:
    """Whether a finding says where."""
    if isinstance(fault.place, str):
        return fault.place in finding.text
    return set(fault.place) == set(finding.layers)


def judged(fault: Fault, folder: Any = None) -> Row:
    """`named`, `partly` (not first, or without its place), `missed`, `wrong` (a cause is asserted that is another)."""
    model, text = build(fault.model, folder)
    with torch.no_grad():
        changed = fault.plant(model)
    model = model if not isinstance(changed, nn.Module) else changed
    start = time.perf_counter()
    try:
        found = said(model, text, fault.least)
    except InputError as error:
        return Row(fault.name, fault.model, "missed", f"refused: {error}", time.perf_counter() - start, fault.source)
    seconds = time.perf_counter() - start
    first = f"{found[0].name}: {found[0].text}" if found else "nothing"
    hits = [item for item in found if item.name in fault.kinds]
    if hits and hits[0] is found[0] and placed(fault, hits[0]):
        verdict = "named"
    elif hits:
        verdict = "partly"
    elif found and found[0].cause and not found[0].cause.startswith("possible"):
        verdict = "wrong"
    else:
        verdict = "missed"
    return Row(fault.name, fault.model, verdict, first, seconds, fault.source)


def judged_healthy(one: Healthy, folder: Any = None) -> Row:
    """`nothing`, or `false alarm`."""
    start = time.perf_counter()
    try:
        model = one.build()
        text = models.text_of(one.text) if one.text else None
        if isinstance(model, tuple):  # a checkpoint comes with its own text
            model, text = model
        found = said(model, text)
    except InputError as error:
        return Row(one.name, "", "refused", str(error), time.perf_counter() - start)
    first = f"{found[0].name}: {found[0].text}" if found else "nothing"
    return Row(one.name, "", "false alarm" if found else "nothing", first, time.perf_counter() - start)
