"""What results show of themselves in a notebook and as a table."""

from __future__ import annotations

import pytest

import signalprop as sp
from signalprop.network.shown import wrapped


def test_sentences_fold_and_tables_do_not() -> None:
    label = f"{'warning':<20}" + "vanishing gradient: its variance at the first sublayer is small " * 2
    row = "layer  stream var  " * 6
    folded = wrapped(f"{label.rstrip()}\n{row}\nshort", 80).splitlines()
    assert max(map(len, folded[:-2])) <= 80 and len(folded) > 4
    assert all(line.startswith(" " * 20) and line[20] != " " for line in folded[1:-2])
    assert " ".join(" ".join(folded[:-2]).split()) == " ".join(label.split())
    assert folded[-2:] == [row, "short"]


def test_a_table_is_shown_and_becomes_a_data_frame() -> None:
    pytest.importorskip("pandas")
    table = sp.scheme("xavier")(sp.Architecture.preset("tgs", n_layers=2, d_model=64, n_heads=4))
    frame = table.to_dataframe()
    assert list(frame["kind"]) == ["attention", "feed_forward"] * 2
    assert list(frame["weight.query"]) == list(table.weights["query"])
    assert table.summary() == str(table)
    page = str(table._repr_html_())
    assert "pre-wrap" in page and page.count("<img") == 1


@pytest.mark.slow
def test_advice_shows_its_warning_and_its_changes() -> None:
    pytest.importorskip("pandas")
    advice = sp.advise(sp.Architecture.preset("tgs", n_layers=48, norm_placement="post"), scheme="xavier")
    assert list(advice.to_dataframe()["change"]) == [item.name for item in advice.options]
    text = advice.summary()
    assert advice.findings and text.index(advice.findings[0].name) < text.index(advice.options[0].name)
    assert "vanishing gradient" in str(advice._repr_html_())
