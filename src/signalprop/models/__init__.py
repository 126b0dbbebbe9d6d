"""Reference PyTorch transformers, built from a Parametrization."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.models.transformer import Output, Transformer, build  # noqa: E402

__all__ = ["Output", "Transformer", "build"]
