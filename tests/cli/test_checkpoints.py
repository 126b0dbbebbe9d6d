"""`signalprop apply` and `signalprop fold`: checkpoints in, checkpoints out, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import signalprop as sp
from commandline import Command, Refused, result_of

LLAMA = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 24,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with a configuration and nothing else."""
    LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=torch.arange(3, 13)[None]).logits
    return out


def difference(one: nn.Module, other: nn.Module) -> float:
    theirs = outputs(other)
    return float((outputs(one) - theirs).abs().max() / theirs.abs().max())


def test_apply_to_a_configuration(command: Command, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep"
    result = result_of(command, "apply", str(llama), "--scheme", "deepscalelm:k=1.5", "--out", str(out),
                       "--seed", "7")  # fmt: skip
    assert (result["schema"], result["scheme"], result["weights"]) == ("signalprop/apply/1", "deepscalelm", "drawn")
    assert len(result["multiplied"]) >= 8 and result["added"] == []
    expected = LlamaForCausalLM(LlamaConfig(**LLAMA))
    sp.apply(expected, "deepscalelm", k=1.5, seed=7)
    assert torch.equal(outputs(sp.load(out)), outputs(expected))


def test_apply_copies_companions(command: Command, hf_directories: Path, tmp_path: Path) -> None:
    source, out = hf_directories / "bert", tmp_path / "deep"
    status, text, err = command("apply", source / "config.json", "--scheme", "deepnorm", "--seed", "3", "--out", out)
    assert (status, err) == (0, "")
    assert "weights drawn with seed 3" in text and "for signalprop.load" in text
    expected = BertForMaskedLM.from_pretrained(source)
    sp.apply(expected, "deepnorm", seed=3)
    assert torch.equal(outputs(sp.load(out)), outputs(expected))
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_folded_checkpoint_is_the_same_function(command: Command, llama: Path, tmp_path: Path) -> None:
    unfolded, folded = (str(tmp_path / name) for name in ("a", "b"))
    result_of(command, "apply", str(llama), "--scheme", "layerscale", "--out", unfolded)
    result = result_of(command, "fold", unfolded, "--out", folded)
    assert (result["schema"], result["scheme"]) == ("signalprop/fold/1", "layerscale")
    assert result["fold_error"] < 1e-5
    model, report = LlamaForCausalLM.from_pretrained(folded, output_loading_info=True)
    assert not any(report.values())
    assert difference(model, sp.load(unfolded)) < 1e-5
    status, out, _ = command("fold", unfolded, "--out", tmp_path / "d")
    assert status == 0 and "outputs differ by" in out and "for transformers" in out


def test_other_commands_read_the_scheme(command: Command, llama: Path, tmp_path: Path) -> None:
    """A directory that carries a scheme is measured, checked and predicted with it, not as the vanilla function."""
    arguments = ("--scheme", "normalised-skip:alpha_attention=0.5:alpha_feed_forward=0.5")
    result_of(command, "apply", str(llama), *arguments, "--out", str(tmp_path / "m"))
    result_of(command, "fold", str(tmp_path / "m"), "--out", str(tmp_path / "n"))
    measured = result_of(command, "measure", str(tmp_path / "m"))
    skips = [row["stream_out"]["variance"] for row in measured["sublayers"]]
    folded = [row["stream_out"]["variance"] for row in result_of(command, "measure", str(tmp_path / "n"))["sublayers"]]
    assert skips[-1] < 0.01 * folded[-1]  # the folded model carries its stream in other units
    fresh = result_of(command, "measure", str(tmp_path / "m"), "--random-init", "--seed", "5")
    assert fresh["sublayers"][-1]["stream_out"]["variance"] == pytest.approx(skips[-1], rel=0.3)
    for options in ((), ("--seq-len", "8")):
        predicted = result_of(command, "predict", str(tmp_path / "m"), *options)
        assert predicted["scheme"] == "normalised-skip"
        assert predicted["sublayers"][-1]["stream_out"]["variance"] == pytest.approx(skips[-1], rel=0.3)
    assert result_of(command, "predict", str(tmp_path / "m"), "--scheme", "xavier")["scheme"] == "xavier"


class TestRefusals:
    """Exit status 2, one line, and no directory."""

    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Any:
        yield
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*.tmp"))

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--scheme", "magic"], "magic"),
            (["--scheme", "missing.json"], "missing.json"),
            (["--scheme", "xavier:q=1"], "no option 'q'"),
            (["--scheme", "rezero"], "sp.build(sp.scheme('rezero')(sp.Architecture.from_hf(model)))"),
            (["--scheme", "xavier", "--json", "no/such/a.json"], "no directory"),
        ],
    )
    def test_apply(self, refused: Refused, llama: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
        assert says in refused("apply", str(llama), *arguments, "--out", str(tmp_path / "out"))

    def test_sources(self, command: Command, refused: Refused, llama: Path, tmp_path: Path) -> None:
        out = str(tmp_path / "out")
        assert "config" in refused("apply", str(tmp_path), "--scheme", "xavier", "--out", out)
        assert "plain checkpoint" in refused("fold", str(llama), "--out", out)
        assert "no directory" in refused("fold", str(tmp_path / "nothing"), "--out", out)
        assert command("apply", llama, "--scheme", "layerscale", "--out", tmp_path / "m").status == 0
        assert "already carries scheme 'layerscale'" in refused(
            "apply", str(tmp_path / "m"), "--scheme", "xavier", "--out", out
        )

    def test_places(self, refused: Refused, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = ("apply", str(llama), "--scheme", "xavier", "--out")
        assert "holds files already" in refused(*arguments, str(llama))
        assert "is a file" in refused(*arguments, str(llama / "config.json"))
        assert "there is no directory" in refused(*arguments, str(tmp_path / "no" / "such"))
        monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
        assert "not writable" in refused(*arguments, str(tmp_path / "out"))

    def test_a_fold_that_changed_the_function(
        self, command: Command, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert command("apply", llama, "--scheme", "normalised-skip", "--out", tmp_path / "m").status == 0

        def wrong(model: Any) -> Any:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.01)
            return fold(model)

        fold = sp.fold
        monkeypatch.setattr("signalprop.repair.fold", wrong)
        status, out, err = command("fold", tmp_path / "m", "--out", tmp_path / "out")
        assert (status, out) == (1, "")
        assert "outputs differ by 1.0e-02" in err and err.count("\n") == 1


def test_an_empty_directory_will_do(command: Command, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert command("apply", llama, "--scheme", "xavier", "--out", tmp_path / "m").status == 0
    assert (tmp_path / "m" / "signalprop.json").is_file()


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_network_that_was_built_goes_through_the_commands(kind: Any, command: Command, tmp_path: Path) -> None:
    a = sp.Architecture(kind=kind, n_layers=2, d_model=16, n_heads=2, d_ff=32, seq_len=12, vocab_size=60)
    source = tmp_path / "final"
    sp.save(sp.build(sp.scheme("lns")(a.replace(norm_placement="pre")), seed=3), source)
    found = result_of(command, "diagnose", str(source), "--tokens", "48")
    assert (found["model"], len(found["signal"])) == ("final", 2)
    assert result_of(command, "check", str(source), "--scheme", "lns")["ok"]
    kept, fresh = (result_of(command, "measure", str(source), "--seed", "3", *more) for more in ([], ["--random-init"]))
    assert kept["sublayers"] == fresh["sublayers"]
    other = result_of(command, "measure", str(source), "--seed", "4", "--random-init")
    assert kept["sublayers"] != other["sublayers"]
    for verb, *more in (("fit",), ("apply", "--scheme", "xavier")):
        status, _, err = command(verb, str(source), *more, "--out", str(tmp_path / verb))
        assert (status, err.count("\n")) == (2, 1) and "this Transformer was built by signalprop" in err
        assert not (tmp_path / verb).exists()
