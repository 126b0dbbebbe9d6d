"""What the controls say: a network, a scheme, a fidelity; and the same as Python and as a command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlencode

from pydantic import Field

from signalprop.data.batches import default_statistics
from signalprop.files.validation import Value
from signalprop.network.architecture import Architecture, Kind, Placement
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import scheme
from signalprop.schemes.base import default_scheme

_NETWORK = ("kind", "n_layers", "d_model", "n_heads", "norm_placement", "activation", "seq_len", "dropout")
_OPTIONS = ("k", "alpha")
_FLAGS = {
    "n_layers": "--layers",
    "norm_placement": "--norm",
    "seq_len": "--seq-len",
}
# The last lines of `Settings.python`.
PRINTS = (
    'print("variance at the top", profile.forward["stream_out"].variance[-1])',
    'print("token correlation at the top", profile.forward["stream_out"].token_correlation[-1])',
    'print("gradient variance, first over last", profile.gradient["stream_in"].variance[0])',
    'print("sensitivity", profile.sensitivity()["mean"])',
)


class Settings(Value):
    """The state of all controls.

    Attributes:
        preset: what has no control is as in this one (`signalprop.network.presets`).
        kind, n_layers, d_model, n_heads, norm_placement, activation, seq_len, dropout: as in `Architecture`.
        scheme: its name. k, alpha: its options of these names; None: the scheme's own default (or it has none).
        qk_scale: factor on the standard deviation of query and key weights.
        fidelity: `auto`, which takes token kernels where moments are wrong, or `moments`, which takes milliseconds.
    """

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

    def options(self) -> dict[str, float]:
        """Options of the scheme that are not left to its defaults."""
        return {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}

    def architecture(self) -> Architecture:
        """The network."""
        return Architecture.preset(self.preset, **self._network())

    def table(self) -> Parametrization:
        """Every number of the network."""
        a = self.architecture()
        p = scheme(self.scheme, **self.options())(a, default_statistics(a))
        if self.qk_scale == 1:
            return p
        return p.with_columns(**{f"weight__{role}": self.qk_scale * p.weights[role] for role in ("query", "key")})

    def python(self) -> str:
        """A script that predicts the same numbers."""
        fields = ", ".join(f"{name}={value!r}" for name, value in self._network().items())
        options = "".join(f", {name}={value!r}" for name, value in self.options().items())
        lines = [
            "import signalprop as sp",
            "",
            f"architecture = sp.Architecture.preset({self.preset!r}, {fields})",
            f"table = sp.scheme({self.scheme!r}{options})(architecture)",
        ]
        if self.qk_scale != 1:
            lines += [
                'roles = ("query", "key")',
                f'scaled = {{f"weight__{{role}}": {self.qk_scale!r} * table.weights[role] for role in roles}}',
                "table = table.with_columns(**scaled)",
            ]
        lines += [
            f"profile = sp.predict(table, fidelity={self.fidelity!r})",
            *PRINTS,
        ]
        return "\n".join(lines) + "\n"

    def command(self) -> str:
        """A command line that predicts the same numbers."""
        words = ["signalprop", "predict", self.preset]
        for name, value in self._network().items():
            words += [_FLAGS[name], str(value)] if name in _FLAGS else ["--set", f"{name}={value}"]
        words += ["--scheme", self.scheme]
        for name, option in self.options().items():
            words += ["--option", f"{name}={option!r}"]
        if self.qk_scale != 1:
            words += ["--qk-scale", repr(self.qk_scale)]
        return shlex.join([*words, "--fidelity", self.fidelity])

    def _network(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NETWORK}


def of_preset(name: str) -> dict[str, Any]:
    """Where the controls of the network stand for a preset, and its own initialisation."""
    a = Architecture.preset(name)
    return {field: getattr(a, field) for field in _NETWORK} | {"scheme": default_scheme(a)}


def starts(fidelity: str = "auto") -> dict[str, str]:
    """Where it is good to start: the address of the page's state, by what is to be seen there."""
    plain = Settings(fidelity=fidelity)  # type: ignore[arg-type]
    deep, wide = plain.model_copy(update={"n_layers": 192}), plain.model_copy(update={"norm_placement": "pre"})
    models = {name: plain.model_copy(update={"preset": name, **of_preset(name)}) for name in ("gpt2", "llama-7b")}
    return {
        "192 post-norm layers: Xavier, DeepScaleLM": address(deep.model_copy(update={"scheme": "deepscalelm"}), [deep]),
        "pre- or post-norm": address(wide, [plain]),
        "GPT-2 as it starts": address(models["gpt2"]),
        "Llama 7B as it starts": address(models["llama-7b"]),
        "too large queries and keys": address(wide.model_copy(update={"qk_scale": 3.0}), [wide]),
        "no norms": address(plain.model_copy(update={"n_layers": 24, "norm_placement": "none"})),
    }


def address(current: Settings, pinned: Sequence[Settings] = ()) -> str:
    """The end of the page's address that says this state."""

    def words(settings: Settings) -> list[tuple[str, Any]]:
        return [(name, _short(v) if isinstance(v, float) else v) for name, v in settings if v is not None]

    return "?" + urlencode([*words(current), *(("pin", urlencode(words(item))) for item in pinned)])


def _short(value: float) -> str:
    """A number without digits that say nothing."""
    return text if float(text := f"{value:g}") == value else repr(value)


def labels(several: list[Settings]) -> list[str]:
    """A name for each: its scheme, and all in which they differ; of different presets, what is not as in its own."""
    words = [_words(item) for item in several]
    telling = [name for name in words[0] if len({item[name] for item in words}) > 1 and name != "scheme"]
    own = [_words(item.model_copy(update=of_preset(item.preset))) if "preset" in telling else {} for item in several]
    return [
        ", ".join([item["scheme"], *(item[name] for name in telling if item[name] and _is_told(name, item, given))])
        for item, given in zip(words, own, strict=True)
    ]


def _is_told(name: str, words: dict[str, str], given: dict[str, str]) -> bool:
    """Whether a detail is not what the preset gives; `given` is empty where all have one preset."""
    return name not in _NETWORK or words[name] != given.get(name)


def _words(s: Settings) -> dict[str, str]:
    return {
        "scheme": s.scheme,
        "preset": s.preset,
        "k": "" if s.k is None else f"k {s.k:g}",
        "alpha": "" if s.alpha is None else f"alpha {s.alpha:g}",
        "qk_scale": f"Q/K × {s.qk_scale:g}",
        "kind": s.kind,
        "n_layers": f"{s.n_layers} layers",
        "d_model": f"width {s.d_model}",
        "n_heads": f"{s.n_heads} heads",
        "norm_placement": "no norm" if s.norm_placement == "none" else f"{s.norm_placement}-norm",
        "activation": s.activation,
        "seq_len": f"{s.seq_len} tokens",
        "dropout": f"dropout {s.dropout:g}",
        "fidelity": s.fidelity,
    }
