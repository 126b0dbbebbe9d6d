"""The page: controls with the names that they choose from."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from string import Template
from typing import get_args

from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Kind
from signalprop.network.presets import PRESETS
from signalprop.report.html.page import embedded
from signalprop.schemes import SCHEMES
from signalprop_lab.explorer.curves import MOST
from signalprop_lab.explorer.settings import Settings, of_preset, starts

_FIDELITIES = {"auto": "auto: what is right for it", "moments": "moments: at once"}


def asset(name: str) -> str:
    """A script, style or page of the explorer."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def explorer_page() -> str:
    """The HTML of the page."""
    options = {
        name: {item.name: item.default for item in fields(made) if item.name in ("k", "alpha")}
        for name, made in SCHEMES.items()
    }
    return Template(asset("explore.html")).substitute(
        kinds=_choices({name: name for name in get_args(Kind)}),
        schemes=_choices({name: f"{name}: {SCHEMES[name].summary}" for name in sorted(options)}),
        activations=_choices({name: name for name in sorted({item.name for item in ACTIVATIONS.values()})}),
        presets=_choices({name: name for name in PRESETS}),
        fidelities=_choices(_FIDELITIES),
        starts="\n".join(
            f'<li><a href="{html.escape(where)}">{html.escape(text)}</a></li>' for text, where in starts().items()
        ),
        data=embedded(
            {
                "start": Settings().model_dump(),
                "options": options,
                "presets": {name: of_preset(name) for name in PRESETS},
                "most": MOST,
            }
        ),
    )


def _choices(texts: Mapping[str, str]) -> str:
    return "\n".join(
        f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in texts.items()
    )
