"""What networks read: batches of text, images and speech; text of any size in pieces."""

from __future__ import annotations

from signalprop.data.batches import Batch, default_batch, load_text

__all__ = ["Batch", "default_batch", "load_text"]
