"""The fixtures of the command-line tests, for the commands of the laboratory."""

from __future__ import annotations

from running import command, hf_directories, refused

__all__ = ["command", "hf_directories", "refused"]
