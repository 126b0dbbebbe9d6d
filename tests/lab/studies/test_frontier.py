"""The frontier: by hand where multipliers alone move, its claim against the stored rows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import signalprop as sp
from signalprop.data.batches import load_text, text_batch, word_ids
from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop_lab.studies.first_step import TESTED
from signalprop_lab.studies.frontier import Frontier, frontier
from signalprop_lab.studies.frontier_picture import figure
from stepping import STORED, measured_over_predicted, network


def _of(scheme: str, *shapes: tuple[int, int], **options: float) -> Frontier:
    return frontier([sp.scheme(scheme)(network(*shape, "pre")) for shape in shapes], **options)


def test_xavier_wants_a_rate_of_one_over_the_width() -> None:
    found = _of("xavier", (2, 128), (2, 512))
    assert found.exponents[0].depth is None
    assert found.exponents[0].width == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("optimizer", TESTED)
def test_what_it_says_of_itself_is_what_was_measured(optimizer: str) -> None:
    off = np.abs(np.log(measured_over_predicted(optimizer)))
    said = TESTED[optimizer]
    assert f"within 1.5 of this in {100 * np.mean(off < np.log(1.5)):.0f} % of {len(off)} networks" in said
    assert f" {np.exp(off.max()):.2g} " in said or f" {np.exp(off.max()):.2g} off" in said
    assert ("failed" in said) == (np.mean(off < np.log(1.5)) < 0.9)


def test_as_text_and_picture(tmp_path: Path) -> None:
    shapes = [(n, width) for n in (1, 2) for width in (64, 128)]
    tables = [sp.scheme(name)(network(*shape, "pre")) for name in ("xavier", "rezero") for shape in shapes]
    found, picture = frontier(tables, optimizer="sgd"), tmp_path / "frontier.svg"
    assert len([line for line in found.table().splitlines() if " 64 " in line]) == 4
    assert "xavier, pre: rate ~ layers^" in found.table() and "SGD failed" in " ".join(found.notes)
    assert any(".58 to .80" in note for note in frontier(tables[:1]).notes)
    figure(found).savefig(picture)
    assert "xavier, pre" in picture.read_text() and "2 layers" not in picture.read_text()


def test_rates_that_make_roles_even() -> None:
    """With the factors on learning rates, every role moves the stream as far as any other."""
    table = sp.scheme("gpt2")(network(2, 64, "pre"))
    found = frontier([table]).cells[0]
    assert sum(found.shares.values()) == pytest.approx(1) and found.shares["down"] > 0.3
    rates = {role: rate * found.even_rates.get(role, 1.0) for role, rate in table.learning_rates.items()}
    even = frontier([replace(table, learning_rates=rates)]).cells[0].shares
    (shown,) = (line.split() for line in frontier([table]).table().splitlines() if "moves" in line)
    assert shown[:6] == ["gpt2", "pre", "2", "moves", "0.1%", "0.1%"]
    assert "moves" not in frontier([table], optimizer="sgd").table()
    assert list(even.values()) == pytest.approx([1 / 6] * 6, rel=1e-6)


def test_shares_are_those_of_a_real_step() -> None:
    """Of the stored rows, which were measured after the predictions: the page's median and its worst."""
    measured = {(r["scheme"], r["layers"]): r["shares"] for r in read_json(STORED / "role-rows.json")["rows"]}
    a = network(6, 64, "pre")
    inputs = text_batch(a, word_ids(load_text(), a.vocab_size), 64, 99).statistics(a)
    table = sp.scheme("takase")(a, inputs)
    found = frontier([table], inputs=inputs, sequences=12).cells[0].shares
    for role, share in measured["takase", 6].items():
        assert abs(np.log(found[role] / share)) < np.log(1.25) or share < 0.01


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="expected a positive number"):
        _of("xavier", (2, 64), change=0.0)
    with pytest.raises(InputError, match="choose adam, sgd, muon"):
        _of("xavier", (2, 64), optimizer="lamb")
    with pytest.raises(InputError, match="an encoder-decoder has no predicted first step"):
        frontier([sp.scheme("xavier")(sp.Architecture.preset("t5-small", n_layers=1))])
    with pytest.raises(InputError, match="without a head"):
        frontier([sp.scheme("xavier")(network(1, 64, "pre").replace(head="none"))])
