"""What every result that has a JSON form can do with files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json
from signalprop.files.validation import typed


def fields_of(data: Any, schema: str, what: str) -> dict[str, Any]:
    """The fields of the JSON form of `what` (`a profile`), its schema among them."""
    if isinstance(data, dict) and data.get("schema") == schema:
        return {str(key): value for key, value in data.items()}
    got = f"schema {data.get('schema')!r:.60}" if isinstance(data, dict) else f"a {type(data).__name__}"
    raise InputError(f"this is not {what} that this version reads: {got}, expected schema {schema!r}")


class Document(ABC):
    """A value with a JSON form, saved and loaded as a file."""

    @abstractmethod
    def to_json(self) -> Any:
        """The JSON form."""

    @classmethod
    @abstractmethod
    def from_json(cls, data: Any) -> Self:
        """The value of a JSON form.

        Raises:
            InputError: another schema version, a missing or unknown field, or a value out of range.
        """

    @typed
    def save(self, path: str | Path) -> None:
        """Write the JSON form to the file `path`, whole or not at all; `-` is standard output.

        Raises:
            InputError: the file cannot be written.
        """
        write_json(path, self.to_json())

    @classmethod
    @typed
    def load(cls, path: str | Path) -> Self:
        """Read the JSON file `path` that `save` wrote.

        Raises:
            InputError: the file cannot be read, or as `from_json`.
        """
        return cls.from_json(read_json(path))
