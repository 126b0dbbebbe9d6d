"""Signal propagation in deep transformers: predict it, measure it, compare.

    import signalprop as sp

    architecture = sp.Architecture.preset("tgs", n_layers=48)
    parametrization = sp.scheme("deepscalelm")(architecture)
    profile = sp.predict(parametrization)

`sp.trace(parametrization)` follows whole token kernels instead of their averages. `sp.apply(model, "deepscalelm")`
gives a PyTorch model the scheme, in place; `sp.diagnose(model, batches)` says what the layers of a trained one do.
Those, `measure`, `simulate`, `build`, `Probe` and the callbacks need PyTorch (`pip install 'signalprop[models]'`) and
are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from signalprop.architecture import Architecture as Architecture
from signalprop.comparison import Agreement as Agreement
from signalprop.comparison import Comparison as Comparison
from signalprop.comparison import compare as compare
from signalprop.errors import InputError as InputError
from signalprop.errors import MissingExtra as MissingExtra
from signalprop.inputs import InputStatistics as InputStatistics
from signalprop.moments import Moments as Moments
from signalprop.parametrization import Parametrization as Parametrization
from signalprop.prediction import predict as predict
from signalprop.profile import Profile as Profile
from signalprop.profile import Series as Series
from signalprop.profile import average as average
from signalprop.schemes import SCHEMES as SCHEMES
from signalprop.schemes import Scheme as Scheme
from signalprop.schemes import scheme as scheme

if TYPE_CHECKING:
    from signalprop.diagnosis import diagnose as diagnose
    from signalprop.kernels.trace import Trace as Trace
    from signalprop.kernels.trace import attention_only as attention_only
    from signalprop.kernels.trace import trace as trace
    from signalprop.models import build as build
    from signalprop.monitoring import SignalMonitor as SignalMonitor
    from signalprop.monitoring.lightning import LightningSignalCallback as LightningSignalCallback
    from signalprop.monitoring.trainer import SignalCallback as SignalCallback
    from signalprop.probes import Probe as Probe
    from signalprop.probes import measure as measure
    from signalprop.simulation import simulate as simulate
    from signalprop.surgery import apply as apply
    from signalprop.surgery import fold as fold
    from signalprop.surgery import initialize as initialize
    from signalprop.surgery import load as load
    from signalprop.surgery import parameter_groups as parameter_groups
    from signalprop.surgery import save as save
    from signalprop.surgery.checking import check as check

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "build": "signalprop.models",
    "diagnose": "signalprop.diagnosis.run",
    "Probe": "signalprop.probes",
    "measure": "signalprop.probes",
    "simulate": "signalprop.simulation",
    "apply": "signalprop.surgery",
    "check": "signalprop.surgery.checking",
    "fold": "signalprop.surgery",
    "initialize": "signalprop.surgery",
    "load": "signalprop.surgery",
    "parameter_groups": "signalprop.surgery",
    "save": "signalprop.surgery",
    "LightningSignalCallback": "signalprop.monitoring.lightning",
    "SignalCallback": "signalprop.monitoring.trainer",
    "SignalMonitor": "signalprop.monitoring",
}
_WHEN_USED = dict.fromkeys(("Trace", "attention_only", "trace"), "signalprop.kernels.trace")


def __getattr__(name: str) -> Any:
    if name in _WHEN_USED:
        return getattr(import_module(_WHEN_USED[name]), name)
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'signalprop' has no attribute {name!r}")
    from signalprop.errors import require

    require("torch", "models")
    return getattr(import_module(_NEEDS_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NEEDS_TORCH, *_WHEN_USED])
