"""The explorer: a Dash page on this machine whose controls redraw the predicted signal at every change.

The address of the page is its state: controls, and the settings that are pinned. One callback reads what changed,
predicts, and writes controls, address and drawings.
"""

from __future__ import annotations

import logging
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib import resources
from typing import Any, get_args
from urllib.parse import parse_qsl

from dash import ALL, Dash, Input, Output, ctx, dcc, html, no_update
from flask import abort, request
from werkzeug.serving import make_server

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Kind, Placement
from signalprop.network.layout import PLACEMENTS
from signalprop.network.presets import PRESETS
from signalprop.prediction import predict
from signalprop.report import findings
from signalprop.report.plotly_figures import CONFIG, chart_figure
from signalprop.report.sections import COLOURS, Table
from signalprop.report.shown_profiles import Shown
from signalprop.report.signal import charts, glance_table
from signalprop.results.profile import Profile
from signalprop.schemes import SCHEMES
from signalprop_lab.explorer.settings import Settings, address, labels, of_preset, starts

_CHOICES: dict[str, Sequence[str]] = {
    "preset": list(PRESETS), "kind": get_args(Kind), "norm_placement": get_args(Placement),
    "activation": sorted({item.name for item in ACTIVATIONS.values()}), "scheme": sorted(SCHEMES),
    "fidelity": ("auto", "moments"),
}  # fmt: skip
_NAMES = {
    "preset": "preset", "kind": "kind", "norm_placement": "norm placement", "n_layers": "layers", "d_model": "width",
    "n_heads": "heads", "activation": "activation", "seq_len": "tokens", "dropout": "dropout", "scheme": "scheme",
    "k": "k", "alpha": "alpha", "qk_scale": "Q/K scale", "fidelity": "fidelity",
}  # fmt: skip
_WHOLE = ("n_layers", "d_model", "n_heads", "seq_len")
_HOSTS = ("127.0.0.1", "localhost")
_STYLE = """
.bench { display: grid; gap: 1.5rem; grid-template-columns: 17rem minmax(0, 1fr); align-items: start; }
.bench > * { padding-top: 1rem; min-width: 0; } .bench .full { margin-top: 1rem; }
.controls label { display: block; margin-bottom: .6rem; font-size: .9rem; color: var(--soft); }
.controls input { width: 100%; padding: .4rem; color: var(--ink); background: var(--paper); }
.problem { color: var(--fault); font-weight: 600; min-height: 1.5rem; }
.starts a { margin-right: 1rem; } .pins button { margin: 0 .8rem 0 .2rem; }
.copy { float: right; cursor: pointer; }
@media (max-width: 760px) { .bench { grid-template-columns: minmax(0, 1fr); } }
"""


@lru_cache(maxsize=64)
def predicted(settings: Settings) -> tuple[Profile, tuple[str, ...]]:
    """The prediction for settings, and what to know about it; kept, so that pinned curves cost nothing."""
    table = settings.table()
    profile = predict(table, default_statistics(table.architecture), fidelity=settings.fidelity)
    places = sorted({PLACEMENTS[k] for k in table.placement})
    if places == [settings.norm_placement]:
        return profile, tuple(profile.notes)
    moved = f"{settings.scheme} decides where the norms stand: {' and '.join(places)} (not {settings.norm_placement})"
    return profile, (moved, *profile.notes)


def drawn(several: Sequence[Settings]) -> list[Shown]:
    """The profiles of settings, with a colour and a name each."""
    if len(several) > len(COLOURS):
        raise InputError(f"{len(several)} curves at once are too many to distinguish; unpin some, {len(COLOURS)} fit")
    found = [predicted(item)[0] for item in several]
    return [
        Shown(profile, name, f"predicted ({profile.fidelity})", colour=k)
        for k, (profile, name) in enumerate(zip(found, labels(list(several)), strict=True))
    ]


def of_address(search: str) -> tuple[Settings, list[Settings]]:
    """The settings that an address says, and the pinned ones; what is not said is as at the start."""
    pins = list(dict.fromkeys(words for name, words in parse_qsl(search.lstrip("?")) if name == "pin"))
    return _of_words(search.lstrip("?")), [_of_words(words) for words in pins]


def _of_words(words: str) -> Settings:
    said = {name: text for name, text in parse_qsl(words) if name in _NAMES}
    values: dict[str, Any] = {name: t if name in _CHOICES else _number(name, t) for name, t in said.items()}
    return Settings(**values)


def _number(name: str, value: Any) -> float | int | None:
    """What a field holds; a whole number where that is meant. An empty one is None."""
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"{_NAMES[name]} is {value!r:.40}; expected a number") from None
    return int(number) if name in _WHOLE and number.is_integer() else number


def _own(scheme: str) -> dict[str, Any]:
    """Options k and alpha of a scheme, with their defaults."""
    return {item.name: item.default for item in fields(SCHEMES[scheme]) if item.name in ("k", "alpha")}


# --- the page ----------------------------------------------------------------------------------------------------


