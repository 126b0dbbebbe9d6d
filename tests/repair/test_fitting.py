"""`fit`: models of every family that overflow half precision, in other units; and what no unit can change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalprop as sp
from applied import difference, vanilla
from choice import some
from commandline import Command
from models.test_families import batch_for, theirs
from signalprop.attachment.anatomy import attach
from signalprop.errors import InputError
from signalprop.hooks import Hooks, logits_of
from signalprop.measurement.measuring import arguments_of
from signalprop.measurement.passes import output_of
from signalprop.repair.fitting import fit
from signalprop.repair.largest_activations import moves_inner
from signalprop.streams.proof import gain_and_bias

TOP = 65504.0
# A fused map, RMS norms with gains - 1 and norms behind branches, two stacks; the others are slow tests.
FAST = ("gpt2", "gemma3", "t5-gated")
FITTED = some((*FAST, "llama", "vit", "qwen3", "gemma", "gpt_neox", "phi", "falcon-grouped", "mistral"), FAST)
HELD = {
    "bert": "layer 0 attention is post-norm: its norm resets the stream's scale",
    "opt-open": "no norm follows the last layer",
    "whisper": "convolutions with an activation",
}


def exact_logits(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """The first output of a float64 model, its RMS norms in float64 too (transformers has them in float32)."""
    attached, hooks = attach(model, None, arguments), Hooks()
    offset = attached.mapping.gain_offset

    def rms(norm: Any, args: Any, kwargs: Any, _: Any) -> Tensor:
        x = (*args, *kwargs.values())[0]
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        return torch.nn.functional.rms_norm(x, x.shape[-1:], gain_and_bias(norm)[0] + offset, eps)

    for norm in attached.norm_modules if attached.mapping.architecture.norm == "rmsnorm" else ():
        hooks.after(norm, rms)
    with torch.no_grad(), hooks:
        return logits_of(output_of(model.eval(), arguments))


def overflowing(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in float64 whose stream is beyond fp16, and all that a factor per layer can move; and what it reads."""
    model = theirs(name)
    attached = attach(model)
    with torch.no_grad():
        for row in attached.rows:
            if moves_inner(attached, row):
                held = row.weights["value" if row.kind.attends else "up"]
                (held.weight.T if held.transposed else held.weight)[held.rows or slice(None)] *= 3e5
            last = row.post_norm or row.weights["output" if row.kind.attends else "down"].holder
            last.weight.mul_(1e5 if row.post_norm or not moves_inner(attached, row) else 1)
    return model, arguments_of(attached, batch_for(attached.mapping))


@pytest.mark.parametrize("name", FITTED)
def test_everything_fits_and_the_function_stays(name: str) -> None:
    model, arguments = overflowing(name)
    before = exact_logits(model, arguments)
    found = fit(model, arguments, margin=1)
    assert found.stream > 1 and found.inner and found.matched
    assert max(one.before for one in found.activations if one.what == "stream") > TOP
    assert max(one.before for one in found.activations if one.what == "mixed values") > TOP
    assert found.within and not found.over
    assert max(one.after for one in found.activations) <= TOP / 2
    assert difference(exact_logits(model, arguments), before) < 1e-10
    again = fit(model, arguments, margin=1)
    assert not again.changed and again.within


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision_has_numbers_again(name: str) -> None:
    model, arguments = overflowing(name)
    before = exact_logits(model, arguments)
    with torch.no_grad():
        assert not model.half()(**arguments).logits.isfinite().all()
        fitted, _ = overflowing(name)
        fit(fitted, arguments)
        assert difference(fitted.half()(**arguments).logits.double(), before) < 0.1


