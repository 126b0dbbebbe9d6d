"""Settings of the explorer: what the page copies is true, and what it shows is what the library predicts."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly")
pytest.importorskip("dash")

from signalprop.cli import run
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.presets import PRESETS
from signalprop.results.profile import Profile
from signalprop.schemes.base import parametrized
from signalprop_lab.explorer.app import Settings, address, drawn, of_address, of_preset, predicted

EXAMPLES = [
    Settings(n_layers=5),
    Settings(n_layers=6, scheme="deepscalelm", k=1.7, alpha=0.9, norm_placement="pre", qk_scale=2.5, dropout=0.0),
    Settings(kind="decoder", n_layers=3, d_model=96, n_heads=3, activation="silu", seq_len=20, fidelity="auto"),
    Settings(n_layers=2, scheme="ds-init", alpha=0.1 + 0.2, norm_placement="none", activation="tanh", dropout=1 / 3),
    Settings(n_layers=3, scheme="e-spa", seq_len=16, fidelity="auto"),
    Settings(
        **{
            **of_preset("llama-130m"),
            "n_layers": 3,
            "d_model": 384,
            "n_heads": 6,
            "seq_len": 24,
        }
    ),
    Settings(**{**of_preset("t5-small"), "n_layers": 4, "seq_len": 40, "scheme": "deepscalelm"}),
]


def numbers(p: Profile) -> Any:
    """All that a profile says, less how it was asked for."""
    return p.to_json()


def by_command(line: str) -> Profile:
    """The profile that a command line of ours writes."""
    words = shlex.split(line)
    assert words[0] == "signalprop"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run([*words[1:], "--json", "-"]) == 0
    return Profile.from_json(json.loads(out.getvalue()))


@settings(max_examples=10)
@given(
    n_layers=st.integers(1, 8),
    heads=st.sampled_from([1, 2, 4]),
    norm=st.sampled_from(["pre", "post", "sandwich", "none", "res-post"]),
    dropout=st.floats(0, 0.9),
    k=st.none() | st.floats(0.01, 1.9),
    qk_scale=st.floats(0.1, 10),
)
def test_python_and_command_agree_for_any_settings(
    n_layers: int, heads: int, norm: Any, dropout: float, k: float | None, qk_scale: float
) -> None:
    s = Settings(
        n_layers=n_layers, d_model=64, n_heads=heads, norm_placement=norm, dropout=dropout, scheme="deepscalelm", k=k,
        qk_scale=qk_scale, seq_len=16,
    )  # fmt: skip
    try:
        mine = predicted(s)
    except InputError:  # a k that is too large for so few layers: the copies say so too
        with contextlib.redirect_stderr(io.StringIO()):
            assert run([*shlex.split(s.command())[1:], "--json", "-"]) == 2
        return
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(s.python(), scope)
    assert numbers(scope["profile"]) == numbers(by_command(s.command())) == numbers(mine)


@pytest.mark.parametrize("s", EXAMPLES)
def test_an_address_is_the_settings(s: Settings) -> None:
    assert of_address(address(s, [Settings(), s])) == (s, [Settings(), s])


def test_curves_have_names_and_colours_of_their_own() -> None:
    found = drawn(EXAMPLES[:2])
    assert len({item.group for item in found}) == len({item.colour for item in found}) == 2
    with pytest.raises(InputError, match="8 curves at once"):
        drawn([Settings(n_layers=1, seq_len=4 + k) for k in range(8)])


@pytest.mark.parametrize("words", ["?n_layers=many", "?k=x", "?kind=both", "?n_layers=2.5", "?dropout=nan"])
def test_a_bad_address_is_a_line(words: str) -> None:
    with pytest.raises(InputError) as refused:
        of_address(words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_the_network_of_that_name(name: str) -> None:
    """And opens with its own initialisation."""
    s = Settings(**of_preset(name))
    assert s.table().architecture == Architecture.preset(name)
    assert s.table().scheme == parametrized(name).scheme and s.fidelity == "auto"


class TestReading:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"n_layers": 0}, "n_layers"),
            ({"n_layers": 12.5}, "n_layers"),
            ({"n_layers": None}, "n_layers"),
            ({"n_layers": "many"}, "n_layers"),
            ({"n_layers": 10**400}, "n_layers"),
            ({"dropout": 1}, "dropout"),
            ({"dropout": 10**400}, "dropout"),
            ({"dropout": float("nan")}, "dropout"),
            ({"kind": "both"}, "kind"),
            ({"norm_placement": ["pre"]}, "norm_placement"),
            ({"fidelity": "simulate"}, "fidelity"),
            ({"colour": "red"}, "colour"),
        ],
    )
    def test_a_bad_field_is_named_in_one_line(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(InputError, match=words) as refused:
            Settings(**change)
        assert "\n" not in str(refused.value)
