"""A training that died: what stopped it, where and when it began, what that may come from, what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from signalprop.report.sections import Card, Section, Table
from signalprop.results.findings import Finding
from signalprop.results.text import named, number

_DEADLY = ("not finite", "diverged")


def autopsy(name: str, events: Sequence[Finding]) -> tuple[Card, Section] | None:
    """A card and the events in their order; None of a training that did not die.

    Args:
        name: of the training. events: with their steps, the first one first.
    """
    died = next((one for one in events if one.name in _DEADLY), None)
    if died is None:
        return None
    before = events[: events.index(died) + 1]
    first = before[0]
    texts = [died.text]
    if first is not died:
        when = "" if first.step is None or first.text.startswith("step") else f"step {first.step}: "
        texts.append(f"it began with {when}{first.text}")
    texts += [first.cause] if first.cause else []
    where = f" in {named(first.layers)}" if first.layers else ""
    at = "" if died.step is None else f" at step {died.step}"
    card = Card("fault", name, f"died{at}: {first.name}{where}", texts, first.remedy, first=True)
    rows = [
        ["" if one.step is None else str(one.step), one.name, named(one.layers) if one.layers else "",
         number(one.value), one.cause.removeprefix("possible, not tested: "), one.remedy]
        for one in events
    ]  # fmt: skip
    header = ["step", "what", "where", "value", "may come from", "next"]
    lead = "What left its band, jumped or stopped being finite, in the order of the steps; causes were not tested."
    return card, Section(f"Autopsy of {name}", [Table("Events", header, rows, left=6)], lead)
