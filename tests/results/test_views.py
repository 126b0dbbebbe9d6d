"""What results show of themselves: words, pictures, data frames, and predictions from a name alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import signalprop as sp
from signalprop.data import default_batch
from signalprop.network.shown import wrapped

SMALL = sp.Architecture.preset("tgs", n_layers=2, d_model=16, n_heads=2, d_ff=32, seq_len=8, vocab_size=50)
PROFILE = sp.predict(SMALL, scheme="deepscalelm")
SWEEP = sp.predict(sp.scheme("xavier")(SMALL).with_columns(branch=np.ones((3, 4))))


def test_a_name_is_enough() -> None:
    by_name = sp.predict("tgs")
    assert by_name == sp.predict(sp.Architecture.preset("tgs")) and by_name.gradient is not None
    assert by_name.gradient_ratio == by_name.gradient["stream_in"].variance[0]
    assert sp.predict(SMALL, scheme="deepscalelm") == sp.predict(sp.scheme("deepscalelm")(SMALL))
    assert sp.predict(SMALL, backward=False).gradient_ratio is None
    with pytest.raises(sp.InputError, match="already has its numbers"):
        sp.predict(sp.scheme("xavier")(SMALL), scheme="deepscalelm")
    with pytest.raises(sp.InputError, match="unknown preset 'gtp2'"):
        sp.predict("gtp2")


def test_a_network_is_compared_and_a_model_measured_without_a_batch() -> None:
    found = sp.compare(SMALL, scheme="deepscalelm", seeds=1)
    assert found.predicted.scheme == "deepscalelm" and found.measured.source == "measured"
    assert found.gradient_ratio == (found.predicted.gradient_ratio, found.measured.gradient_ratio)
    model = sp.build(sp.scheme("deepscalelm")(SMALL), seed=0).eval()  # without dropout
    assert sp.measure(model) == sp.measure(model, default_batch(SMALL))
    for arguments in ((PROFILE,), (SMALL, PROFILE)):
        with pytest.raises(sp.InputError, match="compare"):
            sp.compare(*arguments)


def test_words() -> None:
    comparison = sp.compare(PROFILE, PROFILE)
    for text in (repr(PROFILE), repr(comparison)):
        assert "encoder, 2 layers, d_model 16" in text and "deepscalelm" in text and len(text) < 250
    assert "sweep of shape (3,)" in repr(SWEEP) and SWEEP._repr_html_() is None
    model = sp.build(sp.scheme("deepscalelm")(SMALL), seed=0).eval()
    results = [sp.check(model, "deepscalelm"), sp.diagnose(model), sp.fit(model)]
    for one in (sp.scheme("deepscalelm")(SMALL), sp.trace(sp.scheme("deepscalelm")(SMALL), at=[1]), *results):
        assert repr(one).startswith(f"<{type(one).__name__}: ") and len(repr(one)) < 250, repr(one)
        if type(one).__name__ == "Diagnosis":
            assert "2 layers" in str(one) and "layer " in str(one) and len(str(one).splitlines()) > 8
    assert PROFILE.summary() in comparison.summary() and "median error" in comparison.summary()
    assert f"{PROFILE.gradient_ratio:#.4g}" in PROFILE.summary()


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROFILE.plot(tmp_path / "a.svg").axes) == 4 and (tmp_path / "a.svg").stat().st_size > 10_000
    page = PROFILE._repr_html_()
    assert page is not None and "deepscalelm</pre>" not in page and "data:image/png;base64,iVBOR" in page
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = PROFILE._repr_html_()
    assert bare is not None and bare.endswith("</pre>") and "<img" not in bare


def test_data_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = PROFILE.to_dataframe()
    assert list(frame.kind) == ["attention", "feed_forward"] * 2 and list(frame.layer) == [0, 0, 1, 1]
    assert frame.gradient_stream_in_variance[0] == PROFILE.gradient_ratio
    both = sp.compare(PROFILE, PROFILE).to_dataframe()
    assert (both.predicted_branch_variance == both.measured_branch_variance).all() and len(both) == 4
    with pytest.raises(sp.InputError, match="this is a sweep"):
        SWEEP.to_dataframe()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sp.MissingExtra, match=r"signalprop\[pandas\]"):
        PROFILE.to_dataframe()


# --- what results show of themselves in a notebook and as a table


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
