"""A description tied to a live PyTorch model: where its sublayers, norms, embedding and head are."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.attachment.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap  # noqa: E402

__all__ = ["EmbeddingMap", "HeadMap", "Mapping", "SublayerMap"]
