"""Make a model that people already have compute what a scheme asks for, and fold it away again."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.surgery.applying import apply  # noqa: E402
from signalprop.surgery.checking import Check, check  # noqa: E402
from signalprop.surgery.folding import fold  # noqa: E402
from signalprop.surgery.groups import parameter_groups  # noqa: E402
from signalprop.surgery.initialising import initialize  # noqa: E402
from signalprop.surgery.locating import locate  # noqa: E402
from signalprop.surgery.saving import load, save  # noqa: E402

__all__ = ["Check", "apply", "check", "fold", "initialize", "load", "locate", "parameter_groups", "save"]
