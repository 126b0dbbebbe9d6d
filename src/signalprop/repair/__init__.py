"""Make a model that people already have compute what a scheme asks for, and fold it away again."""

from __future__ import annotations

from signalprop.errors import require

require("torch", "models")

from signalprop.repair.applying import apply  # noqa: E402
from signalprop.repair.check_result import Check  # noqa: E402
from signalprop.repair.checks import check  # noqa: E402
from signalprop.repair.fitting import Fit, fit  # noqa: E402
from signalprop.repair.folds import fold  # noqa: E402
from signalprop.repair.groups import parameter_groups  # noqa: E402
from signalprop.repair.initialisation import initialize  # noqa: E402
from signalprop.repair.saved_models import load  # noqa: E402
from signalprop.repair.saving import save  # noqa: E402

__all__ = [
    "Check",
    "Fit",
    "apply",
    "check",
    "fit",
    "fold",
    "initialize",
    "load",
    "parameter_groups",
    "save",
]
