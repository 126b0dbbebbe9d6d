"""What commands print and write when all is well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commandline import TINY, Command, result_of
from signalprop import __version__
from signalprop.cli import all_commands
from signalprop.network.architecture import Architecture
from signalprop.prediction import predict
from signalprop.report.html import read
from signalprop.results.comparison import compare
from signalprop.results.profile import Profile
from signalprop.schemes import SCHEMES, scheme


def test_version_and_help(command: Command) -> None:
    assert command("--version").out == f"signalprop {__version__}\n"
    for arguments in ((), ("--help",), ("-h",)):
        status, out, err = command(*arguments)
        assert (status, err) == (0, "")
        assert re.search(r" compare +Predict and measure a model's signal", out)


def test_help_is_40_lines_of_80_columns(command: Command) -> None:
    """And the list of commands has whole sentences."""
    pages = [command("--help").out, *(command(one.__name__, "--help").out for one in all_commands())]
    assert "..." not in pages[0].partition("Commands:")[2]
    for page in pages:
        lines = page.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 80, page


def test_predict_equals_the_library(command: Command) -> None:
    arguments = ["predict", "tgs", "--layers", "6", "--scheme", "deepscalelm:k=1.5", "--norm", "post"]
    profile = Profile.from_json(result_of(command, *arguments))
    a = Architecture.preset("tgs", n_layers=6, norm_placement="post")
    assert profile == predict(scheme("deepscalelm", k=1.5)(a))


def test_predict_prints_a_table_findings_and_files(command: Command, tmp_path: Path) -> None:
    picture, file = tmp_path / "a.svg", tmp_path / "a.json"
    status, out, err = command("predict", "tgs", "--layers", "48", "--plot", str(picture), "--json", str(file))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:5] == [
        "network             encoder, 48 layers, d_model 256, pre-norm, relu",
        "scheme              xavier",
        "input               Zipf's law, 32000 words, 512 tokens per sequence",
        "verdict             nothing to warn of",
        "",
    ]
    assert list(json.loads(file.read_text()))[:4] == ["schema", "architecture", "scheme", "reads"]
    assert lines[5].startswith("layer  stream var  token corr  attn var  ffn var  grad var  grad corr")
    assert lines[7].startswith("0 ") and lines[12].startswith("47 ") and "42 of 48 layers left out" in lines[13]
    assert "source              theory (moments)" in out
    assert str(picture) in out and picture.read_text().startswith("<?xml")
    assert Profile.load(file).n_sublayers == 96
    everything = command("predict", "tgs", "--layers", "48", "--all").out.splitlines()
    assert [line.split()[0] for line in everything[7:55]] == [str(layer) for layer in range(48)]


@pytest.mark.slow
def test_predict_several_schemes_and_depths(command: Command, tmp_path: Path) -> None:
    picture, file = tmp_path / "a.svg", tmp_path / "a.json"
    several = ["--scheme", "xavier,deepscalelm", "--layers", "4,192", "--norm", "post"]
    status, out, _ = command("predict", "tgs", *several, "--json", str(file), "--plot", str(picture))
    assert status == 0 and picture.read_text().startswith("<?xml")
    lines = out.splitlines()
    assert lines[:2] == [
        "network             encoder, 4 and 192 layers, d_model 256, post-norm, relu",
        "scheme              xavier, deepscalelm",
    ]
    assert lines[4].split("  ")[0] == "scheme"
    assert [line.split()[:2] for line in lines[6:10]] == [
        ["xavier", "4"], ["xavier", "192"], ["deepscalelm", "4"], ["deepscalelm", "192"],
    ]  # fmt: skip
    expected = [
        predict(Architecture.preset("tgs", n_layers=n, norm_placement="post"), scheme=name)
        for name in ("xavier", "deepscalelm")
        for n in (4, 192)
    ]
    assert [Profile.from_json(item) for item in json.loads(file.read_text())["profiles"]] == expected
    assert f"{expected[1].gradient_ratio:.3e}" in lines[7] and "vanishing gradient" in lines[7]
    assert lines[9].endswith("nothing to warn of")
    names = ["xavier, 4 layers", "xavier, 192 layers", "deepscalelm, 4 layers", "deepscalelm, 192 layers"]
    assert list(read(file)) == names


def test_predict_by_simulation(command: Command) -> None:
    arguments = ["predict", "tgs", *TINY, "--fidelity", "simulate"]
    found = Profile.from_json(result_of(command, *arguments))
    assert (found.source, found.n_seeds) == ("simulated", 8)
    assert found.forward["stream_out"].variance_se is not None
    assert found == Profile.from_json(result_of(command, *arguments))


def test_schemes_lists_all(command: Command) -> None:
    everything = result_of(command, "schemes")["schemes"]
    assert set(everything) == set(SCHEMES)
    assert all(item["paper"] and item["summary"] and item["description"] for item in everything.values())
    out = command("schemes").out
    assert max(map(len, out.splitlines())) <= 80 and len(out.splitlines()) <= 24
    assert all(re.search(rf"(?<![\w-]){name}(?![\w-])", out) for name in SCHEMES)
    assert "Kedia et al. 2024" in command("schemes", "deepscalelm").out


def test_schemes_compares_what_theory_predicts(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    out = command("schemes", "--for", "tgs", "--layers", "3", "--set", "d_model=32", "--json", str(file)).out
    everything = json.loads(file.read_text())["schemes"]
    assert set(everything) == set(SCHEMES)
    a = Architecture.preset("tgs", n_layers=3, d_model=32, seq_len=128)  # as many tokens as are compared at
    profile = predict(scheme("noci")(a))
    assert everything["noci"]["prediction"] == {
        "fidelity": "moments",
        "input_variance": profile.input["variance"],
        "stream_variance": profile.forward["stream_out"].variance[-1],
        "token_correlation": profile.forward["stream_out"].token_correlation[-1],
        "gradient_ratio": profile.gradient["stream_in"].variance[0],
        "sensitivity": profile.sensitivity()["mean"],
        "findings": [],
    }
    assert "family None" in everything["huggingface"]["prediction"]["refused"]
    assert all(name in out for name in SCHEMES) and "do not apply: e-spa, huggingface, u-spa" in out
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80 or str(file) in out


def test_the_cost_of_a_network(command: Command) -> None:
    result = result_of(command, "predict", "bert-base", "--cost")
    assert result["parameters"]["total"] == 109_514_298  # BertForMaskedLM of the published configuration
    table = command("predict", "bert-base", "--cost").out
    assert "109,514,298" in table
    assert f"{result['train_flops']['total']:.3e}" in table


def test_verify_fails_where_a_formula_is_worse_than_the_papers(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from signalprop_lab.verification.verify import Row, VerificationReport

    good = Row("relu", "mean", (0.3, 1.3, 2.3), 0.01, 0.0, 0.1, 0.3, 8, (0.3, 1.3, 2.3), {})
    bad = Row("relu", "variance", (0.5, 1.9, 3.5), 0.01, 0.0, 0.1, 0.3, 8, (0.5, 1.9, 3.4), {})
    unknown = Row("tanh", "variance", (9.0, 9.0, 9.0), 0.01, 0.0, 0.1, 0.3, 8, None, {})
    noisy = Row("linear", "mean", (0.3, 0.6, 0.7), 0.33, 0.0, 0.1, 0.3, 8, (0.0, 0.4, 1.3), {})
    for rows, expected in (((good, unknown, noisy), 0), ((good, bad, noisy), 1)):
        report = VerificationReport(rows, "quick", 0)
        monkeypatch.setattr("signalprop_lab.verification.verify.verify", lambda *_, report=report, **__: report)
        status, out, err = command("verify")
        assert status == expected
        assert (out.count("worse"), out.count("noise")) == (expected, 1)
        assert ("relu variance" in err) == bool(expected)


def test_compare_of_a_scheme(command: Command, tmp_path: Path) -> None:
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["compare", "tgs", *TINY, "--seeds", "2", "--json", str(file), "--plot", str(picture)]
    status, out, err = command(*arguments)
    assert status == 0, err
    assert "forward variance" in out and "words of sotu, 2 seeds" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    predicted, measured = Profile.from_json(found["predicted"]), Profile.from_json(found["measured"])
    assert (predicted.source, measured.source, measured.n_seeds) == ("theory", "measured", 2)
    assert compare(predicted, measured).to_json()["agreement"] == found["agreement"]
    errors = {item["quantity"]: item["median"] for item in found["agreement"]}
    assert errors["forward variance"] < 0.3  # width 32, two networks: far from exact, but the same signal


def test_compare_shortens_sequences_unless_told(command: Command, tmp_path: Path) -> None:
    tiny = ["--layers", "1", "--set", "d_model=16", "--set", "vocab_size=50"]
    small = ["tgs", *tiny, "--seeds", "1"]
    assert result_of(command, "compare", *small)["measured"]["architecture"]["seq_len"] == 128
    longer = result_of(command, "compare", *small, "--seq-len", "130")
    assert longer["predicted"]["architecture"]["seq_len"] == longer["measured"]["architecture"]["seq_len"] == 130
    file = tmp_path / "table.json"
    command("schemes", "xavier", "--for", "tgs", *tiny, "--set", "seq_len=140", "--json", str(file))
    result = result_of(command, "compare", str(file), "--seeds", "1")
    assert result["predicted"]["architecture"]["seq_len"] == 140  # a finished table stays as it is


def test_a_seed_makes_a_measurement_repeatable(command: Command) -> None:
    """Weights, data, and the masks of dropout."""
    arguments = ("measure", "tgs", *TINY, "--seeds", "2")
    first = result_of(command, *arguments)
    assert result_of(command, *arguments) == first != result_of(command, *arguments, "--seed", "1")
    assert command("compare", "tgs", *TINY, "--seeds", "1", "--seed", str(10**30)).status == 0  # PyTorch takes less


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_compare_a_directory_as_it_is(command: Command, hf_directories: Path, name: str) -> None:
    directory = str(hf_directories / name)
    result = result_of(command, "compare", directory, "--seeds", "3")
    measured, predicted = Profile.from_json(result["measured"]), Profile.from_json(result["predicted"])
    assert measured.scheme == predicted.scheme == "as is"
    assert measured.architecture == predicted.architecture
    assert predicted.architecture.dropout == 0
    entering = predicted.input["variance"] / measured.input["variance"]
    assert entering == pytest.approx(1, rel=0.25)  # 32 features, one draw of the tables
    assert command("compare", directory, "--seeds", "1").out.count("the model's tokens") == (name == "bert")


def test_measure_a_directory(command: Command, hf_directories: Path) -> None:
    directory = str(hf_directories / "bert")
    first = result_of(command, "measure", directory)
    assert first == result_of(command, "measure", directory)
    assert first["scheme"] == "as is"
    fresh = result_of(command, "measure", directory, "--random-init", "--seeds", "2")
    assert (fresh["scheme"], fresh["n_seeds"]) == ("random init", 2)
    status, out, _ = command("measure", directory, "--seq-len", "8", "--no-gradient")
    assert status == 0 and "input               sotu in the model's tokens, 8 tokens" in out


def test_a_directory_predicts_with_its_own_initialisation(command: Command, hf_directories: Path) -> None:
    for name in ("bert", "bert/config.json"):
        assert result_of(command, "predict", str(hf_directories / name))["scheme"] == "huggingface"
    built = result_of(command, "predict", str(hf_directories / "bert"), "--scheme", "xavier", "--layers", "3")
    assert (built["scheme"], len(built["sublayers"])) == ("xavier", 6)
