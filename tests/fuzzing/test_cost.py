"""What a prediction takes is known before the work: announced where it is long, refused where it does not fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import signalprop as sp
from damage import check_command, commanded
from signalprop.data.batches import default_statistics
from signalprop.network.presets import PRESETS
from signalprop.prediction import expected_cost

LIMITED = (
    "import resource, sys; from signalprop.cli import run\n"
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    "sys.exit(run(sys.argv[1:]))"
)


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that may take 4 GB."""
    command = [sys.executable, "-c", LIMITED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_what_does_not_fit_is_refused_before_any_work() -> None:
    done = limited("predict", "gpt2", "--layers", "400000")
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(r"800,000 sublayers needs at least 8\.0 GB .* fewer layers", done.stderr)


@pytest.mark.slow
def test_10_000_layers_fit_into_4_gigabytes() -> None:
    done = limited("predict", "gpt2", "--layers", "10000")
    assert done.returncode == 0 and "gradient ratio" in done.stdout
    assert "this takes about" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_fits_into_4_gigabytes(name: str) -> None:
    done = limited("predict", name)
    assert done.returncode == 0, done.stderr


def test_cost_grows_with_layers_and_tokens() -> None:
    def cost(fidelity: str, **changes: int) -> tuple[float, float]:
        table = sp.scheme("xavier")(sp.Architecture.preset("gpt2", **changes))
        return expected_cost(table, default_statistics(table.architecture), fidelity)  # type: ignore[arg-type]

    for fidelity in ("auto", "moments"):
        few, many = cost(fidelity, n_layers=12), cost(fidelity, n_layers=1200)
        assert many[0] == pytest.approx(100 * few[0])
        assert few[1] < many[1] < 30e6 + 100 * few[1]
    assert cost("kernel", seq_len=1024)[0] > 10 * cost("auto", seq_len=1024)[0]


def test_a_device_that_is_not_there_is_refused_where_nothing_runs_on_it() -> None:
    result = commanded("predict", "gpt2", "--device", "nonsense")
    check_command(result)
    assert result.status == 2 and "--device nonsense" in result.err
