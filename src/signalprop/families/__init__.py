"""Families of transformers, one file each; being in this folder registers one. A family is imported when it is read."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError

if TYPE_CHECKING:
    from signalprop.families.base import Family

__all__ = ["find", "names", "unknown"]

_DISENTANGLED = (
    "its disentangled attention adds products of content and relative position to the scores, which neither an "
    "Architecture nor a Parametrization can say"
)
_REFUSED = {
    "llama4_text": "its router's weights multiply what experts read, not what they give, which is not derived",
    "phimoe": "its router (SparseMixer) weighs an expert against those of nearly its score alone, which is not derived",
    "deberta": _DISENTANGLED,
    "deberta-v2": _DISENTANGLED,
    "gemma3": "it also reads images; take its language model (`.model.language_model`), of family 'gemma3_text'",
}


def find(model_type: Any) -> Family | None:
    """The family of that name (`model_type` in config.json), or None."""
    if not isinstance(model_type, str):
        return None
    module = model_type.replace("-", "_")
    family = _of(module) if module in _modules() else None
    return family if family is not None and family.model_type == model_type else None


def names() -> list[str]:
    """The names of all families, in order. Imports them all."""
    return sorted(_of(module).model_type for module in _modules())


def unknown(model_type: Any) -> str:
    """Why a family cannot be read, in words."""
    if model_type in tuple(_REFUSED):
        return f"the model family {model_type!r} is not supported: {_REFUSED[model_type]}"
    return (
        f"the model family {model_type!r:.60} is not one of the {len(_modules())} whose configurations are read "
        "(docs/measuring.md#a-model-of-your-own)"
    )


@cache
def _modules() -> frozenset[str]:
    """The files of this folder that hold a family."""
    found = (module.name for module in iter_modules(__path__))
    return frozenset(name for name in found if name not in ("base", "reading") and not name.startswith("_"))


def _of(module: str) -> Family:
    try:
        family: Family = import_module(f"{__name__}.{module}").FAMILY
    except InputError:
        raise
    except Exception as error:  # a stranger's file: whatever is wrong with it becomes one line
        raise InputError(f"signalprop/families/{module}.py holds no family: {type(error).__name__} {error}") from error
    if family.model_type.replace("-", "_") != module:
        raise InputError(
            f"signalprop/families/{module}.py holds the family {family.model_type!r}; expected the file's name, "
            "with _ for -"
        )
    return family
