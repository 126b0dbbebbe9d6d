"""Saving and loading: the same function bit by bit, or one line that says what is wrong with the files."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import signalprop as sp
from applied import MODELS, outputs, seal, vanilla
from own_model import OwnGPT, own_ids, own_model
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.repair.record import the_record
from signalprop.repair.saving import RECORD, TENSORS, WEIGHTS

FAMILIES = tuple(MODELS)
WARNING = "would silently leave out"


def applied(family: str, scheme: str, **options: Any) -> nn.Module:
    """An applied model whose every parameter has moved from where it started."""
    model = vanilla(family, 3).eval()
    sp.apply(model, scheme, seed=3, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A LayerScale GPT-2."""
    sp.save(applied("gpt2", "layerscale"), tmp_path / "m")
    return tmp_path / "m"


def weights_in(path: Path) -> dict[str, Tensor]:
    """What a file holds; transformers 5.3 gives the norms of a BERT that was loaded the names of old when it saves."""
    return {name.replace(".gamma", ".weight").replace(".beta", ".bias"): x for name, x in load_file(path).items()}


class TestRoundTrips:
    @pytest.mark.parametrize(
        ("scheme", "family"),
        [
            ("deepscalelm-simple", "gpt2"),
            ("layerscale", "vit"),
            *(pytest.param("layerscale", name, marks=pytest.mark.slow) for name in FAMILIES if name != "vit"),
        ],
    )
    def test_bit_by_bit(self, scheme: str, family: str, tmp_path: Path) -> None:
        model = applied(family, scheme)
        sp.save(model, tmp_path)
        again = sp.load(tmp_path)
        assert type(again) is type(model)
        assert torch.equal(outputs(again), outputs(model))
        theirs = again.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
        assert the_record(again).parametrization == the_record(model).parametrization
        assert not again.training and not hasattr(again.config, "signalprop")
        assert (tmp_path / TENSORS).is_file() == (scheme != "deepscalelm-simple")
        sp.save(again, tmp_path / "again")  # the same files again
        for name in (RECORD, "config.json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
        first, second = (weights_in(folder / WEIGHTS) for folder in (tmp_path, tmp_path / "again"))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize(
        ("family", "scheme", "options"),
        [
            ("bert", "deepnorm", {}),
            pytest.param("llama", "lns", {}, marks=pytest.mark.slow),
            ("llama", "mup", {"base_d_head": 4, "base_width": 16}),
            ("llama", "deepscalelm", {"match_eps": True, "k": 1, "trainable": "channel"}),
        ],
    )
    def test_all_that_apply_installs(self, family: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
        model = applied(family, scheme, **options)
        sp.save(model, tmp_path)
        again = sp.load(tmp_path)
        assert torch.equal(outputs(again), outputs(model))
        groups = [sp.parameter_groups(m, lr=1e-3, weight_decay=0.1) for m in (model, again)]
        for mine, theirs in zip(*groups, strict=True):
            assert {k: v for k, v in mine.items() if k != "params"} == {
                k: v for k, v in theirs.items() if k != "params"
            }

    def test_a_plain_model_out_of_an_applied_checkpoint_folds_without_a_trace(
        self, saved: Path, tmp_path: Path
    ) -> None:
        from transformers import GPT2LMHeadModel

        model = GPT2LMHeadModel.from_pretrained(saved)
        assert model.config.signalprop["scheme"] == "layerscale"  # a trace, for whoever looks
        sp.apply(model, "stable-resnet", initialize=False, change_function=True)
        sp.fold(model).save_pretrained(tmp_path / "folded")
        assert "signalprop" not in (tmp_path / "folded" / "config.json").read_text()


class TestPlainLoading:
    """User pain: an unfolded checkpoint loads as the vanilla function, without an error."""

    def test_it_is_another_function(self, tmp_path: Path) -> None:
        model = applied("llama", "normalised-skip", alpha_attention=0.7, alpha_feed_forward=0.7)
        with pytest.warns(UserWarning, match=WARNING):
            model.save_pretrained(tmp_path)
        plain, report = type(model)._vanilla.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())  # nothing that anybody would notice
        expected = outputs(model)
        assert float((outputs(plain.eval()) - expected).abs().max() / expected.abs().max()) > 0.01
        assert torch.equal(outputs(sp.load(tmp_path)), expected)

    def test_what_the_checkpoint_says(self, tmp_path: Path) -> None:
        model = applied("vit", "deepscalelm-simple")
        with pytest.warns(UserWarning, match=WARNING):
            model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["architectures"] == ["ViTForImageClassification"]
        assert config["signalprop"]["scheme"] == "deepscalelm-simple"
        assert not hasattr(model.config, "signalprop")
        vanilla("vit", 3).save_pretrained(tmp_path / "plain")
        assert load_file(tmp_path / WEIGHTS).keys() == load_file(tmp_path / "plain" / WEIGHTS).keys()
        assert {f.suffix for f in tmp_path.iterdir() if f.is_file()} == {".json", ".safetensors"}  # nothing pickled

    def test_no_warning_where_it_is_the_same_function(self, tmp_path: Path) -> None:
        model = applied("llama", "fixed")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.save_pretrained(tmp_path)
        plain = type(model)._vanilla.from_pretrained(tmp_path).eval()
        assert torch.equal(outputs(plain), outputs(model))
        assert torch.equal(outputs(sp.load(tmp_path)), outputs(model))


class TestTrainer:
    """transformers' Trainer saves by save_pretrained(state_dict=), and resumes by load_state_dict(strict=False)."""

    def trainer(self, model: nn.Module, folder: Path, steps: int) -> Any:
        pytest.importorskip("accelerate")
        from transformers import Trainer, TrainingArguments

        ids = torch.arange(12) * 5 % 50 + 3
        arguments = TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, learning_rate=0.05, logging_strategy="no",
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)

    @pytest.mark.filterwarnings("ignore")
    def test_multipliers_survive_resuming(self, tmp_path: Path) -> None:
        model = vanilla("gpt2", 2)
        sp.apply(model, "layerscale", seed=0)
        trainer = self.trainer(model, tmp_path, 2)
        trainer.train()
        checkpoint = tmp_path / "checkpoint-2"
        names = [name for name, _ in model.named_parameters() if name.endswith("multiplier")]
        trained = {name: model.get_parameter(name).detach().clone() for name in names}
        assert all(float(value.std()) > 1e-3 for value in trained.values())
        assert torch.equal(outputs(sp.load(checkpoint)), outputs(model.eval()))

        fresh = vanilla("gpt2", 2)
        sp.apply(fresh, "layerscale", seed=0)
        self.trainer(fresh, tmp_path / "b", 2).train(resume_from_checkpoint=str(checkpoint))
        assert all(torch.equal(fresh.get_parameter(name), value) for name, value in trained.items())

        # with nothing but the names that transformers knows in the file, resuming would reset them to their start
        state = {k: v for k, v in load_file(checkpoint / WEIGHTS).items() if not k.endswith("multiplier")}
        save_file(state, checkpoint / WEIGHTS, {"format": "pt"})
        broken = vanilla("gpt2", 2)
        sp.apply(broken, "layerscale", seed=0)
        start = {name: broken.get_parameter(name).detach().clone() for name in names}
        self.trainer(broken, tmp_path / "c", 2).train(resume_from_checkpoint=str(checkpoint))
        assert all(torch.equal(broken.get_parameter(name), value) for name, value in start.items())


