"""ERNIE (1 to 3): BERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.errors import InputError
from signalprop.families import bert
from signalprop.families.base import BY_HAND, Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    if c["use_task_id"]:
        raise InputError(f"ERNIE with use_task_id adds a fourth embedding, which an Architecture cannot say; {BY_HAND}")
    return bert.fields(c)


FAMILY = replace(
    bert.FAMILY, model_type="ernie", defaults={**bert.FAMILY.defaults, "use_task_id": False}, fields=fields
)
