"""What was found, as values: predictions, measurements, diagnoses and monitors all give these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic_core import core_schema

from signalprop.errors import InputError
from signalprop.files.validation import Value

Severity = Literal["fault", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")  # the most severe first


class Unhealthy(Exception):
    """Raised by `Findings.raise_if`; `findings` are those that it is about."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        super().__init__("\n".join(map(str, findings)))


class Finding(Value):
    """One thing that was found.

    Attributes:
        name: what, in two words, as the table of rules has it. severity: `fault` (something is broken), `warning`,
            `note`. layers: which it is about, of all stacks, () for the whole network; tensors: by name.
        text: one sentence with the numbers. quantity: what was compared; value, bound: with what; None where nothing
            is counted.
        evidence: what the bound rests on. cause: only where a test of it ran. remedy: what to try, never what is there
            already. confidence: `clearly beyond the bound`, or `narrowly`: by less than a factor of 3.
        page: where to read on, a command or a page of the documentation. step: of training, None: not in training.
    """

    name: str
    severity: Severity = "warning"
    text: str
    layers: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    quantity: str = ""
    value: float | None = None
    bound: float | None = None
    evidence: str = ""
    cause: str = ""
    remedy: str = ""
    confidence: str = ""
    page: str = ""
    step: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.text}", self.confidence, self.remedy]
        return "; ".join(part for part in parts if part) + (f" ({self.page})" if self.page else "")


class Findings(tuple[Finding, ...]):
    """All of them, in the order of the table of rules."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """As a field of a value: a tuple of Finding."""
        return core_schema.no_info_after_validator_function(cls, handler(tuple[Finding, ...]))

    def at_least(self, severity: Severity) -> Findings:
        """Those that are as severe as that, or more."""
        return Findings(item for item in self if SEVERITIES.index(item.severity) <= SEVERITIES.index(severity))

    def raise_if(self, severity: Severity = "warning") -> None:
        """For notebooks and continuous integration.

        Raises:
            Unhealthy: some are as severe as that, or more.
        """
        found = self.at_least(severity)
        if found:
            raise Unhealthy(found)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of objects, JSON-ready; without what is empty."""
        return [{key: value for key, value in item.model_dump(mode="json").items() if value not in ("", [], None)}
                for item in self]  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Findings:
        """What `to_json` wrote (`data`).

        Raises:
            InputError: something else.
        """
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            raise InputError("findings are not a list of objects")
        return cls(Finding(**item | {name: tuple(item.get(name, ())) for name in ("layers", "tensors")})
                   for item in data)  # fmt: skip

    def __add__(self, others: Iterable[Finding]) -> Findings:  # type: ignore[override]
        return Findings([*self, *others])
