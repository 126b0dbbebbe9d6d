"""Every figure and table of the papers that can be shown, where it comes from, and what shows it: `rows.toml`."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module, resources
from typing import Any, Literal

from signalprop.errors import InputError
from signalprop_lab.reproductions.result import Reproduction, Settings, slug

Needs = Literal["any machine", "training", "GPU"]


@dataclass(frozen=True)
class Row:
    """One figure or table, or a close family of them.

    Attributes:
        id: as in `signalprop reproduce ID`; `a/b` answers to both names.
        title: what it is, in a few words. source: paper and number. claim: what must be seen.
        function: `module:function` of this package that runs it in minutes on two cores, from Settings to Findings;
            None: it takes a sweep of small trainings, or a GPU (`gpu`).
        checkpoint: it needs a trained model, `--checkpoint`.
        trained_by: the command that trains it; None: that has not been done yet. page: with the result; default: the
            section of records/results.md.
        missing: what it takes, beside training; of a trained row: what of the paper's was not run, and what it takes.
    """

    id: str
    title: str
    source: str
    claim: str
    function: str | None = None
    gpu: bool = False
    checkpoint: bool = False
    trained_by: str | None = None
    page: str | None = None
    missing: str = ""

    @property
    def runs(self) -> bool:
        """Whether `run` computes it."""
        return self.function is not None

    @property
    def needs(self) -> Needs:
        """What it takes."""
        return "any machine" if self.runs else "GPU" if self.gpu else "training"

    @property
    def result_page(self) -> str | None:
        """The page with the result of its training, from the root of the repository."""
        return None if self.trained_by is None else self.page or f"records/results.md#{slug(self.id)}"

    @property
    def state(self) -> str:
        """Where it stands, in words."""
        if self.runs:
            return "runs here, with --checkpoint MODEL" if self.checkpoint else "runs here"
        return self.why_not if self.trained_by else f"not run: {self.why_not}"

    @property
    def why_not(self) -> str:
        """Why `run` does not compute it, and where its result is, if there is one."""
        if self.trained_by is not None:
            left = f"; not run: {self.missing}" if self.missing else ""
            return f"trained by {self.trained_by}; result in {self.result_page}{left}"
        return self.missing or "it needs training, which has not been done yet"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        keys = ("id", "title", "source", "claim", "needs", "state", "trained_by", "result_page")
        return {key: getattr(self, key) for key in keys}

    def not_run(self, settings: Settings, reason: str | None = None) -> Reproduction:
        """The row without findings."""
        return Reproduction(
            self.id, self.title, self.source, self.claim, settings.scale, not_run=reason or self.why_not
        )


_TABLES = tomllib.loads(resources.files(__package__).joinpath("rows.toml").read_text("utf-8"))
ROWS = tuple(Row(identifier, **fields) for identifier, fields in _TABLES.items())


def names_of(row: Row) -> tuple[str, ...]:
    """All names of a row: its id, the id as a file name, and each of its parts (tgs-fig12/13: tgs-fig12, tgs-fig13)."""
    paper, _, rest = row.id.partition("-")
    first, *others = rest.split("/")
    kind = first.rstrip("0123456789")
    parts = [first, *(part if part[:1].isalpha() else kind + part for part in others)]
    return tuple(dict.fromkeys([row.id, slug(row.id), *(f"{paper}-{part}" for part in parts)]))


def find(name: str) -> Row:
    """The row of a name."""
    known = {known: row for row in ROWS for known in names_of(row)}
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise InputError(f"no figure or table {name!r:.40}; {hint}signalprop reproduce shows all {len(ROWS)}")


def run(row: Row, settings: Settings) -> Reproduction:
    """Run a row, or say why it is not run."""
    if row.function is None:
        return row.not_run(settings)
    if row.checkpoint and settings.checkpoint is None:
        return row.not_run(settings, row.missing)
    module, _, name = row.function.partition(":")
    begun, used = time.perf_counter(), time.process_time()
    findings = getattr(import_module(f"signalprop_lab.reproductions.{module}"), name)(settings)
    return Reproduction(
        row.id,
        row.title,
        row.source,
        row.claim,
        settings.scale,
        findings=findings,
        seconds=time.perf_counter() - begun,
        processor_seconds=time.process_time() - used,
    )
