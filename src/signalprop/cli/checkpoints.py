"""Checkpoints that commands write: a whole directory or none, and the check that it holds what it should."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from signalprop.cli.output import check_parent, note
from signalprop.errors import InputError
from signalprop.files.storage import written_whole as written_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Beside weights and configuration a checkpoint may hold these, which no scheme touches.
_COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "chat_template*",
    "preprocessor_config.json", "processor_config.json", "generation_config.json",
)  # fmt: skip
# A folded model errs by rounding: of weights to its type, and of other sums.
_LARGEST_ERROR = {"float32": 1e-3, "float64": 1e-3}
_LARGEST_HALF = 0.1


def check_out(out: Path) -> None:
    """Refuse a directory that cannot be created, or would be overwritten, before the long work starts."""
    if out.is_dir():
        if any(out.iterdir()):
            raise InputError(f"--out {out} holds files already; choose a new directory")
    elif out.exists():
        raise InputError(f"--out {out} is a file; choose a new directory")
    check_parent(out)


def has_weights(source: Path) -> bool:
    """Whether a checkpoint holds weights, in whatever kind of file."""
    kinds = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")
    place = source if source.is_dir() else source.parent
    return any(next(place.glob(kind), None) is not None for kind in kinds)


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer and the like from a checkpoint (or a file in it) to another that has none."""
    place = source if source.is_dir() else source.parent
    for pattern in _COMPANIONS:
        for file in sorted(place.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def stored_type(model: nn.Module) -> torch.dtype:
    """The type in which the model's checkpoint has, or would have, its weights."""
    import torch

    config: Any = getattr(model, "config", None)
    if config is None:
        raise InputError(
            f"expected a checkpoint of transformers; this {type(model).__name__} was built by signalprop: in Python, "
            "load it with signalprop.load and save it with signalprop.save"
        )
    name = getattr(config, "dtype", None) or "float32"
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def first_output(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """Logits, or what else the model outputs first, in evaluation mode."""
    import torch

    from signalprop.hooks import logits_of
    from signalprop.streams.calls import call
    from signalprop.streams.live_model import evaluating

    with evaluating(model), torch.no_grad():
        return logits_of(call(model, arguments))


def tiny_arguments(model: nn.Module) -> dict[str, Any]:
    """One sequence of a few random tokens (or an image, or frames) as the model's arguments."""
    from signalprop.attachment.anatomy import attach
    from signalprop.repair.tiny_pass import arguments_for

    return arguments_for(attach(model), None)


def fold_into(model: nn.Module, dtype: torch.dtype, folder: Path) -> float:
    """Fold a model, save it in a folder in the given type, and read it back by transformers alone.

    Returns how far its outputs are from those before: largest difference over largest value, in float32.

    Raises:
        typer.Exit: further than rounding explains (status 1, one line on stderr).
    """
    from signalprop.cli.loading import load_model
    from signalprop.repair import fold

    arguments = tiny_arguments(model)
    before = first_output(model, arguments)
    fold(model).to(dtype).save_pretrained(folder)  # type: ignore[operator]
    again = load_model(folder).to(before.device)
    error = difference(before, first_output(again, arguments))
    return refused_beyond(error, stored_type(again), "folded", "keep it unfolded")


def difference(before: Tensor, after: Tensor) -> float | None:
    """The largest difference over the largest value before; None where outputs are not finite."""
    if not bool(after.isfinite().all()):
        return None
    return float((after.to(before.dtype) - before).abs().max() / before.abs().max().clamp_min(1e-30))


def refused_beyond(error: float | None, stored: torch.dtype, how: str, instead: str) -> float:
    """The error of a checkpoint's outputs, if rounding to the type of its weights explains it.

    Args:
        how: what was done to the model. instead: what to do now.

    Raises:
        typer.Exit: it does not (status 1, one line on stderr).
    """
    error = math.inf if error is None else error
    limit = _LARGEST_ERROR.get(str(stored).removeprefix("torch."), _LARGEST_HALF)
    if not error <= limit:
        note(
            f"the {how} model's outputs differ by {error:.1e} of the largest, more than {limit:g}, so nothing was "
            f"written; {instead}"
        )
        raise typer.Exit(1)
    return error
