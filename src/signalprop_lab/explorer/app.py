"""The explorer: a Dash page on this machine whose controls redraw the predicted signal. Its address is its state."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

from dash import ALL, Dash, Input, Output, ctx, dcc, html, no_update
from flask import abort, request
from pydantic import ConfigDict, Field
from werkzeug.serving import make_server

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.files.validation import Value
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.architecture_fields import Kind
from signalprop.network.parametrization import Parametrization
from signalprop.network.presets import PRESETS
from signalprop.prediction import predict
from signalprop.report import findings
from signalprop.report.plotly_figures import CONFIG, chart_figure
from signalprop.report.sections import COLOURS
from signalprop.report.shown_profiles import Shown
from signalprop.report.signal import charts, glance_table
from signalprop.results.profile import Profile
from signalprop.schemes import SCHEMES, scheme
from signalprop.schemes.base import default_scheme

CHOICES: dict[str, Sequence[str]] = {
    "preset": list(PRESETS), "kind": get_args(Kind), "norm_placement": get_args(Placement),
    "activation": sorted({item.name for item in ACTIVATIONS.values()}), "scheme": sorted(SCHEMES),
    "fidelity": ("auto", "moments"),
}  # fmt: skip
_NETWORK = ("kind", "norm_placement", "n_layers", "d_model", "n_heads", "activation", "seq_len", "dropout")
_OPTIONS = ("k", "alpha")
CONTROLS = ("preset", *_NETWORK, "scheme", *_OPTIONS, "qk_scale", "fidelity")
_STYLE = """
.bench { display: grid; gap: 1.5rem; grid-template-columns: 17rem minmax(0, 1fr); align-items: start; }
.bench > * { padding-top: 1rem; min-width: 0; }
.controls label { display: block; margin-bottom: .6rem; font-size: .9rem; color: var(--soft); }
.controls input { width: 100%; padding: .4rem; color: var(--ink); background: var(--paper); }
.problem { color: var(--fault); min-height: 1.5rem; } .copy { float: right; } .pins button { margin: 0 .8rem 0 .2rem; }
@media (max-width: 760px) { .bench { grid-template-columns: minmax(0, 1fr); } }
"""


class Settings(Value):
    """What the controls say: a network (what has no control is the preset's), a scheme with its options (None: its
    default), a factor on the standard deviation of query and key weights, a fidelity."""

    model_config = ConfigDict(strict=False)  # texts of fields that are numbers
    preset: str = "tgs"
    kind: Kind = "encoder"
    n_layers: int = Field(default=48, ge=1, le=2000)
    d_model: int = Field(default=256, ge=1, le=65_536)
    n_heads: int = Field(default=4, ge=1, le=65_536)
    norm_placement: Placement = "post"
    activation: str = "relu"
    seq_len: int = Field(default=512, ge=1, le=65_536)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    scheme: str = "xavier"
    k: float | None = Field(default=None, ge=-1e6, le=1e6)
    alpha: float | None = Field(default=None, ge=-1e6, le=1e6)
    qk_scale: float = Field(default=1.0, ge=1e-3, le=1e3)
    fidelity: Literal["auto", "moments"] = "auto"

    def given(self, *names: str) -> dict[str, Any]:
        """What these hold, where they hold something."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def table(self) -> Parametrization:
        """Every number of the network."""
        a = Architecture.preset(self.preset, **self.given(*_NETWORK))
        p = scheme(self.scheme, **self.given(*_OPTIONS))(a, default_statistics(a))
        scaled = {f"weight__{role}": self.qk_scale * p.weights[role] for role in ("query", "key")}
        return p if self.qk_scale == 1 else p.with_columns(**scaled)

    def python(self) -> str:
        """A script that predicts the same numbers."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.given(*_NETWORK).items())
        options = "".join(f", {name}={value!r}" for name, value in self.given(*_OPTIONS).items())
        scaled = f'{{f"weight__{{role}}": {self.qk_scale!r} * table.weights[role] for role in ("query", "key")}}'
        return "\n".join([
            "import signalprop as sp", "",
            f"architecture = sp.Architecture.preset({self.preset!r}, {given})",
            f"table = sp.scheme({self.scheme!r}{options})(architecture)",
            f"table = table.with_columns(**{scaled})" * (self.qk_scale != 1),
            f"profile = sp.predict(table, fidelity={self.fidelity!r})",
            "print(profile.summary())", "",
        ])  # fmt: skip

    def command(self) -> str:
        """A command line that predicts the same numbers."""
        words = [
            "signalprop",
            "predict",
            self.preset,
            *(f"--set={name}={x}" for name, x in self.given(*_NETWORK).items()),
        ]
        options = "".join(f":{name}={x!r}" for name, x in self.given(*_OPTIONS).items())
        words.append(f"--scheme={self.scheme}{options}")
        words += [] if self.qk_scale == 1 else [f"--qk-scale={self.qk_scale!r}"]
        return shlex.join([*words, f"--fidelity={self.fidelity}"])


def of_preset(name: str) -> dict[str, Any]:
    """Where the controls stand for a preset: its network and initialisation."""
    a = Architecture.preset(name)
    return {field: getattr(a, field) for field in _NETWORK} | {"preset": name, "scheme": default_scheme(a)}


def address(current: Settings, pinned: Sequence[Settings] = ()) -> str:
    """The end of the page's address that says this state."""
    words, *pins = (urlencode({k: v for k, v in item if v is not None}) for item in (current, *pinned))
    return "?" + "&".join([words, *(urlencode({"pin": pin}) for pin in pins)])


