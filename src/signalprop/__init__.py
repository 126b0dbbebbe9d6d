"""Signal propagation in deep transformers: predict it, measure it, compare.

    import signalprop as sp

    profile = sp.predict("gpt2")
    profile.gradient_ratio, profile.plot()

    architecture = sp.Architecture.preset("tgs", n_layers=48)
    sp.predict(architecture, scheme="deepscalelm")

`sp.trace(parametrization)` follows whole token kernels instead of their averages. `sp.apply(model, "deepscalelm")`
gives a PyTorch model the scheme, in place; `sp.diagnose(model, batches)` says what the layers of a trained one do.
Those, `measure`, `simulate`, `build`, `Probe` and the callbacks need PyTorch (`pip install 'signalprop[models]'`) and
are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError, MissingExtra
from signalprop.families import reading as reading  # it reads for Architecture.from_hf
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import Moments
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.comparison import Agreement, Comparison
from signalprop.results.profile import Profile, average
from signalprop.results.series import Series
from signalprop.schemes import SCHEMES, Scheme, scheme
from signalprop.schemes.equivalence import Equivalence, equivalent

if TYPE_CHECKING:
    from signalprop.advice import advise
    from signalprop.attachment.anatomy import Anatomy, anatomy
    from signalprop.attachment.parametrization_of import read_parametrization
    from signalprop.diagnosis import diagnose
    from signalprop.kernels.trace import Trace, attention_only, trace
    from signalprop.measurement import Probe, measure
    from signalprop.measurement.simulation import simulate
    from signalprop.models import build
    from signalprop.monitoring import SignalMonitor
    from signalprop.monitoring.coordinates import coordinates
    from signalprop.monitoring.lightning import LightningSignalCallback
    from signalprop.monitoring.trainer import SignalCallback
    from signalprop.repair import apply, fit, fold, initialize, load, parameter_groups, save
    from signalprop.repair.checks import check
    from signalprop.studies import compare, study

__version__ = "1.0.0rc1"

# Everything public here; docs/api.md describes it, with the public modules below this one.
__all__ = [
    "SCHEMES",
    "Agreement",
    "Anatomy",
    "Architecture",
    "Comparison",
    "Equivalence",
    "InputError",
    "InputStatistics",
    "LightningSignalCallback",
    "MissingExtra",
    "Moments",
    "Parametrization",
    "Probe",
    "Profile",
    "Scheme",
    "Series",
    "SignalCallback",
    "SignalMonitor",
    "Trace",
    "advise",
    "anatomy",
    "apply",
    "attention_only",
    "average",
    "build",
    "check",
    "compare",
    "coordinates",
    "diagnose",
    "equivalent",
    "fit",
    "fold",
    "initialize",
    "load",
    "measure",
    "parameter_groups",
    "predict",
    "read_parametrization",
    "save",
    "scheme",
    "simulate",
    "study",
    "trace",
]

_NEEDS_TORCH = {
    "Anatomy": "signalprop.attachment.anatomy",
    "anatomy": "signalprop.attachment.anatomy",
    "build": "signalprop.models",
    "diagnose": "signalprop.diagnosis.run",
    "Probe": "signalprop.measurement",
    "measure": "signalprop.measurement",
    "read_parametrization": "signalprop.attachment.parametrization_of",
    "simulate": "signalprop.measurement.simulation",
    "coordinates": "signalprop.monitoring.coordinates",
    "study": "signalprop.studies",
    "apply": "signalprop.repair",
    "check": "signalprop.repair.checks",
    "fit": "signalprop.repair",
    "fold": "signalprop.repair",
    "initialize": "signalprop.repair",
    "load": "signalprop.repair",
    "parameter_groups": "signalprop.repair",
    "save": "signalprop.repair",
    "LightningSignalCallback": "signalprop.monitoring.lightning",
    "SignalCallback": "signalprop.monitoring.trainer",
    "SignalMonitor": "signalprop.monitoring",
}
_WHEN_USED = dict.fromkeys(("Trace", "attention_only", "trace"), "signalprop.kernels.trace")
_WHEN_USED["compare"] = "signalprop.studies"
_WHEN_USED["advise"] = "signalprop.advice"


if not TYPE_CHECKING:  # a type checker that saw it would take any name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _WHEN_USED:
            return getattr(import_module(_WHEN_USED[name]), name)
        if name not in _NEEDS_TORCH:
            raise AttributeError(f"module 'signalprop' has no attribute {name!r}")
        from signalprop.errors import require

        require("torch", "models")
        return getattr(import_module(_NEEDS_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
