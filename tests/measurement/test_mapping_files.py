"""A mapping as a family with differences, and as a file: against mappings by hand, families, and wrong claims."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM, OlmoConfig, OlmoForCausalLM

import signalprop as sp
from applied import vanilla
from commandline import Command
from own_model import own_ids, own_model
from signalprop.attachment import mapping_like, read_mapping, write_mapping
from signalprop.attachment.families import mapping_for
from signalprop.data import Batch
from signalprop.errors import InputError

SIZE = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 24, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN = {
    "h": "blocks", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "attn.resid_dropout": "attn",
    "mlp.c_fc": "up", "mlp.c_proj": "down", "mlp.dropout": "down", "lm_head": "head", "input_ids": "ids",
}  # fmt: skip
OWN_SIZES = {
    "n_layer": 3, "n_embd": 32, "n_head": 4, "n_inner": 64, "vocab_size": 50, "n_positions": 16, "resid_pdrop": 0.0,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
GRANITE = {"like": "llama", "sublayers": {"attention": {"multiplier": 0.2}, "feed_forward": {"multiplier": 0.2}}}


def granite() -> nn.Module:
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZE, residual_multiplier=0.2)).eval()


def numbers(model: nn.Module, mapping: Any, ids: str = "input_ids") -> dict[str, Any]:
    profile = sp.measure(model, {ids: own_ids()}, mapping=mapping, backward=False)
    return {name: series.variance for name, series in profile.forward.items()}


def test_a_model_of_your_own_as_a_family_with_other_names() -> None:
    model = own_model()
    like = mapping_like(model, "gpt2", names=OWN, config=OWN_SIZES)
    by_hand = model.signalprop_mapping()
    ours, theirs = numbers(model, like, "ids"), numbers(model, by_hand, "ids")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    one, other = sp.read_parametrization(model, like), sp.read_parametrization(model, by_hand)
    assert all(np.array_equal(one.weights[role], other.weights[role]) for role in other.weights)
    assert like.architecture.head == "lm" and not like.architecture.tied_embeddings
    ids = own_ids().numpy()
    batch = Batch(tokens=ids, targets=ids)  # fed by the name of the model's argument
    assert np.array_equal(sp.measure(model, batch, mapping=like).forward["branch"].variance, theirs["branch"])


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt5", {}, "no such family"),
        ("gpt2", {}, "OwnGPT has no 'h', where gpt2 has it; it has blocks"),
        ("gpt2", {"names": {"h": "blocks"}}, r"layer 0 of OwnGPT has no 'attn.resid_dropout'.* attn.proj"),
        ("gpt2", {"names": OWN}, r"3 layers with 6 sublayers, its architecture 24; give .* config="),
        ("gpt2", {"names": OWN, "config": {**OWN_SIZES, "n_inner": 99}}, r"feed-forward up: the weight is 64 x 32"),
        ("gpt2", {"names": OWN, "config": OWN_SIZES, "sublayers": {"mlp": {}}}, "there is no kind 'mlp'"),
    ],
)
def test_what_does_not_fit_says_what_to_give(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        mapping_like(own_model(), family, **changes)


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit", "gpt_neox", "qwen3"])
def test_a_file_says_what_the_family_says(family: str, tmp_path: Path) -> None:
    model = vanilla(family, 2).eval()
    before = mapping_for(model, None)
    write_mapping(before, model, tmp_path / "mapping.json")
    after = read_mapping(tmp_path / "mapping.json", model)
    assert list(after.sublayers) == list(before.sublayers)
    assert (after.architecture, after.arguments, after.embedding) == (
        before.architecture, before.arguments, before.embedding
    )  # fmt: skip
    assert sp.read_parametrization(model, after).to_json() == sp.read_parametrization(model, before).to_json()
    text = json.loads((tmp_path / "mapping.json").read_text())
    assert family == "t5" or len(text["sublayers"]) == 2  # both layers are alike


def test_a_found_mapping_is_written_and_one_with_weights_predicts(command: Command, tmp_path: Path) -> None:
    model = granite()
    model.save_pretrained(tmp_path / "granite")
    found, like = str(tmp_path / "found.json"), tmp_path / "like.json"
    status, out, err = command("anatomy", str(tmp_path / "granite"), "--write", found)
    assert status == 0 and out.rstrip().endswith(found), err
    ours, theirs = numbers(model, read_mapping(found, model)), numbers(model, None)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    like.write_text(json.dumps(GRANITE))
    text = tmp_path / "text"
    text.write_text(" ".join(f"word{i * i % 50}" for i in range(400)))
    asked = ("compare", str(tmp_path / "granite"), "--mapping", str(like), "--seeds", "1", "--seq-len", "16")
    status, out, err = command(*asked, "--text", str(text), "--fidelity", "moments", "--no-report", "--json", "-")
    assert status == 0, err
    agreement = {item["quantity"]: item for item in json.loads(out)["agreement"]}
    assert agreement["forward variance"]["median"] < 0.2
    table = sp.read_parametrization(model, read_mapping(like, model))
    assert np.array_equal(table.branch, np.full(6, 0.2))


def test_a_scheme_on_a_mapping_from_a_file_is_saved_with_it(command: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    OlmoForCausalLM(OlmoConfig(**SIZE)).save_pretrained(tmp_path / "olmo")
    mapping = tmp_path / "olmo.json"
    mapping.write_text('{"like": "llama", "architecture": {"norm": "layernorm"}}')
    asked = ("apply", str(tmp_path / "olmo"), "--mapping", str(mapping), "--scheme", "lns")
    status, _, err = command(*asked, "--out", str(tmp_path / "lns"))
    assert status == 0, err
    status, _, err = command("check", str(tmp_path / "lns"), "--scheme", "lns")
    assert status == 0, err
    status, out, err = command("fold", str(tmp_path / "lns"), "--out", str(tmp_path / "folded"), "--json", "-")
    assert status == 0 and json.loads(out)["fold_error"] < 1e-6, err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"like": "llama"}', "the model multiplies the branch by 0.2 times what the mapping says"),
        (json.dumps({**GRANITE, "architecture": {"norm": "layernorm"}}), "its norm is a rmsnorm, not a layernorm"),
        (json.dumps({**GRANITE, "gain_offset": 1.0}), r"the gain of its norm is 0 \+ weight"),
        ('{"like": "llama", "name": {}}', "did you mean names"),
        ('{"like": "llama", "sublayers": {"attention": {"multiplier": "x.y"}}}', "has no 'x.y'"),
        ('{"architecture": {}, "sublayers": [{"norm": "model.norm"}]}', "a sublayer has no 'branch'"),
        (
            '{"architecture": {}, "sublayers": [{"layers": "model.layers.5-2", "branch": "a"}]}',
            "the first and the last",
        ),
        ("[]", "expected an object"),
    ],
)
def test_wrong_files_are_refused_in_a_line(
    refused: Callable[..., str], tmp_path: Path, content: str, says: str
) -> None:
    granite().save_pretrained(tmp_path / "granite")
    (tmp_path / "mapping.json").write_text(content)
    error = refused("measure", str(tmp_path / "granite"), "--mapping", str(tmp_path / "mapping.json"))
    assert re.search(says, error) and "mapping.json" in error, error


class Functional(nn.Module):
    """A feed-forward that is no module: nothing outputs what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Parameter(torch.randn(16, 32) / 4), nn.Parameter(torch.randn(32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.norm(x) @ self.up).relu() @ self.down


def test_what_was_not_understood_is_left_empty_to_be_filled_in(tmp_path: Path) -> None:
    from signalprop.attachment.found import mapping_of_anatomy

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleList([Functional(), Functional()]))
    model.forward = lambda x: model[1][1](model[1][0](model[0](x)))  # type: ignore[method-assign]
    found = sp.anatomy(model, {"x": torch.randn(1, 5, 16)})
    write_mapping(mapping_of_anatomy(model, found, begun=True), model, tmp_path / "begun.json")
    row = json.loads((tmp_path / "begun.json").read_text())["sublayers"][0]
    assert row["branch"] == "" and row["norm"] == "{layer}.norm" and row["layers"] == "1.0-1"
    with pytest.raises(InputError, match=r"1\.0-1: a sublayer has no 'branch'; name the module whose output is added"):
        read_mapping(tmp_path / "begun.json", model)
