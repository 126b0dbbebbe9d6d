"""`advise`: what it says of sick and of healthy networks, and that it contradicts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commandline import Command, result_of

import signalprop as sp
from signalprop.advice import made_by, uneven
from signalprop.report import findings as texts
from signalprop.results.findings import Finding, Findings, Unhealthy
from signalprop.schemes import SCHEMES


def deep_post_norm() -> sp.Architecture:
    return sp.Architecture.preset("tgs", n_layers=48, norm_placement="post")


def test_a_sick_network_gets_changes_that_cure_it() -> None:
    advice = sp.advise(deep_post_norm(), scheme="xavier")
    assert [item.name for item in advice.findings] == ["vanishing gradient"]
    assert len(advice.options) > 3
    assert advice.options[0].findings == ()
    assert [item.rank for item in advice.options] == sorted(item.rank for item in advice.options)
    text = str(advice)
    assert max(map(len, text.splitlines())) <= 100
    assert "not known from here" in text


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama-130m", "t5-small", "vit-small"])
def test_nothing_is_wrong_with_models_that_train(name: str) -> None:
    advice = sp.advise(name)
    assert advice.findings == () and advice.options == ()
    assert "nothing" in str(advice)
    frame = advice.to_dataframe()
    assert len(frame) == 0 and {"change", "gradient_ratio"} <= set(frame.columns)


def test_a_large_ratio_that_is_not_wrong_is_beside_those_of_models_that_train() -> None:
    text = str(sp.advise("gpt2", scheme="running-mean"))
    assert "gradient ratio" in text and "these train: OPT 125M" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_change_is_predicted_for_this_very_network() -> None:
    """What makes it sick stays where the change does not touch it."""
    table = sp.scheme("xavier")(sp.Architecture.preset("gpt2", n_layers=12, seq_len=64))
    hot = table.with_columns(score_scale=table.score_scale * 64)
    advice = sp.advise(hot)
    assert "one-hot attention" in [item.name for item in advice.findings]
    again = made_by(hot, "pre-norm and xavier") if "pre-norm and xavier" in [o.name for o in advice.options] else None
    assert again is None  # it is pre-norm
    cured = made_by(hot, advice.options[0].name)
    assert sp.predict(cured).findings == advice.options[0].findings == ()
    with pytest.raises(sp.InputError, match="no change 'nonsense'"):
        made_by(hot, "nonsense")


def test_findings_are_values() -> None:
    profile = sp.predict(deep_post_norm(), scheme="xavier")
    (found,) = profile.findings
    assert isinstance(found, Finding) and found.bound == 0.01 and found.value is not None and found.value < 0.01
    assert found.evidence and found.confidence
    assert profile.to_json()["findings"][0]["name"] == found.name
    assert sp.Profile.from_json(json.loads(json.dumps(profile.to_json()))).findings == profile.findings
    profile.findings.raise_if("fault")
    with pytest.raises(Unhealthy, match="vanishing gradient") as raised:
        profile.findings.raise_if("warning")
    assert raised.value.findings == profile.findings
    assert isinstance(profile.findings + (found,), Findings)  # noqa: RUF005 - that it stays one


def test_exit_status_of_findings(command: Command) -> None:
    sick = ["predict", "tgs", "--layers", "48", "--norm", "post", "--scheme", "xavier"]
    assert command(*sick).status == 0
    assert command(*sick, "--fail-on", "warning").status == 3
    assert command(*sick, "--fail-on", "fault").status == 0
    assert command("predict", "gpt2", "--fail-on", "note").status == 0
    status, _, err = command(*sick, "--fail-on", "nonsense")
    assert status == 2 and "expected fault, warning, note" in err


def test_advise_as_a_command(command: Command) -> None:
    said = result_of(command, "advise", "tgs", "--layers", "48", "--norm", "post", "--scheme", "xavier")
    assert said["findings"][0]["name"] == "vanishing gradient" and said["options"][0]["python"]
    assert "wrong               nothing" in command("advise", "gpt2").out


def test_advise_reads_recipes(command: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nscheme = "xavier"\narchitecture = {preset = "tgs", n_layers = 48, norm_placement = "post"}\n'
        "[data]\nseq_len = 16\n"
    )
    said = result_of(command, "advise", str(recipe))
    assert said["findings"][0]["name"] == "vanishing gradient" and str(recipe) in said["seen"]
    assert said["profile"]["architecture"]["seq_len"] == 16
    recipe.write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    status, _, err = command("advise", str(recipe))
    assert status == 2 and "model.architecture" in err and "config.json" in err


@pytest.mark.slow
def test_advise_reads_checkpoints(command: Command, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    assert "by their sizes" in result_of(command, "advise", str(tmp_path / "model"))["seen"]
    with torch.no_grad():
        model.model.norm.weight[0] = 2.0
        model.model.layers[1].mlp.down_proj.weight *= 3e4
    model.save_pretrained(tmp_path / "model")
    said = result_of(command, "advise", str(tmp_path / "model"))
    assert "trained weights" in said["seen"] and "exploding gradient" in [item["name"] for item in said["findings"]]
    assert said["profile"]["scheme"] == "huggingface"  # changes are predicted for its start
    assert sp.advise(tmp_path / "model").to_json() == said


@pytest.mark.slow
def test_findings_of_a_monitor_are_values_and_advise_reads_its_log(command: Command, tmp_path: Path) -> None:
    import torch

    table = sp.scheme("xavier")(
        sp.Architecture(
            kind="decoder",
            n_layers=24,
            d_model=16,
            n_heads=2,
            seq_len=8,
            vocab_size=50,
            norm_placement="post",
            dropout=0.0,
        )
    ).with_columns(skip=0.5)
    model, ids = sp.build(table, seed=0), torch.arange(16).reshape(2, 8)
    log = tmp_path / "log.jsonl"
    with sp.SignalMonitor(model, every=1, jsonl=log, scores=False) as monitor:
        torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
        monitor.step()
    (found,) = (item for item in monitor.findings if item.name == "vanishing gradient")
    assert found.step == 1 and found.value is not None and found.bound is not None and found.value < found.bound
    said = result_of(command, "advise", str(log))
    assert monitor.findings.to_json() == said["findings"]
    assert found.value in [item.get("value") for item in said["findings"]]
    assert said["options"] and "up to step 1" in said["seen"]
    assert command("advise", str(log), "--fail-on", "warning").status == 3
    log.write_text('{"step": 1, "warnings": []}\n')
    assert "names no network" in command("advise", str(log)).err


SCHEMES_TRIED = ("xavier", "fixed", "gpt2", "deepscalelm", "lns", "huggingface", "deepnorm", "pytorch")


def random_network(seed: int) -> Any:
    """A table of random numbers, small enough to predict in milliseconds."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    a = sp.Architecture(
        kind=pick("encoder", "decoder"), n_layers=pick(2, 6, 24), d_model=pick(64, 256), n_heads=4, seq_len=16,
        norm_placement=pick("pre", "post", "sandwich", "none"), qk_norm=pick(False, True), vocab_size=1000,
        activation=pick("relu", "gelu"),
    )  # fmt: skip
    name = pick(*SCHEMES_TRIED)
    try:
        table = sp.scheme(name)(a)
    except sp.InputError:
        return None
    return table.with_columns(
        skip=table.skip * pick(1.0, 1.0, 0.5, 1.3), branch=table.branch * pick(1.0, 1.0, 1e-5, 3.0),
        score_scale=table.score_scale * pick(1.0, 1.0, 30.0),
    )  # fmt: skip


