"""Trained models: loaded, run on streamed data, measured layer by layer, with layers removed and weights cast.

    from signalprop.diagnose import diagnose, load, token_batches

    loaded = load("my-checkpoint")
    found = diagnose(loaded.model, token_batches("book.txt", loaded.tokenizer, architecture=...))

What needs PyTorch is imported when it is first used; a stored `Diagnosis` can be read without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from signalprop.diagnose.result import Diagnosis as Diagnosis

if TYPE_CHECKING:
    from signalprop.diagnose.loading import load as load
    from signalprop.diagnose.run import diagnose as diagnose
    from signalprop.diagnose.stream import token_batches as token_batches

_WHEN_USED = {"diagnose": "run", "load": "loading", "token_batches": "stream"}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'signalprop.diagnose' has no attribute {name!r}")
    from signalprop.errors import require

    require("torch", "models")
    return getattr(import_module(f"signalprop.diagnose.{_WHEN_USED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHEN_USED])