def test_a_function_that_its_epsilon_would_make_another_is_left_as_it_was() -> None:
    model, arguments = overflowing("opt")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"stays at 1000 .* a smaller margin divides by less; nothing was changed"):
        fit(model, arguments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_curved_activation_makes_is_reported() -> None:
    model, arguments = overflowing("gpt2")
    with torch.no_grad():
        attach(model).rows[1].weights["up"].weight.mul_(1e6)
    found = fit(model, arguments)
    over = {(one.where, one.what) for one in found.over}
    assert {("layer 0 feed-forward", "up"), ("layer 0 feed-forward", "hidden")} <= over
    assert all(what in ("up", "hidden", "final norm") for _, what in over)  # a tied head's norm is multiplied
    assert not found.within


@pytest.mark.parametrize("name", HELD)
def test_where_the_stream_is_held_branches_are_moved_alone(name: str) -> None:
    """Values, and up where its activation allows it, are brought below; what stays says so, and the function stays."""
    model, arguments = overflowing(name)
    before = exact_logits(model, arguments)
    found = fit(model, arguments, margin=1)
    assert found.stream == 1 and found.held.startswith(HELD[name]) and found.inner
    mixed = [one for one in found.activations if one.what == "mixed values"]
    assert max(one.before for one in mixed) > TOP > max(one.after for one in mixed)
    assert difference(exact_logits(model, arguments), before) < 1e-10


def test_experts_and_gated_convolutions_are_divided_with_the_stream() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 99}
    torch.manual_seed(0)
    experts = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    experts.set_experts_implementation("eager")
    convolved = Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    for model, last in ((experts, "experts.down_proj"), (convolved, "out_proj.weight")):
        with torch.no_grad():
            for name, weight in model.eval().double().named_parameters():
                weight.mul_(1e8 if name.endswith(last) else 1)
        arguments = {"input_ids": torch.arange(24).reshape(2, 12)}
        before = exact_logits(model, arguments)
        found = fit(model, arguments, margin=1)
        assert max(one.before for one in found.activations if one.what == "stream") > TOP
        assert found.stream > 1 and found.within and difference(exact_logits(model, arguments), before) < 1e-10


@pytest.mark.parametrize(("family", "implementation"), [("Mixtral", "eager"), ("Mixtral", None), ("GptOss", "eager")])
def test_what_experts_make_inside_of_their_module_is_seen(family: str, implementation: str | None) -> None:
    """Up and down take a factor where up is linear; GPT-OSS multiplies by 1 + up, so that it is told instead."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {
        "intermediate_size": 64,
        "vocab_size": 99,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    if implementation is not None:
        model.set_experts_implementation(implementation)
        model.double()
    read: list[Tensor] = []
    with torch.no_grad():
        for name, weight in model.named_parameters():
            up = slice(1, None, 2) if family == "GptOss" else slice(64, None)
            if name.endswith("experts.gate_up_proj"):
                (weight.mT if family == "GptOss" else weight)[:, up].mul_(1e7)
            weight.mul_(1e-7 if name.endswith("experts.down_proj") else 1)
    arguments = {"input_ids": torch.arange(24).reshape(2, 12)}
    with torch.no_grad():
        before = model(**arguments).logits
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    found = fit(model, arguments, margin=1)
    made = {(one.where, one.what): one for one in found.activations}
    weight = experts.gate_up_proj.mT if family == "GptOss" else experts.gate_up_proj
    with torch.no_grad():
        after = max(float((read[-1] @ one[up].mT).abs().max()) for one in weight)  # of all experts, chosen or not
    at = made["layer 1 experts", "expert_up"]
    assert at.before > TOP and after / 4 < at.after <= after * (1 + 1e-6)
    with torch.no_grad():
        assert difference(model(**arguments).logits, before) < (1e-10 if implementation else 1e-5)
    if family == "Mixtral":
        assert found.inner["layer 1 experts"] > 1 and found.within
        inside = made["layer 1 experts", "input of expert_down"]
        assert inside.after == pytest.approx(inside.before / found.inner["layer 1 experts"], rel=1e-5)
    else:
        assert not found.inner and at in found.over


def test_a_tied_head_behind_a_norm_of_its_own() -> None:
    """The norm that the head reads is multiplied, wherever it stands, not the one after the last layer."""
    from transformers import MegatronBertConfig, MegatronBertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = MegatronBertForMaskedLM(MegatronBertConfig(vocab_size=99, **sizes)).eval().double()
    arguments = {"input_ids": torch.arange(24).reshape(2, 12)}
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.output.dense.weight.mul_(1e8)
    before = exact_logits(model, arguments)
    found = fit(model, arguments)
    assert found.stream > 1 and not found.over
    assert not found.matched and "outside the stream, whose input stays: cls.predictions.transform" in found.epsilon
    assert model.config.layer_norm_eps == model.cls.predictions.transform.LayerNorm.eps == 1e-12 / found.stream**2
    assert difference(exact_logits(model, arguments), before) < 1e-9  # the head's norm has the smaller epsilon


def test_norms_on_branches_alone() -> None:
    """Maps that read the stream are multiplied, norms of branches divided; QK-norm and its epsilon go along."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = Olmo2ForCausalLM(Olmo2Config(vocab_size=99, rms_norm_eps=1e-3, **sizes)).eval().double()
    arguments = {"input_ids": torch.arange(24).reshape(2, 12)}
    with torch.no_grad():
        model.model.layers[1].post_feedforward_layernorm.weight.mul_(1e10)
    before = exact_logits(model, arguments)
    found = fit(model, arguments)
    assert found.stream > 1 and not found.over and found.matched and not found.held
    assert difference(exact_logits(model, arguments), before) < 1e-12
    assert model.config.rms_norm_eps == 1e-3 / found.stream**2


