"""The directory of a run: what is in it already, and one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from signalprop.errors import InputError, require
from signalprop.files.storage import make_folder, read_json
from signalprop_lab.training.checkpoints import last_good
from signalprop_lab.training.recipe import Recipe, parse
from signalprop_lab.training.recipe_files import difference, read_yaml
from signalprop_lab.training.result import Result


def begun_earlier(folder: Path, recipe: Recipe, resume: bool) -> Result | None:
    """Refuse a directory of something else; the result, where the run is over."""
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected a directory, or a path for a new one")
    written = folder / "recipe.yaml"
    if written.is_file():
        if not resume:
            raise InputError(f"{folder} holds a run already; go on with --resume, or choose a new directory")
        before = parse(read_yaml(written))
        longer = recipe.budget.steps > before.budget.steps
        if longer and before.model_copy(update={"budget": recipe.budget}) == recipe:
            if last_good(folder / "checkpoints") is None:
                raise InputError(
                    f"{folder} has no checkpoint from which to continue to {recipe.budget.steps} steps; only "
                    "runs with a cadence.save have them"
                )
            return None
        if before != recipe:
            change = difference(before.to_json(), recipe.to_json())
            raise InputError(f"{folder} holds a run of another recipe ({change}); choose a new one")
        if (folder / "result.json").is_file():
            result = Result.from_json(read_json(folder / "result.json"))
            if result.status in ("finished", "diverged"):
                return result
    elif folder.is_dir() and any(not item.name.startswith(".") for item in folder.iterdir()):
        raise InputError(f"{folder} holds files that are not a run; choose a new directory")
    return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a run's directory; the system lets go of it when the process ends, however it ends."""
    filelock = require("filelock", "training")
    lock = filelock.FileLock(folder / ".lock", timeout=0)
    try:
        make_folder(folder)
        lock.acquire()
    except filelock.Timeout:
        raise InputError(f"another process is training in {folder}; wait for it, or choose a new directory") from None
    except OSError as error:
        raise InputError(f"cannot write in {folder}: {error.strerror or error}; choose another directory") from None
    try:
        yield
    finally:
        lock.release()
