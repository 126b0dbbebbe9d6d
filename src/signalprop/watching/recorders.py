"""Which recorder a step gets: hooks, for which compiled code runs uncompiled, or taps inside the compiled graph."""

from __future__ import annotations

import logging

from signalprop.attachment.anatomy import Anatomy
from signalprop.errors import InputError
from signalprop.hooks import is_compiled
from signalprop.watching.recording import Begins, Recorder
from signalprop.watching.taps import Groups, TapRecorder, Taps, refused

LOGGER = logging.getLogger("signalprop.watching")


class Recorders:
    """Makes the recorder of every watched step of one model.

    Args:
        compiled: whether the model is compiled, or will be before it runs. Default: whether it is. groups: over which
            processes statistics are taken; others than this one need taps, as a compiled graph does.
        begins, skip_first: as for a Recorder, and for Taps. reads: as for Taps.
    """

    def __init__(
        self,
        attached: Anatomy,
        *,
        backward: bool = True,
        compiled: bool | None = None,
        groups: Groups,
        begins: Begins | None = None,
        skip_first: int = 0,
        reads: tuple[str, ...] = (),
    ) -> None:
        self._attached, self._backward, self._begins = attached, backward, begins
        self._compiled, self._groups, self._skip_first, self._reads = compiled, groups, skip_first, reads
        self._taps: Taps | None = None
        self._chosen = False
        problem = "taps see nothing without a backward pass" if not backward else refused(attached)
        if groups and problem:
            raise InputError(f"{problem}, so that statistics cannot be over several processes; leave the groups out")
        self._problem = problem

    def recorder(self) -> Recorder | TapRecorder:
        """A new one, for the step that is about to begin."""
        if not self._chosen:
            self._chosen = True
            self._taps = self._placed()
        if self._taps is not None:
            self._taps.place()
            return TapRecorder(self._taps)
        return Recorder(
            self._attached, backward=self._backward, begins=self._begins, skip_first=self._skip_first, lenient=True
        )

    def close(self) -> None:
        """Leave nothing on the model."""
        if self._taps is not None:
            self._taps.remove()

    def _placed(self) -> Taps | None:
        compiled = self._compiled
        if compiled is None:
            compiled = is_compiled(self._attached.outer)
        if not (compiled or self._groups):
            return None
        if self._problem:
            LOGGER.warning(f"a step that is measured runs uncompiled: {self._problem}")
            return None
        return Taps(self._attached, groups=self._groups, skip_first=self._skip_first, reads=self._reads)
