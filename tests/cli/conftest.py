"""The fixtures of the command-line tests."""

from __future__ import annotations

from running import command, hf_directories, refused

__all__ = ["command", "hf_directories", "refused"]
