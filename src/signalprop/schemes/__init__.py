"""Published initialisation and scaling methods: one class each, found by name in one registry."""

from signalprop.schemes import deepscalelm as deepscalelm
from signalprop.schemes import mup as mup
from signalprop.schemes import norms as norms
from signalprop.schemes import residual as residual
from signalprop.schemes import scaled as scaled
from signalprop.schemes import shaped as shaped
from signalprop.schemes import vanilla as vanilla
from signalprop.schemes.base import SCHEMES as SCHEMES
from signalprop.schemes.base import Scheme as Scheme
from signalprop.schemes.base import register as register
from signalprop.schemes.base import scheme as scheme
