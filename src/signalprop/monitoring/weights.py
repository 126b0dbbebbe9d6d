"""The weights of a model that trains: what they are is proved once, their numbers are read at every sample."""

from __future__ import annotations

from signalprop.attachment.attached import Attached, require_roles
from signalprop.attachment.parametrization_of import parametrization_of
from signalprop.errors import InputError
from signalprop.monitoring.logs import Logs
from signalprop.network.parametrization import Parametrization


class Weights:
    """Of one monitor."""

    def __init__(self, attached: Attached, logs: Logs) -> None:
        self._attached, self._logs = attached, logs
        self._known: Attached | InputError | None = None

    def now(self) -> Parametrization | None:
        """What they are; None where they cannot be read, or one is not finite."""
        try:
            return parametrization_of(self._proved())
        except InputError as error:
            self._logs.say_once(f"no bands: {error}")
            return None

    def reading(self) -> Attached:
        """The model, with what its weights are where that is proved: it reads a Batch, and its scores are known."""
        try:
            return self._proved()
        except InputError:
            return self._attached

    def _proved(self) -> Attached:
        """The model with what its weights are, or the error of the first time that it was asked."""
        if self._known is None:
            try:
                self._known = require_roles(self._attached)
            except InputError as error:
                self._known = error
        if isinstance(self._known, InputError):
            raise self._known
        return self._known
