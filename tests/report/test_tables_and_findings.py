"""Text from profiles whose numbers are known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from signalprop.diagnosis.verdict import RULES as TRAINED
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.report import findings, tables
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.results.text import spread
from signalprop.results.verdicts import explained


def profile(
    n_layers: int = 1, *, out: ArrayLike = 2.0, branch: ArrayLike = 0.5, correlation: ArrayLike = 0.25,
    gradient: ArrayLike | None = None, log_out: ArrayLike | None = None, errors: bool = False,
) -> Profile:  # fmt: skip
    """A profile with these numbers at every sublayer (or one each)."""
    shape = (2 * n_layers,)
    more = {"variance_se": np.full(shape, 0.03), "token_correlation_se": np.full(shape, 0.004)} if errors else {}

    def series(variance: ArrayLike) -> Series:
        return Series.of(np.broadcast_to(variance, shape), correlation, **more)

    stream = series(out) if log_out is None else Series.of(log_variance=np.broadcast_to(log_out, shape))
    points = {"stream_in": series(1.0), "branch": series(branch), "stream_out": stream}
    return Profile(
        source="measured" if errors else "theory",
        architecture=Architecture(kind="encoder", n_layers=n_layers, d_model=8),
        scheme="xavier",
        input={"mean": 0.0, "variance": 1.0, "token_correlation": 0.2},
        forward=points,
        gradient=None if gradient is None else dict.fromkeys(points, series(gradient)),
        n_seeds=4 if errors else None,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"), (0.0, "0.000"), (1.0, "1.000"), (-0.5, "-0.5000"), (1234.56, "1235"),
        (99999.0, "1.000e+05"), (0.001, "0.001000"), (0.00099, "9.900e-04"), (1e300, "1.000e+300"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert tables.number(value) == text


@pytest.mark.parametrize("n", [1, 11, 12, 13, 96, 1000])
def test_thinned_rows_keep_both_ends(n: int) -> None:
    rows = spread(range(n), tables.MAX_ROWS)
    assert rows[0] == 0 and rows[-1] == n - 1
    assert len(rows) == min(n, tables.MAX_ROWS)
    assert rows == sorted(set(rows))
    assert spread(range(n), None) == list(range(n))


def test_profile_table() -> None:
    plain = tables.profile_table(profile()).splitlines()
    assert re.split("  +", plain[0]) == ["layer", "stream var", "token corr", "attn var", "ffn var"]
    assert [line.split() for line in plain[2:]] == [["0", "2.000", "0.2500", "0.5000", "0.5000"]]
    measured = profile(errors=True, gradient=[3.0, 1.0])
    row = tables.profile_table(measured).splitlines()[2].split()
    assert row == ["0", "2.000±3%", "0.2500±0.004", "0.5000", "0.5000", "3.000±3%", "0.2500"]
    assert "±" not in tables.profile_table(measured, errors=False)


def test_comparison_tables() -> None:
    comparison = compare(profile(gradient=2.0), profile(out=4.0, gradient=1.0, errors=True))
    row = tables.comparison_table(comparison).splitlines()[2].split()
    assert row == ["0", "2.000", "4.000±3%", "0.2500", "0.2500±0.004", "2.000", "1.000±3%"]
    agreement = tables.agreement_table(comparison).splitlines()
    assert agreement[2].split() == [
        "forward", "variance", "-", "69.31", "%", "69.31", "%", "-69.3", "%", "3.00", "%", "-",
    ]  # fmt: skip
    assert agreement[6].split() == [
        "gradient", "variance", "-", "69.31", "%", "69.31", "%", "+69.3", "%", "3.00", "%", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (profile(gradient=[0.0099, 1.0]), "vanishing gradient: its variance at the first sublayer is 0.009900"),
        (profile(6, gradient=[1.0] * 10 + [0.09, 1.0]), "vanishing gradient: its variance at its lowest is 0.09000"),
        (profile(gradient=[301.0, 1.0]), "exploding gradient: its variance at the first sublayer is 301.0"),
        (profile(2, correlation=[0.5, 0.9, 0.96, 0.97]), "rank collapse: from sublayer 2 on"),
        (
            profile(2, correlation=[0.96, 0.9, 0.5, 0.5]),
            "rank collapse: token correlations are above 0.95 at 1 of 4",
        ),
        (profile(out=[5.0, 10.1]), "stream growth: its variance grows 10.10-fold over the upper half"),
        (profile(4, gradient=[25.0] * 2 + [11.0] * 5 + [1.0]), "exploding gradient: its variance at the first"),
        (profile(branch=2e-5), "idle layers: all branches together add 4.000e-05 of the stream's variance"),
        (profile(branch=[1.0, 1.2e8]), "fp16 overflow: at sublayer 1 6 standard deviations of the branch"),
    ],
)
def test_warnings(made: Profile, says: str) -> None:
    found = findings.warnings(made)
    assert len(found) == 1
    assert found[0].startswith(says)
    *_, sure, rest = found[0].split("; ")
    assert "narrow" in sure or "clear" in sure
    name = found[0].partition(":")[0]
    assert rest.endswith(f"(signalprop --explain '{name}')")
    text = explained(name)
    assert text.startswith(name) and max(map(len, text.splitlines())) <= 80
    page, _, anchor = text.splitlines()[-1].partition("#")
    headings = re.findall(r"^#+ (.*)$", (Path(__file__).parents[2] / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-").rstrip("?") for heading in headings]


def test_warnings_of_trained_models_are_explained() -> None:
    for rule in TRAINED:
        text = explained(rule.name, TRAINED)
        assert rule.name in text and max(map(len, text.splitlines())) <= 80
        assert " ".join(rule.meaning.split()) in " ".join(text.split()) and rule.meaning.endswith(".")
    both = explained("rank collapse", TRAINED)
    assert "rank collapse, at the start" in both and "rank collapse, of a trained model" in both
    assert "Cause: attention averages faster" in both


def test_an_unknown_warning_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="expected one of: vanishing gradient, exploding gradient"):
        explained("gloom")


def test_no_warnings_below_the_thresholds() -> None:
    healthy = profile(2, out=9.9, branch=1.1e8, correlation=0.949, gradient=[99.0, 1.0, 1.0, 1.0])
    assert findings.warnings(healthy) == []
    assert findings.warnings(profile(4, gradient=[25.0] * 2 + [9.0] * 5 + [1.0])) == []
    assert findings.warnings(profile(gradient=[0.101, 1.0])) == []


def test_warnings_where_floats_end() -> None:
    found = findings.warnings(profile(log_out=2000.0))
    assert [line.split(":")[0] for line in found] == ["stream growth", "fp16 overflow"]


@pytest.mark.parametrize("name", ["GPT-2", "BERT base"])
def test_models_that_are_known_to_train_are_told_so(name: str) -> None:
    from benchmarks.known_good import LIKE, start_of  # which sees to it that there is no warning

    assert start_of(name) == pytest.approx(findings.known_good()[name], rel=5e-3)
    assert set(findings.known_good()) == set(LIKE)


def test_a_gradient_like_that_of_known_models() -> None:
    found = findings.summary(predict("gpt2"))
    small, large = (f"{findings.known_good()[name]['gradient_ratio']:.3g}" for name in ("GPT-2", "GPT-2 XL"))
    assert found[3].strip() == f"these train: GPT-2 ({small}), GPT-2 XL ({large}), at 128 tokens"
    assert not any("these train" in line for line in findings.summary(profile(gradient=[3.0, 1.0])))
    sick = profile(gradient=[400.0, 1.0])  # of a stream that does not grow
    assert not any("these train" in line for line in findings.summary(sick))