def contradictions(seed: int) -> list[str]:
    """What a prediction says that does not go together."""
    table = random_network(seed)
    if table is None:
        return []
    profile = sp.predict(table, fidelity="moments")
    lines = "\n".join(texts.summary(profile))
    found = []
    if profile.findings and "these train" in lines:
        found.append("a warning beside known models")
    for item in profile.findings:
        tried = item.remedy.removeprefix("try ").split(" or ")
        if profile.scheme in tried and profile.scheme in SCHEMES:
            found.append(f"{item.name} proposes the scheme that is there")
        if "QK-norm" in tried and table.architecture.qk_norm:
            found.append(f"{item.name} proposes QK-norm, which is there")
        before = {"pre", "sandwich"} & set(table.architecture.placements)
        if before and ("pre-norm" in tried or "a norm before every branch" in tried):
            found.append(f"{item.name} proposes a norm that is there")
    return found


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 2060), marks=pytest.mark.slow)], ids=len)
def test_no_line_contradicts_another(seeds: range) -> None:
    assert [found for seed in seeds for found in contradictions(seed)] == []


def test_trained_weights_are_said_to_be_taken_as_random() -> None:
    import torch

    model = sp.build(sp.scheme("xavier")(sp.Architecture.preset("gpt2", n_layers=2, d_model=32, n_heads=2, seq_len=16)))
    assert not any("trained" in note for note in sp.predict(model).notes)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "norm" in name and p.ndim == 1)[0] = 1.5
    assert any("trained" in note for note in sp.predict(model).notes)


def test_deepnorm_is_for_post_norm() -> None:
    tables = {
        a: sp.scheme("xavier")(sp.Architecture.preset("tgs", n_layers=2, norm_placement=a)) for a in ("pre", "post")
    }
    assert made_by(tables["post"], "deepnorm").scheme == "deepnorm"
    with pytest.raises(sp.InputError, match="deepnorm"):
        made_by(tables["pre"], "deepnorm")


def test_an_encoder_with_little_gradient_counts_as_uneven() -> None:
    a = sp.Architecture.preset("whisper-small", n_layers=4, n_decoder_layers=4, d_model=64, seq_len=32, target_len=16)
    few, even = (sp.predict(sp.scheme(name)(a)) for name in ("takase", "xavier"))
    assert few.gradient_ratio < 0.01 * even.gradient_ratio
    assert uneven(few) > uneven(even)
