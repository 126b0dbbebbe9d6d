"""The page: controls with the names that they choose from, for the server and for the file that needs none."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
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


@dataclass(frozen=True)
class Kept:
    """Where a page is kept: what it offers, and the parts of its HTML that differ.

    Attributes:
        kinds, presets, schemes: names that its controls offer. fidelities: texts by name; the first is the start.
        hint: what is said beside them. served: of the footer. credit: of the drawings.
        policy, style, scripts, download: HTML.
    """

    kinds: Iterable[str]
    presets: Iterable[str]
    schemes: Iterable[str]
    fidelities: Mapping[str, str]
    hint: str
    served: str
    policy: str
    style: str
    scripts: str
    download: str = ""
    credit: str = "Charts: plotly.js, Copyright Plotly, Inc., MIT license."


SERVED = Kept(
    kinds=get_args(Kind),
    presets=PRESETS,
    schemes=SCHEMES,
    fidelities={"auto": "auto: what is right for it", "moments": "moments: at once"},
    hint="auto follows every position where positions differ (decoders); where that takes long, averages (moments) are "
    "drawn first",
    served="Served by signalprop on this machine; nothing leaves it.",
    policy="",
    style="\n".join(f'<link rel="stylesheet" href="/assets/{name}.css">' for name in ("page", "explore")),
    scripts="\n".join(
        f'<script src="/assets/{name}.js"></script>'
        for name in ("plotly.min", "format", "charts", "tables", "sections", "explore")
    ),
    download='<button type="button" class="action" id="download">Download report</button>',
)


def asset(name: str) -> str:
    """A script, style or page of the explorer."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def explorer_page(kept: Kept) -> str:
    """The HTML of the page."""
    presets, fidelity = list(kept.presets), next(iter(kept.fidelities))
    start = Settings(fidelity=fidelity)  # type: ignore[arg-type]
    options = {
        name: {item.name: item.default for item in fields(SCHEMES[name]) if item.name in ("k", "alpha")}
        for name in kept.schemes
    }
    return Template(asset("explore.html")).substitute(
        vars(kept),
        kinds=_choices({name: name for name in kept.kinds}),
        schemes=_choices({name: f"{name}: {SCHEMES[name].summary}" for name in sorted(options)}),
        activations=_choices({name: name for name in sorted({item.name for item in ACTIVATIONS.values()})}),
        presets=_choices({name: name for name in presets}),
        fidelities=_choices(kept.fidelities),
        fidelity_hint=html.escape(kept.hint),
        starts="\n".join(
            f'<li><a href="{html.escape(where)}">{html.escape(text)}</a></li>'
            for text, where in starts(fidelity).items()
        ),
        data=embedded(
            {
                "start": start.model_dump(),
                "options": options,
                "presets": {name: of_preset(name) for name in presets},
                "most": MOST,
            }
        ),
    )


def _choices(texts: Mapping[str, str]) -> str:
    return "\n".join(
        f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in texts.items()
    )