def application() -> Dash:
    """The page, with the report's style."""
    app = Dash(__name__, title="signalprop explorer", assets_folder="none", update_title="")
    style = resources.files("signalprop.report").joinpath("page.css").read_text(encoding="utf-8") + _STYLE
    app.index_string = app.index_string.replace("{%css%}", "{%css%}<style>" + style + "</style>")
    app.layout = _layout()

    @app.server.before_request  # type: ignore[untyped-decorator]
    def _from_this_machine() -> None:
        """No page elsewhere reaches the explorer under another name (DNS rebinding)."""
        if request.host.partition(":")[0] not in _HOSTS:
            abort(403)

    names = list(_NAMES)
    outputs = [
        *(Output(name, "value") for name in names), Output("k", "disabled"), Output("alpha", "disabled"),
        Output("url", "search"), Output("problem", "children"), Output("says", "children"), Output("pins", "children"),
        Output("charts", "children"), Output("numbers", "children"), Output("python", "children"),
        Output("command", "children"),
    ]  # fmt: skip
    inputs = [
        Input("url", "search"), Input("pin", "n_clicks"), Input({"unpin": ALL}, "n_clicks"),
        *(Input(name, "value") for name in names),
    ]  # fmt: skip

    @app.callback(outputs, inputs)  # type: ignore[untyped-decorator]
    def _changed(search: str | None, _: Any, __: Any, *values: Any) -> list[Any]:
        try:
            return _answered(ctx.triggered_id, search or "", dict(zip(names, values, strict=True)))
        except InputError as error:
            return [no_update] * (len(names) + 3) + [str(error)] + [no_update] * 6

    return app


def _answered(changed: Any, search: str, values: dict[str, Any]) -> list[Any]:
    """What the page shows after a change of the address, of a control or of the pins."""
    settings, pinned = of_address(search)
    if isinstance(changed, str) and changed in _NAMES:
        if changed == "preset":
            values |= {**of_preset(values["preset"]), "k": None, "alpha": None}
        if changed == "scheme":
            values |= {"k": None, "alpha": None}
        values = {name: value if name in _CHOICES else _number(name, value) for name, value in values.items()}
        settings = Settings(**values)
    elif changed == "pin" and settings not in pinned:
        pinned.append(settings)
    elif isinstance(changed, dict) and ctx.triggered[0]["value"]:
        pinned.pop(changed["unpin"])
    several = [settings, *(item for item in pinned if item != settings)]
    found = drawn(several)
    profile, notes = predicted(settings)
    warned = findings.warnings(profile)
    said = [("warning", line) for line in warned] or [("good", "nothing stands out")]
    graphs = [
        html.Figure([html.H3(chart.title), html.P(chart.y, className="unit"),
                     html.Div(dcc.Graph(figure=chart_figure(chart), config=CONFIG), className="plot"),
                     html.P(chart.caption, className="caption")], className="block")
        for chart in charts(found)
    ]  # fmt: skip
    pins = [
        html.Span([name, html.Button("✕", id={"unpin": k}, title=f"Unpin {name}")])
        for k, name in enumerate(labels(pinned) if pinned else [])
    ]
    own = _own(settings.scheme)
    return [
        *(getattr(settings, name) for name in _NAMES), "k" not in own, "alpha" not in own,
        address(settings, pinned), "",
        [html.Li(f"{kind}: {line}") for kind, line in (*said, *(("note", note) for note in notes))], pins, graphs,
        _table(glance_table(found)), settings.python(), settings.command(),
    ]  # fmt: skip


def _layout() -> html.Div:
    def control(name: str) -> html.Label:
        if name in _CHOICES:
            field: Any = dcc.Dropdown(list(_CHOICES[name]), id=name, clearable=False)
        else:
            field = dcc.Input(id=name, type="text", inputMode="decimal", debounce=0.4, autoComplete="off")
        return html.Label([_NAMES[name], field])

    def code(name: str, title: str) -> html.Div:
        copy = dcc.Clipboard(target_id=name, title=f"Copy as {title}", className="copy")
        return html.Div([copy, html.H3(f"As {title}"), html.Pre(id=name, tabIndex="0")], className="block full")

    links = [html.A(text, href=where) for text, where in starts().items()]
    return html.Div([
        dcc.Location(id="url", refresh="callback-nav"),
        html.Header(html.Div([
            html.H1("Explorer"),
            html.P("The predicted signal of a freshly initialised transformer, redrawn at every change.",
                   className="subtitle"),
        ], className="wide")),
        html.Div([
            html.Div([control(name) for name in _NAMES], className="controls"),
            html.Main([
                html.P(id="problem", className="problem", role="alert"),
                html.P(links, className="starts"),
                html.Div([html.Button("Pin this curve", id="pin"), html.Span(id="pins", className="pins")]),
                html.Ul(id="says"),
                html.Div(id="charts", className="blocks"),
                html.Div(id="numbers", className="block full"),
                code("python", "Python"),
                code("command", "command"),
            ]),
        ], className="wide bench"),
    ])  # fmt: skip


def _table(table: Table) -> html.Table:
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in table.header]))
    return html.Table([head, html.Tbody([html.Tr([html.Td(str(cell)) for cell in row]) for row in table.rows])])


def serve(port: int, *, browser: bool, say: Callable[[str], object]) -> None:
    """Serve the page to this machine until Ctrl-C.

    Args:
        port: 0 takes a free one. browser: whether it is opened. say: is told the address.

    Raises:
        InputError: the port is taken.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        server = make_server("127.0.0.1", port, application().server, threaded=True)
    except (OSError, SystemExit):
        raise InputError(f"port {port} is taken; give another one, or 0 for a free one") from None
    where = f"http://127.0.0.1:{server.server_port}/"
    say(where)
    if browser:
        webbrowser.open(where)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