def of_address(search: str) -> tuple[Settings, list[Settings]]:
    """The settings that an address says, and the pinned ones; what is not said is as at the start."""
    words = parse_qsl(search.lstrip("?"))
    pins = dict.fromkeys(pin for name, pin in words if name == "pin")
    return _settings(dict(words)), [_settings(dict(parse_qsl(pin))) for pin in pins]


def _settings(said: dict[str, Any]) -> Settings:
    """Settings of what fields hold; an empty one is None."""
    read: dict[str, Any] = {name: None if said[name] == "" else said[name] for name in CONTROLS if name in said}
    return Settings(**read)


@lru_cache(maxsize=64)
def predicted(settings: Settings) -> Profile:
    """The prediction for settings; kept, so that pinned curves cost nothing."""
    table = settings.table()
    return predict(table, default_statistics(table.architecture), fidelity=settings.fidelity)


def drawn(several: Sequence[Settings]) -> list[Shown]:
    """The profiles of settings, with a colour and a name each: the scheme, and all in which they differ."""
    if len(several) > len(COLOURS):
        raise InputError(f"{len(several)} curves at once are too many to distinguish; unpin some, {len(COLOURS)} fit")
    found = [predicted(item) for item in several]
    return [Shown(one, name, f"predicted ({one.fidelity})", colour=k)
            for k, (one, name) in enumerate(zip(found, _names(several), strict=True))]  # fmt: skip


def _names(several: Sequence[Settings]) -> list[str]:
    telling = [name for name in CONTROLS if len({getattr(s, name) for s in several}) > 1 and name != "scheme"]
    return [", ".join([s.scheme, *(f"{name} {getattr(s, name)}" for name in telling)]) for s in several]


def application() -> Dash:
    """The page, with the report's style."""
    app = Dash(__name__, title="signalprop explorer", assets_folder="none", update_title="")
    style = resources.files("signalprop.report").joinpath("page.css").read_text(encoding="utf-8") + _STYLE
    app.index_string = app.index_string.replace("{%css%}", "{%css%}<style>" + style + "</style>")
    app.layout = _layout()

    @app.server.before_request  # type: ignore[untyped-decorator]
    def _from_this_machine() -> None:
        """No page elsewhere reaches the explorer under another name (DNS rebinding)."""
        if request.host.partition(":")[0] not in ("127.0.0.1", "localhost"):
            abort(403)

    texts = ("problem", "says", "pins", "charts", "numbers", "python", "command")
    outputs = [Output("url", "search"), *(Output(name, "children") for name in texts)]
    outputs += [Output(name, "value") for name in CONTROLS]
    inputs = [Input("url", "search"), Input("pin", "n_clicks"), Input({"unpin": ALL}, "n_clicks")]
    inputs += [Input(name, "value") for name in CONTROLS]

    @app.callback(outputs, inputs)  # type: ignore[untyped-decorator]
    def _changed(search: str | None, _: Any, __: Any, *values: Any) -> list[Any]:
        try:
            return _answered(ctx.triggered_id, search or "", dict(zip(CONTROLS, values, strict=True)))
        except InputError as error:
            return [no_update, str(error)] + [no_update] * (len(outputs) - 2)

    return app