class TestOptionsOfSaving:
    def test_a_later_save_leaves_no_old_multipliers_behind(self, saved: Path) -> None:
        model = applied("gpt2", "stable-resnet")
        sp.save(model, saved)
        assert not (saved / TENSORS).exists()
        assert torch.equal(outputs(sp.load(saved)), outputs(model))

    def test_an_upload_without_the_record_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="save first"):
            sp.save(applied("gpt2", "fixed"), tmp_path / "m", push_to_hub=True)
        assert not (tmp_path / "m").exists()

    def test_no_scheme_or_no_weights(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="carries no scheme"):
            sp.save(vanilla("gpt2"), tmp_path)
        with torch.device("meta"):
            model = OwnGPT(2)
        sp.apply(model, "xavier")
        with pytest.raises(InputError, match="not been drawn yet"):
            sp.save(model, tmp_path)


class TestOwnModules:
    @pytest.mark.parametrize("tied", [False, True])
    def test_round_trip(self, tied: bool, tmp_path: Path) -> None:
        model = own_model(tied=tied)
        sp.apply(model, "deepscalelm", k=1, trainable="scalar", seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        sp.save(model, tmp_path / "m")
        assert sorted(f.name for f in (tmp_path / "m").iterdir()) == [WEIGHTS, RECORD, TENSORS]
        again = sp.load(tmp_path / "m", own_model(tied=tied))
        assert torch.equal(again(own_ids()), model(own_ids()))
        assert (again.head.weight is again.wte.weight) == tied
        assert type(again).__name__ == "OwnGPT"

    def test_mapped_by_hand(self, tmp_path: Path) -> None:
        class Bare(OwnGPT):
            signalprop_mapping = None  # type: ignore[assignment]

        mapping = own_model().signalprop_mapping()
        model = Bare(3).eval()
        sp.apply(model, "mix-ln", mapping=mapping, seed=0)
        sp.save(model, tmp_path)
        with pytest.raises(InputError, match="mapping="):
            sp.load(tmp_path, Bare(3))
        again = sp.load(tmp_path, Bare(3).eval(), mapping=mapping)
        assert torch.equal(again(own_ids()), model(own_ids()))

    def test_mistakes(self, tmp_path: Path, saved: Path) -> None:
        model = own_model()
        sp.apply(model, "stable-resnet", seed=0)
        sp.save(model, tmp_path / "own")
        for arguments, options, says in (
            ((), {}, "holds a OwnGPT; give model="),
            ((model,), {}, "already carries a scheme"),
            ((own_model(2),), {}, "is for another network: n_layers"),
            ((own_model(affine=False),), {}, "do not fit this OwnGPT"),
            ((own_model(),), {"dtype": torch.float16}, "no options"),
        ):
            with pytest.raises(InputError, match=says):
                sp.load(tmp_path / "own", *arguments, **options)
        with pytest.raises(InputError, match="leave out model="):
            sp.load(saved, own_model())
        with pytest.raises(InputError, match="no options"):
            sp.save(model, tmp_path / "own", max_shard_size="1GB")
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="is a file"):
            sp.save(model, tmp_path / "file")


