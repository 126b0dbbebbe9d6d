"""`signalprop apply` and `signalprop fold`: checkpoints in, checkpoints out, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import signalprop as sp
import tiny
from commandline import Command, Refused, result_of
from gguf_file import write_gguf
from signalprop.cli import run

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


def test_a_half_precise_checkpoint_gets_the_rounded_draws_and_keeps_what_was_trained(
    command: Command, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    drawn = LlamaForCausalLM(LlamaConfig(**LLAMA))
    trained = LlamaForCausalLM(LlamaConfig(**LLAMA))
    with torch.no_grad():
        trained.model.layers[0].mlp.down_proj.weight += 0.05
    for name, model in (("drawn", drawn), ("trained", trained)):
        model.bfloat16().save_pretrained(tmp_path / name)
        said = result_of(command, "apply", str(tmp_path / name), "--scheme", "deepscalelm", "--change-function",
                         "--out", str(tmp_path / f"deep-{name}"))  # fmt: skip
        expected = model.float()
        sp.apply(expected, "deepscalelm", seed=0, initialize=name == "drawn", change_function=True)
        assert said["weights"] == ("drawn" if name == "drawn" else "kept")
        found = sp.load(tmp_path / f"deep-{name}").state_dict()
        assert all(torch.equal(found[path], t.bfloat16()) for path, t in expected.state_dict().items())


def test_the_anatomy_of_a_half_precise_checkpoint_is_that_in_single_precision(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "single")
    single = result_of(command, "anatomy", str(tmp_path / "single"))
    model.bfloat16().save_pretrained(tmp_path / "half")
    read: list[Any] = []
    monkeypatch.setattr("signalprop.cli.loading.load_model", lambda place, **_: read.append(place) or model.float())
    half = result_of(command, "anatomy", str(tmp_path / "half"))
    assert not read and single["numbers"] and not half["numbers"]
    assert half["proved"] and half["weights"]["proved"] and half["error"] < 1e-5

    def said(found: Any) -> Any:
        stacks = [{**s, "layers": [{**layer, "branches": [
            {k: v for k, v in b.items() if k not in ("error", "rounding")} for b in layer["branches"]
        ]} for layer in s["layers"]]} for s in found["stacks"]]  # fmt: skip
        return stacks, sorted((n["path"], n["kind"], n["offset"]) for n in found["norms"])

    assert said(half) == said(single)
    (tmp_path / "half" / "model.safetensors").unlink()
    model.model.bfloat16().save_pretrained(tmp_path / "half")  # without its head: its weights have to be read
    LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "half")
    assert result_of(command, "anatomy", str(tmp_path / "half"))["numbers"] and read


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


# --- a .gguf file where a directory is expected: measured and looked into as the model that it was made of


def test_a_gguf_file_is_measured_as_its_model(command: Command, refused: Callable[..., str], tmp_path: Path) -> None:
    words = " ".join(f"word{i * i % 50}" for i in range(400))
    bpe = tiny.bpe(words, 300)
    model = tiny.llama(
        vocab_size=bpe.get_vocab_size(), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, rms_norm_eps=1e-6,
    ).eval()  # fmt: skip
    (tmp_path / "words").write_text(words)
    model.save_pretrained(tmp_path / "plain")
    write_gguf(tmp_path / "model.gguf", model, bpe)
    options = ("--data", str(tmp_path / "words"), "--seq-len", "16", "--json", "-")
    found = []
    for source in ("plain", "model.gguf"):
        status, out, err = command("measure", str(tmp_path / source), *options)
        assert status == 0, err
        found.append(sp.Profile.from_json(json.loads(out)))
    for where in ("branch", "stream_out"):
        plain, quantised = (profile.forward[where].variance for profile in found)
        np.testing.assert_allclose(quantised, plain, rtol=1e-5)
    status, out, err = command("anatomy", str(tmp_path / "model.gguf"))
    assert status == 0 and "4 of 4 sums" in out, err
    assert "leave --random-init out" in refused("measure", str(tmp_path / "model.gguf"), "--random-init")


# --- `--data FILE.npz`: the file's sequences are what the model reads


IDS = np.arange(40).reshape(2, 20) % 37


@pytest.fixture
def made(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "ids.npz", input_ids=IDS)
    return tmp_path


def test_diagnose(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made / "d.json"
    model_and_inputs = [str(made / "model"), "--data", str(made / "ids.npz")]
    assert run(["diagnose", *model_and_inputs, "--no-trials", "--json", str(out)]) == 0
    model = GPT2LMHeadModel.from_pretrained(made / "model")
    loss = torch.nn.functional.cross_entropy
    with torch.no_grad():
        logits = model(torch.as_tensor(IDS)).logits
    wanted = loss(logits[:, :-1].flatten(0, 1), torch.as_tensor(IDS[:, 1:]).flatten())
    assert json.loads(out.read_text())["loss"]["value"] == pytest.approx(float(wanted), rel=1e-5)
    for command in ("diagnose", "measure", "compare"):
        assert run([command, *model_and_inputs, "--seq-len", "8"]) == 2
        assert "leave out --seq-len" in capsys.readouterr().err


def test_fold_and_fit(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2LMHeadModel.from_pretrained(made / "model")
    sp.apply(model, "lns", redraw=True)
    sp.save(model, made / "applied")
    inputs = ["--data", str(made / "ids.npz")]
    assert run(["fold", str(made / "applied"), *inputs, "--out", str(made / "folded")]) == 0
    result = made / "f.json"
    assert run(["fit", str(made / "folded"), *inputs, "--out", str(made / "fitted"), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["read"].endswith("ids.npz")
    (made / "ids.pt").write_bytes(b"")
    for command, source in (("fold", "applied"), ("fit", "folded"), ("diagnose", "folded")):
        out = [] if command == "diagnose" else ["--out", str(made / "no")]
        capsys.readouterr()
        assert run([command, str(made / source), "--data", str(made / "ids.pt"), *out]) == 2
        assert "expected a .safetensors or .npz file" in capsys.readouterr().err and not (made / "no").exists()
