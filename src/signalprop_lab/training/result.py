"""How a run ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from signalprop.errors import InputError
from signalprop.results.findings import Findings

RUN_SCHEMA = "signalprop/run/1"


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        name: of the recipe.
        status: `finished`; `diverged` (a loss or gradient was not finite); `stopped` (by a signal; resume it). reason:
            why it did not finish.
        steps: that were done. train_loss: mean over the last tenth of them; eval_loss: after the last one; in nats.
        chance: loss of the best guess that reads no input, on the same examples (`Prepared.chance`).
        parameters, trained_parameters: counts. seconds: of training, over all restarts.
        throughput: tokens (or images, ...) per second, median over the logged stretches. unit: of what.
        findings: what the rules say of the first signal that was measured and of the last, each with its step.
        scores: what else was measured on validation data, and `plateau_steps`, the step at which the run had left the
            plateau at chance (None: not yet; `plateau.left_at`). folded: why no checkpoint was folded, or "".
    """

    name: str
    status: str
    reason: str | None
    steps: int
    train_loss: float | None
    eval_loss: float | None
    chance: float
    parameters: int
    trained_parameters: int
    seconds: float
    throughput: float | None
    unit: str
    scores: dict[str, float | None] = field(default_factory=dict)
    folded: str = ""
    findings: Findings = field(default_factory=Findings)

    def to_json(self) -> dict[str, Any]:
        """As in result.json."""
        return {"schema": RUN_SCHEMA} | asdict(self) | {"findings": self.findings.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Result:
        """A result that `to_json` made (`data`).

        Raises:
            InputError: something else.
        """
        if not isinstance(data, dict) or data.get("schema") != RUN_SCHEMA:
            raise InputError(f"this is not the result of a run; expected schema {RUN_SCHEMA}")
        try:
            found = Findings.from_json(data.get("findings", []))
            return cls(**{key: value for key, value in data.items() if key != "schema"} | {"findings": found})
        except TypeError as error:
            raise InputError(f"this is not the result of a run: {error}") from None
