"""One figure or table of the papers, what it takes to show it, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
            sweep's page in docs/results.
        missing: what it takes, beside training.
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
        return None if self.trained_by is None else self.page or f"docs/results/{slug(self.id)}.md"

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
            return f"trained by {self.trained_by}; result in {self.result_page}"
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
