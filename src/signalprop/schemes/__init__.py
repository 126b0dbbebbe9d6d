"""Published initialisation and scaling methods: one class each, found by name in one registry.

Every module of this folder is imported here, so that a new one has its schemes registered by being there.
"""

from importlib import import_module
from pkgutil import iter_modules

from signalprop.schemes.base import SCHEMES, Scheme, register, scheme

__all__ = ["SCHEMES", "Scheme", "register", "scheme"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
