"""Measure the signal of PyTorch models: hooks that turn a forward and a backward pass into a Profile."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.attachment.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap  # noqa: E402
from signalprop.measurement.input_kernels import input_kernels  # noqa: E402
from signalprop.measurement.measuring import Probe, measure  # noqa: E402

__all__ = ["EmbeddingMap", "HeadMap", "Mapping", "Probe", "SublayerMap", "input_kernels", "measure"]
