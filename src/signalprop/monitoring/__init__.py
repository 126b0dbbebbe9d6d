"""Watch the signal of a model in training: every so many steps, against the band that the theory predicts."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.monitoring.bands import Band, Departure  # noqa: E402
from signalprop.monitoring.monitor import SignalMonitor  # noqa: E402
from signalprop.monitoring.places import Place  # noqa: E402

__all__ = ["Band", "Departure", "Place", "SignalMonitor"]
