"""The signal of PyTorch models, measured: a forward and a backward pass become a Profile."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.measurement.input_kernels import input_kernels  # noqa: E402
from signalprop.measurement.measuring import Probe, measure  # noqa: E402

__all__ = ["Probe", "input_kernels", "measure"]
