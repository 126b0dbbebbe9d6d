"""Models in Hugging Face directories, and what they are called with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from signalprop.cli import output
from signalprop.cli.sources import is_gguf, lengths
from signalprop.data.batches import shortened
from signalprop.diagnosis.loading import folder_of
from signalprop.errors import InputError, refusing
from signalprop.network.architecture import Architecture
from signalprop.network.presets import preset_instead

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.anatomy import Anatomy


def load_model(
    source: str | Path,
    *,
    random_init: bool = False,
    seed: int = 0,
    hint: str = "",
    dtype: Literal["float32", "auto"] = "float32",
) -> nn.Module:
    """The model in a directory or a .gguf file, as `signalprop.diagnosis.loading.read_model` reads it.

    Args:
        source: text may also be the name of a model on the hub.
        hint: what to do instead if no weights can be read. dtype: `auto`: as a directory has it.
    """
    from signalprop.diagnosis.loading import load, read_model

    if is_gguf(str(source)):
        if random_init:
            raise InputError(f"{source} is a file of weights; leave --random-init out, or give a directory")
        return load(source).model
    if isinstance(source, Path):
        if not source.exists():
            raise InputError(f"cannot read {source}: there is no such file or directory{preset_instead(source)}")
        source = folder_of(source)
    hint = hint or "--random-init of `signalprop measure` takes a fresh model instead"
    return read_model(source, dtype=dtype, random_init=random_init, seed=seed, hint=hint)


def announce_model(source: str | Path, tokens: float = 0, less: str = "") -> None:
    """Say what a model takes that is to be read, where that is long or much. What does not fit, `load_model` refuses.

    Args:
        tokens: that it reads in all passes together. less: as in `output.announce`.
    """
    from signalprop.diagnosis.loading import parameters_of
    from signalprop.prediction import cost_of_model

    output.announce([cost_of_model(parameters_of(source), tokens)], less=less)


def live_model(
    source: str | Path,
    arrays: Path | None,
    inside: str | None,
    device: str,
    changed: dict[str, Any],
    *,
    random_init: bool = False,
    seed: int = 0,
) -> tuple[Anatomy, Architecture | None, dict[str, Any] | None]:
    """A directory's model: itself, the architecture of its batches, or what it is called with where a file says that.

    Args:
        arrays: as `called_with` takes them. inside: path of --inside, of a model that is run by itself.
        changed: as of `architecture_of`. random_init, seed: as of `load_model`.
    """
    from signalprop.attachment.anatomy import attach

    model = at(load_model(Path(source), random_init=random_init, seed=seed).to(device).eval(), inside)
    arguments = called_with(model, arrays)
    found = attach(model)
    return found, None if arrays else architecture_of(found, changed), arguments


def at(model: nn.Module, path: str | None) -> nn.Module:
    """The model at the path of --inside, which is run by itself; the whole one without."""
    from signalprop.attachment.mapping import find

    return model if path is None else find(model, path, "--inside")


def arrays_in(data: str | Path | None, seq_len: int | None = None) -> Path | None:
    """The file of --data where it holds arrays, or a pickle, which `called_with` refuses; None for text and sound."""
    kinds = (".npz", ".npy", ".safetensors", ".pt", ".pth", ".bin", ".pkl")
    if data is None or Path(data).suffix not in kinds:
        return None
    if seq_len is not None:
        raise InputError(f"{data} is all that the model reads; leave out --seq-len")
    return Path(data)


def called_with(model: nn.Module, file: Path | None) -> dict[str, Any] | None:
    """The arguments in a file of --data, by name; the model is known to be called with them from now on.

    Raises:
        InputError: a file of another kind (pickles run code), one that cannot be read, or names that the model's
            forward does not take.
    """
    if file is None:
        return None
    import torch

    from signalprop.files.storage import check_arrays, opened, reading
    from signalprop.streams.calls import remember

    with reading(file):
        opened(file, copies=1).close()
    with refusing(f"{file} cannot be read", "expected arrays by the names of the forward's arguments"):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            arguments: dict[str, Any] = dict(load_file(file))
        elif file.suffix == ".npz":
            with opened(file) as stream, np.load(stream, allow_pickle=False) as arrays:
                check_arrays(arrays, file)
                arguments = {name: torch.as_tensor(arrays[name]) for name in arrays.files}
        else:
            raise InputError(
                f"--data {file}: expected a .safetensors or .npz file; a pickle (.pt, .bin) can run code and is not "
                "read: safetensors.torch.save_file(arguments, FILE) writes one"
            )
    return remember(model, arguments)


def architecture_of(attached: Anatomy, changed: dict[str, Any]) -> Architecture:
    """The architecture of a live model for sequences of another length.

    Args:
        changed: may hold `seq_len`; where it does not, `LONGEST` tokens at most.
    """
    check_one_input(attached)
    a = attached.mapping.architecture
    if changed.get("seq_len", 0) > a.seq_len and a.positions == "learned":
        raise InputError(f"--seq-len is {changed['seq_len']}; this model has positions for {a.seq_len}")
    return shortened(a.replace(**changed)).replace(**lengths(changed))


def check_one_input(attached: Anatomy) -> None:
    """Raise InputError for a model whose arguments do not follow from a batch, as one that reads images beside text."""
    if attached.mapping.arguments is None:
        model = attached.model
        models = [n for n, m in model.named_modules() if n and "." not in n and getattr(m, "config", None) is not None]
        which = f", as {' or '.join(models)}" if models else ""
        raise InputError(
            f"a {type(model).__name__} reads more than text or images alone; give measure, compare or diagnose "
            f"--inside PATH, a model inside it that does not{which}"
        )