def _answered(changed: Any, search: str, values: dict[str, Any]) -> list[Any]:
    """What the page shows after a change of the address, of a control or of the pins."""
    settings, pinned = of_address(search)
    if isinstance(changed, str) and changed in CONTROLS:
        values |= of_preset(values["preset"]) if changed == "preset" else {}
        settings = _settings(values | ({"k": None, "alpha": None} if changed in ("preset", "scheme") else {}))
    elif changed == "pin" and settings not in pinned:
        pinned.append(settings)
    elif isinstance(changed, dict) and ctx.triggered[0]["value"]:
        pinned.pop(changed["unpin"])
    found = drawn([settings, *(item for item in pinned if item != settings)])
    profile = predicted(settings)
    said = [f"warning: {line}" for line in findings.warnings(profile)] or ["no warning"]
    graphs = [html.Figure([html.H3(chart.title), html.P(chart.y), dcc.Graph(figure=chart_figure(chart), config=CONFIG),
                           html.P(chart.caption)], className="block") for chart in charts(found)]  # fmt: skip
    pins = [html.Span([name, html.Button("✕", id={"unpin": k}, title=f"Unpin {name}")])
            for k, name in enumerate(_names(pinned))]  # fmt: skip
    glance = glance_table(found)
    rows = [html.Tr([html.Td(str(cell)) for cell in row]) for row in glance.rows]
    numbers = [html.Thead(html.Tr([html.Th(name, scope="col") for name in glance.header])), html.Tbody(rows)]
    lines = [html.Li(line) for line in (*said, *(f"note: {note}" for note in profile.notes))]
    shown = [lines, pins, graphs, html.Table(numbers), settings.python(), settings.command()]
    return [address(settings, pinned), "", *shown, *(getattr(settings, name) for name in CONTROLS)]


def _layout() -> html.Div:
    def control(name: str) -> html.Label:
        field: Any = dcc.Input(id=name, type="text", inputMode="decimal", debounce=0.4, autoComplete="off")
        if name in CHOICES:
            field = dcc.Dropdown(list(CHOICES[name]), id=name, clearable=False)
        return html.Label([name.replace("_", " "), field])

    def code(name: str, title: str) -> html.Div:
        copy = dcc.Clipboard(target_id=name, title=f"Copy as {title}", className="copy")
        return html.Div([copy, html.H3(f"As {title}"), html.Pre(id=name, tabIndex="0")], className="block")

    about = "The predicted signal of a freshly initialised transformer, redrawn at every change."
    return html.Div([
        dcc.Location(id="url", refresh="callback-nav"),
        html.Header(html.Div([html.H1("Explorer"), html.P(about, className="subtitle")], className="wide")),
        html.Div([html.Div([control(name) for name in CONTROLS], className="controls"), html.Main([
            html.P(id="problem", className="problem", role="alert"),
            html.Div([html.Button("Pin this curve", id="pin"), html.Span(id="pins", className="pins")]),
            html.Ul(id="says"), html.Div(id="charts", className="blocks"), html.Div(id="numbers", className="block"),
            code("python", "Python"), code("command", "command"),
        ])], className="wide bench"),
    ])  # fmt: skip


def serve(port: int, *, say: Callable[[str], object]) -> None:
    """Serve the page to this machine until Ctrl-C, at a port (0: a free one). InputError: it is taken."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        server = make_server("127.0.0.1", port, application().server, threaded=True)
    except (OSError, SystemExit):
        raise InputError(f"port {port} is taken; give another one, or 0 for a free one") from None
    where = f"http://127.0.0.1:{server.server_port}/"
    say(where)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()
