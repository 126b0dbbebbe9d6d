"""Every mistake gets exit status 2 and one line that says what would be right."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from commandline import TINY, Command, Refused
from signalprop.cli import run

BOOK = Path(__file__)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict", "tgs", "--set", "n_heads=7"], "not divisible by n_heads 7"),
        (["predict", "tgs", "--layers", "2,two"], "--layers 'two' is not a number of layers"),
        (["predict", "tgs", "--layers", "2,,4"], "--layers '2,,4' has an empty member"),
        (["predict", "tgs", "--layers", "2,4", "--all"], "--all prints every layer of one network"),
        (["predict", "tgs", "--scheme", "xavier,xavier"], "has 'xavier' 2 times"),
        (["compare", "tgs", "--scheme", "xavier,lns"], "expected one scheme here (predict takes several)"),
        (["predict", "xyz"], "known presets: tgs"),
        (["predict", "gtp2"], "unknown preset 'gtp2'; did you mean gpt2?"),
        (["predict", "tgs", "--scheme", "xavir"], "did you mean xavier?"),
        (["predict", "tgs", "--scheme", "xavier", "--scheme=deepscalelm"], "--scheme is given 2 times"),
        (["sweep", "swep-cod-tab1"], "did you mean sweep-cod-tab1?"),
        (["train", "gpt-smal"], "did you mean gpt-small?"),
        (["diagnose", str(BOOK)], "is not a model, and no config.json is next to it"),
        (["predict", "no/such/folder"], "no file or directory"),
        (["predict", "missing.json"], "cannot read missing.json"),
        (["predict", "tgs", "--scheme", "deepscalelm:q=1"], "no option 'q'"),
        (["predict", "tgs", "--scheme", "deepscalelm:k"], "KEY=VALUE"),
        (["predict", "tgs", "--set", "dmodel=64"], "did you mean d_model?"),
        (["predict", "tgs", "--set", "settings=2"], "settings: Input should be a valid dictionary"),
        (["predict", str(BOOK)], "holds no architecture in JSON; expected such a file, a preset's name"),
        (["predict", "tgs", "--json"], "see signalprop predict --help"),
        (["check", "./nothing", "--scheme", "xavier"], "cannot read ./nothing: there is no such file or directory"),
        (["anatomy", "tgs"], "tgs is a preset, a network without weights"),
        (["predict", "tgs", "--set", "activation=sigmoidal"], "activation"),
        (["predict", "tgs", "--fidelity", "exact"], "choose auto, moments, kernel, simulate"),
        (["predict", "tgs", "--qk-scale", "-1"], "--qk-scale"),
        (["predict", "tgs", "--qk-scale", "nan"], "--qk-scale"),
        (["predict", "tgs", "--sheme", "xavier"], "No such option"),
        (["predict", "tgs", "--plot", "signal.bmp"], ".png, .svg or .pdf"),
        (["predict", "tgs", "--plot", "no/such/folder/a.png"], "there is no directory"),
        (["predict", "tgs", "--json", "."], "it is a directory"),
        (["predict"], "ARCH"),
        (["predikt", "tgs"], "No such command"),
        (["compare", "tgs", "--fidelity", "simulate"], "choose fidelity auto"),
        (["compare", "tgs", "--scheme", "as-is"], "needs a Hugging Face directory"),
        (["compare", "tgs", "--inside", "vision_model"], "--inside is for a directory"),
        (["compare", "tgs", "--seeds", "0"], "--seeds"),
        (["measure", "tgs", *TINY, "--device", "cuda:99"], "usable here: cpu"),
        (["compare", "tgs", *TINY, "--device", "meta"], "--device meta: it holds no numbers; usable here: cpu"),
        (["train", "gpt-small", "--device", "cuda:99"], "--device cuda:99: "),
        (["verify", "perceptron"], "perceptron"),
        (["schemes", "magic"], ", deepscalelm, "),
        (["schemes", "xavier", "--layers", "3"], "need --for"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(refused: Refused, arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": "signalprop/parametrization/99"}', "signalprop/parametrization/99"),
        ('{"schema": "signalprop/parametr', "is not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"n_layers": NaN}', "finite"),
        ('{"kind": "encoder", "n_layers": 2, "wings": 3}', "wings"),
        ('{"model_type": "bloom"}', "bloom"),
        ("", "is empty"),
    ],
)
def test_architecture_files(refused: Refused, tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "net.json"
    file.write_text(content)
    assert says in refused("predict", str(file))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("predict", b" \n", "is empty"), ("compare", b"caf\xe9", "not UTF-8"), ("measure", b"...", "tokens")],
)
def test_texts(refused: Refused, tmp_path: Path, name: str, content: bytes, says: str) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(content)
    assert says in refused(name, "tgs", *TINY, "--data", str(file))


def test_finished_parametrizations_take_no_changes(command: Command, refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    assert command("schemes", "deepscalelm", "--for", "tgs", "--layers", "2", "--json", str(file)).status == 0
    assert "takes no changes" in refused("predict", str(file), "--layers", "3")
    assert "takes no changes" in refused("predict", str(file), "--scheme", "xavier")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "{}/bert", "--set", "dropout=0.1"], "only --seq-len can change"),
        (["compare", "{}/gpt2", "--seq-len", "25"], "positions for 24"),
        (["measure", "{}/vit", "--data", "book.txt"], "leave --data out"),
        (["measure", "{}"], "config"),
        (["predict", "{}"], "config"),
    ],
)
def test_hugging_face_directories(refused: Refused, hf_directories: Path, arguments: list[str], says: str) -> None:
    assert says in refused(*[argument.format(hf_directories) for argument in arguments])


@pytest.fixture
def copied(hf_directories: Path, tmp_path: Path) -> Path:
    """A copy of the BERT directory, to be spoilt."""
    for file in (hf_directories / "bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_spoilt_weights(refused: Refused, copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot load the model" in refused("measure", str(copied))
    weights.unlink()
    assert "--random-init" in refused("measure", str(copied))


def test_spoilt_tokenizers(refused: Refused, copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    assert "cannot read" in refused("measure", str(copied))


def test_unknown_classes(refused: Refused, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert "NoSuchModel" in refused("measure", str(copied))


def test_tokenizers_larger_than_the_vocabulary(refused: Refused, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    assert "vocabulary ends at 19" in refused("measure", str(copied), "--random-init")


def test_advice_names_the_thing_and_not_a_keyword_of_python(command: Command, refused: Refused, copied: Path) -> None:

    def becomes(**fields: object) -> None:
        (copied / "config.json").write_text(json.dumps(fields))

    becomes(model_type="time_series_transformer", architectures=["TimeSeriesTransformerModel"], prediction_length=4,
            d_model=16, encoder_layers=1, decoder_layers=1)  # fmt: skip
    said = refused("measure", str(copied), "--random-init")
    assert "give its inputs, what the model is called with: a tensor, a tuple, a dictionary, or a" in said
    becomes(model_type="deberta", architectures=["DebertaForMaskedLM"], vocab_size=60, hidden_size=16,
            num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)  # fmt: skip
    assert "let it pass through an nn.Identity()" in refused("measure", str(copied), "--random-init")
    (copied / "model.safetensors").unlink()
    assert "let it pass through an nn.Identity()" in command("anatomy", str(copied)).out


def test_read_only_directories(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # not by permissions, which a superuser has everywhere
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "not writable" in refused("predict", "tgs", "--json", str(tmp_path / "a.json"))


def test_failures_and_interruptions(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of\nluck")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("signalprop.results.cost.count_parameters", fail)
    status, out, err = command("predict", "tgs", "--cost")
    assert (status, out) == (1, "")
    assert err == "signalprop: RuntimeError: out of luck (SIGNALPROP_DEBUG=1 shows where)\n"
    monkeypatch.setenv("SIGNALPROP_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(["predict", "tgs", "--cost"])
    monkeypatch.setattr("signalprop.results.cost.count_parameters", interrupt)
    assert command("predict", "tgs", "--cost") == (130, "", "signalprop: interrupted\n")


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("torch", "models", ["anatomy", "x"]), ("torch", "models", ["check", "x"]),
        ("matplotlib", "report", ["predict", "tgs", "--plot", "a.png"]), ("plotly", "report", ["report", "a.json"]),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str, arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert re.search(rf"this needs {missing}, .*pip install 'signalprop\[{extra}\]'", refused(*arguments))