class TestDamage:
    """One line for every way in which files can be wrong."""

    def refused(self, folder: Path) -> str:
        with pytest.raises(InputError) as caught:
            sp.load(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_plain_checkpoint(self, tmp_path: Path) -> None:
        vanilla("gpt2").save_pretrained(tmp_path)
        assert (
            "plain checkpoint, without a scheme that could be loaded or folded; load it with transformers"
            in self.refused(tmp_path)
        )

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "is empty"),
            ("{", "is not JSON"),
            ("[]", "is not the record"),
            ('{"schema": "other/1"}', "is not the record"),
            ('{"schema": "signalprop/applied/7"}', "another version"),
            ('{"schema": "signalprop/applied/1"}', "class_name"),
        ],
    )
    def test_a_damaged_record(self, saved: Path, content: str, says: str) -> None:
        (saved / RECORD).write_text(content)
        assert says in self.refused(saved)

    def changed(self, folder: Path, **values: Any) -> None:
        record = json.loads((folder / RECORD).read_text())
        (folder / RECORD).write_text(json.dumps(record | values))

    def test_a_record_that_was_edited(self, saved: Path) -> None:
        record = json.loads((saved / RECORD).read_text())
        record["parametrization"]["sublayers"][0]["branch"] = 7.0
        self.changed(saved, **record)
        assert "has been changed" in self.refused(saved)
        self.changed(saved, parametrization={"schema": "signalprop/parametrization/1"})
        seal(saved)
        assert "signalprop.json: " in self.refused(saved)

    def test_another_model_saved_over_it(self, saved: Path) -> None:
        vanilla("gpt2", 3).save_pretrained(saved)
        assert "another model was saved over it" in self.refused(saved)

    def test_multipliers_of_another_save(self, saved: Path, tmp_path: Path) -> None:
        other = applied("gpt2", "layerscale", epsilon=0.3)
        sp.save(other, tmp_path / "other")
        shutil.copy(tmp_path / "other" / TENSORS, saved / TENSORS)
        assert "another model was saved over it" in self.refused(saved)

    def test_missing_and_damaged_tensors(self, saved: Path) -> None:
        content = (saved / TENSORS).read_bytes()
        (saved / TENSORS).write_bytes(content[:40])
        assert f"cannot read {saved / TENSORS}" in self.refused(saved)
        (saved / TENSORS).unlink()
        assert "not complete" in self.refused(saved)

    def test_missing_and_damaged_weights(self, saved: Path) -> None:
        state = load_file(saved / WEIGHTS)
        save_file({k: v for k, v in state.items() if "h.1.mlp" not in k}, saved / WEIGHTS, {"format": "pt"})
        assert "lack transformer.h.1.mlp" in self.refused(saved)
        (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:100])
        assert "cannot load the weights" in self.refused(saved)
        (saved / WEIGHTS).unlink()
        assert "cannot load the weights" in self.refused(saved)


def built(scheme: str, dtype: torch.dtype = torch.float32, **fields: Any) -> nn.Module:
    """A network that `build` made, whose every parameter has moved from where it started."""
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "vocab_size": 40, "seq_len": 8}
    a = Architecture.preset("gpt2", **(shape | fields))
    model = sp.build(sp.scheme(scheme)(a), seed=3, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    return model.eval()


class TestBuilt:
    """A network of a Parametrization needs nothing but its table and its weights."""

    @pytest.mark.parametrize("scheme", ["deepscalelm", "layerscale", "e-spa", "mix-ln", "rezero"])
    def test_bit_by_bit(self, scheme: str, tmp_path: Path) -> None:
        model: Any = built(scheme)
        sp.save(model, tmp_path)
        assert {item.name for item in tmp_path.iterdir()} == {RECORD, WEIGHTS}
        again: Any = sp.load(tmp_path)
        ids = torch.arange(16).reshape(2, 8)
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert again.parametrization == model.parametrization and not again.training
        assert again.head.weight is again.decoder.embedding.token.weight  # tied, and stored once
        assert len(load_file(tmp_path / WEIGHTS)) == len(model.state_dict()) - 1