def test_a_first_layer_without_a_norm() -> None:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = ModernBertForMaskedLM(ModernBertConfig(vocab_size=99, norm_eps=1e-12, pad_token_id=0, **sizes))
    model, arguments = model.eval().double(), {"input_ids": torch.arange(24).reshape(2, 12)}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.Wo.weight.mul_(1e8)
    before = exact_logits(model, arguments)
    found = fit(model, arguments)
    assert found.stream > 1 and not found.over and not found.held
    assert difference(exact_logits(model, arguments), before) < 1e-8  # the epsilon of the head's norm goes along


def test_an_output_that_would_be_another_leaves_the_model_as_it_was() -> None:
    model, arguments = overflowing("llama")
    before, eps = exact_logits(model, arguments), model.config.rms_norm_eps
    weight = model.model.embed_tokens.weight  # which something reads that no mapping names
    model.lm_head.register_forward_hook(lambda module, args, output: output + weight.sum())
    with pytest.raises(sp.InputError, match="the outputs would differ by"):
        fit(model, arguments)
    model.lm_head._forward_hooks.clear()
    assert torch.equal(exact_logits(model, arguments), before) and model.config.rms_norm_eps == eps
    assert model.model.norm.variance_epsilon == eps


class TestCommand:
    def test_a_checkpoint_in_other_units(self, command: Command, tmp_path: Path) -> None:
        model = vanilla("llama", 2, architectures=["LlamaForCausalLM"])
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight.mul_(1e5)
                layer.mlp.down_proj.weight.mul_(1e5)
        model.save_pretrained(tmp_path / "model")
        (tmp_path / "text").write_text("the stream is divided and the function stays " * 30)
        text = ("--data", str(tmp_path / "text"))
        status, out, err = command("fit", str(tmp_path / "model"), *text, "--out", str(tmp_path / "new"), "--json", "-")
        assert status == 0, err
        result = json.loads(out)
        assert result["stream"] > 1 and result["matched"] and result["within"] and not result["over"]
        assert result["error"] < 1e-10 and result["stored_error"] < 1e-10
        assert result["float16_error"]["before"] is None and result["float16_error"]["after"] < 0.1
        config = json.loads((tmp_path / "new" / "config.json").read_text())
        assert config["rms_norm_eps"] == 1e-6 / result["stream"] ** 2
        status, out, _ = command("fit", str(tmp_path / "new"), *text, "--out", str(tmp_path / "again"))
        assert status == 0 and "the model fits as it is; nothing was written" in out
        assert not (tmp_path / "again").exists()

    def test_an_epsilon_that_stays_is_why_nothing_is_written(self, command: Command, tmp_path: Path) -> None:
        model: Any = theirs("opt").float()
        with torch.no_grad():
            model.model.decoder.layers[-1].fc2.weight.mul_(1e9)
        model.save_pretrained(tmp_path / "model")
        (tmp_path / "text").write_text("the stream is divided and the function is another " * 30)
        text = ("--data", str(tmp_path / "text"))
        status, _, err = command("fit", str(tmp_path / "model"), *text, "--out", str(tmp_path / "new"))
        assert status == 2 and "the epsilon of the norms, stays at 1e-05 (the configuration has no entry for it)" in err
        assert not (tmp_path / "new").exists()
