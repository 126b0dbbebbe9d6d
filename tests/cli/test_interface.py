"""The interface as users script against it: options of every command, top-level keys of every JSON result.

A change is a change for users: note it in CHANGELOG.md, then write the new snapshot with
`python -m tests.cli.test_interface`.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import typer.main

from signalprop.cli import all_commands, command_line, run
from signalprop.files.storage import write_json
from signalprop.repair.check_result import Check
from signalprop_lab.verification.verify import VerificationReport

SNAPSHOT = Path(__file__).with_name("interface.json")
TINY = ["--layers", "1", "--set", "d_model=16", "--seq-len", "8"]
RESULTS = {
    "predict": ["predict", "tgs", *TINY],
    "predict, several": ["predict", "tgs", *TINY, "--scheme", "xavier,deepscalelm"],
    "measure": ["measure", "tgs", *TINY, "--set", "vocab_size=50"],
    "compare": ["compare", "tgs", *TINY, "--set", "vocab_size=50", "--seeds", "1"],
    "kernel": ["kernel", "tgs", *TINY],
    "schemes": ["schemes"],
    "schemes NAME --for ARCH": ["schemes", "xavier", "--for", "tgs"],
    "predict --cost": ["predict", "tgs", "--cost"],
}


def interface_options(*, off: bool = False) -> dict[str, str]:
    """The options of every command; `off`: also what switches a flag off."""
    commands = typer.main.get_command(command_line(all_commands())).commands  # type: ignore[attr-defined]
    return {
        name: ", ".join(" ".join([*one.opts, *(one.secondary_opts if off else ())]) for one in command.params)
        for name, command in sorted(commands.items())
    }


def interface() -> dict[str, Any]:
    """Options by command, and keys by result."""
    options = interface_options()
    results = {name: keys(result_of(arguments)) for name, arguments in RESULTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
        model, unfolded, folded = (Path(folder, name) for name in ("model", "unfolded", "folded"))
        model.mkdir()
        write_json(model / "config.json", config | {"architectures": ["GPT2LMHeadModel"]})
        arguments = ["apply", str(model), "--scheme", "xavier", "--out", str(unfolded)]
        results["apply"] = keys(result_of(arguments))
        results["fold"] = keys(result_of(["fold", str(unfolded), "--out", str(folded)]))
        results["fit"] = keys(result_of(["fit", str(folded), "--out", str(Path(folder, "fitted"))]))
        results["diagnose"] = keys(result_of(["diagnose", str(folded), "--tokens", "16"]))
    results["check"] = keys(Check("", {}, "", (), 0.0).to_json())
    results["verify"] = keys(VerificationReport((), "quick", 0).as_json())
    return {"options": options, "results": results}


def keys(result: dict[str, Any]) -> dict[str, str]:
    return {"schema": result["schema"], "keys": ", ".join(sorted(result))}


def result_of(arguments: list[str]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        run([*arguments, "--json", "-"])
    return json.loads(out.getvalue())


def test_the_interface_is_as_it_was() -> None:
    assert interface() == json.loads(SNAPSHOT.read_text())


def test_there_are_at_most_18_commands_and_140_options() -> None:
    """A new option takes the place of another."""
    options = [[one for one in line.split(", ") if one.startswith("--")] for line in interface_options().values()]
    assert len(options) <= 18 and sum(map(len, options)) <= 140


@pytest.mark.parametrize(
    "command",
    [
        ["reproduce", "tgs-fig1"],
        ["measure", "tgs", *TINY, "--set", "vocab_size=50"],
    ],
)
def test_a_device_that_is_not_there_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--device", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(interface(), indent=1) + "\n")
