"""Trained models: loaded, run on streamed data, measured layer by layer, with layers removed and weights cast.

    from signalprop.diagnosis import diagnose, load, token_batches

    loaded = load("my-checkpoint")
    found = diagnose(loaded.model, token_batches("book.txt", loaded.tokenizer, architecture=...))

What needs PyTorch is imported when it is first used; a stored `Diagnosis` can be read without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from signalprop.diagnosis.result import Diagnosis as Diagnosis

if TYPE_CHECKING:
    from signalprop.diagnosis.loading import load as load
    from signalprop.diagnosis.run import diagnose as diagnose
    from signalprop.diagnosis.stream import token_batches as token_batches

__all__ = ["Diagnosis", "diagnose", "load", "token_batches"]

_WHEN_USED = {"diagnose": "run", "load": "loading", "token_batches": "stream"}


if not TYPE_CHECKING:  # a type checker that saw it would take any name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _WHEN_USED:
            raise AttributeError(f"module 'signalprop.diagnosis' has no attribute {name!r}")
        from signalprop.errors import require

        require("torch", "models")
        return getattr(import_module(f"signalprop.diagnosis.{_WHEN_USED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHEN_USED])
