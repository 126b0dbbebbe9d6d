"""What `signalprop diagnose` reads: models, data, tasks and layers, found wrong before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from signalprop.cli import options as opt
from signalprop.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.anatomy import Anatomy
    from signalprop.data.batches import Batch
    from signalprop.diagnosis.loading import Loaded
    from signalprop.diagnosis.result import Estimate
    from signalprop.network.architecture import Architecture


class Asked(NamedTuple):
    """How a model is read, what it reads, and what is asked of it: options of `signalprop diagnose` by their names."""

    data: str | None
    tokens: int
    seq_len: int | None
    dtype: str
    trials: bool
    device: str
    inside: str | None
    remove: bool
    cast: tuple[str, ...]
    loss_scale: float | None
    task: str | None

    def of_the_other(self) -> Asked:
        """What is asked of the model of --against."""
        return self._replace(inside=None, **_NOTHING_MORE)


_NOTHING_MORE: dict[str, Any] = {"remove": False, "cast": (), "loss_scale": None, "task": None}
# Over all tokens, forwards and backwards, all that is looked at included; measured with 193 million parameters on a
# shared machine: 140 s at 1,024 tokens, 13 bytes a parameter.
_PASSES = 4
_SEQUENCES = 4  # per batch
_SHORTEST = 16  # tokens of a sequence for fewer --tokens than a sequence usually has


class Subject(NamedTuple):
    """A model that is ready to be diagnosed: all that is read has been."""

    loaded: Loaded
    attached: Anatomy
    batches: list[Batch]
    accuracy: Callable[[nn.Module], Estimate] | None


def is_stored(source: str) -> bool:
    """Whether a MODEL is the JSON file of an earlier diagnosis."""
    path = Path(source)
    return path.suffix == ".json" and path.name != "config.json" and path.is_file()


def check_options(source: str, asked: Asked) -> None:
    """Raise InputError for options that do not go together, or that a stored diagnosis has no answer to."""
    from signalprop.cli.loading import arrays_in

    if is_stored(source) and any(getattr(asked, name) != nothing for name, nothing in _NOTHING_MORE.items()):
        raise InputError(f"{source} is a stored diagnosis; --remove, --cast, --loss-scale and --task need the model")
    if asked.loss_scale is not None:
        from signalprop.diagnosis.loss_scale import check_scale

        check_scale(asked.loss_scale, "--loss-scale")
    arrays_in(asked.data, asked.seq_len)


def ready(source: str, asked: Asked) -> Subject:
    """Read a model and its data, and find all that could be wrong with what is asked of them."""
    place = opt.usable(asked.device)
    from signalprop.attachment.anatomy import attach
    from signalprop.cli.loading import announce_model, arrays_in, at, called_with, check_one_input
    from signalprop.data.audio import is_sound, with_audio
    from signalprop.diagnosis.loading import load
    from signalprop.diagnosis.run import batch_of, check

    announce_model(source, (_PASSES + len(asked.cast)) * asked.tokens, less="fewer tokens (--tokens) or --no-trials")
    loaded = load(source, dtype=asked.dtype)  # type: ignore[arg-type]
    loaded.model.to(place)
    loaded = replace(loaded, model=at(loaded.model, asked.inside))
    called = called_with(loaded.model, arrays_in(asked.data))
    attached = attach(loaded.model)
    mapping = attached.mapping
    if called is None:
        check_one_input(attached)
    accuracy = None if asked.task is None else _accuracy(asked.task, loaded)
    sound = Path(asked.data) if asked.data is not None and is_sound(Path(asked.data)) else None
    read = asked if sound is None else asked._replace(data=None)
    batches = list(_batches(loaded, mapping.architecture, read)) if called is None else [batch_of(mapping, called)]
    if sound is not None:
        batches = [with_audio(b, mapping.architecture, sound, k * _SEQUENCES) for k, b in enumerate(batches)]
    check(attached, batches, asked.remove, asked.cast)
    return Subject(loaded, attached, batches, accuracy)


def _batches(loaded: Loaded, a: Architecture, asked: Asked) -> Iterator[Batch]:
    from signalprop.diagnosis.stream import DEFAULT_LENGTH, token_batches

    longest = min(DEFAULT_LENGTH, a.target_len or a.seq_len)
    length = asked.seq_len or min(longest, max(asked.tokens, _SHORTEST))
    start = getattr(getattr(loaded.model, "config", None), "decoder_start_token_id", None)  # built ones have no config
    return token_batches(
        asked.data,
        loaded.tokenizer,
        length if length < longest else asked.seq_len,
        _SEQUENCES,
        max(1, -(-asked.tokens // length)),
        architecture=a,
        decoder_start=start if isinstance(start, int) else None,
    )


def formats_of(names: list[str] | None) -> tuple[str, ...]:
    """The formats of --cast; all of them for `all`."""
    if not names:
        return ()
    from signalprop.diagnosis.number_formats import FORMATS

    return FORMATS if "all" in names else tuple(dict.fromkeys(map(opt.long_format, names)))


def _accuracy(task: str, loaded: Loaded) -> Callable[[nn.Module], Estimate]:
    from signalprop.diagnosis.tasks import harness

    if loaded.tokenizer is None:
        raise InputError("--task needs the model's tokenizer, and the checkpoint has none")
    return harness(task.split(","), loaded.tokenizer)
