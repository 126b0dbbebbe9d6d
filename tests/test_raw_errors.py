"""What ended in an error from the inside once: each is one clear line, or works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from commandline import TINY
from damage import check_command, check_line, commanded
from signalprop.data import Batch, default_batch
from signalprop.errors import InputError
from signalprop.measurement import input_kernels
from signalprop.measurement.losses import loss_of
from tiny import gpt2, llama

TABLE = sp.scheme("xavier")(sp.Architecture(n_layers=1, d_model=16, n_heads=2, d_ff=16, vocab_size=20, seq_len=4))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(0))


class TestOutputs:
    @pytest.fixture
    def loop(self, tmp_path: Path) -> Path:
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        return tmp_path / "a"

    def test_links_in_a_circle(self, loop: Path) -> None:
        for arguments in (["--json", loop], ["--plot", loop.with_name("c.png")]):
            loop.with_name("c.png").unlink(missing_ok=True)
            loop.with_name("c.png").symlink_to(loop)
            result = commanded("predict", "tgs", *TINY, *arguments)
            check_command(result)
            assert result.status == 2 and "leads back to itself" in result.err
        with pytest.raises(InputError, match="leads back to itself"):
            sp.scheme("xavier")(sp.Architecture.preset("tgs")).save(loop)
        assert loop.is_symlink()


class TestTokenizers:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A GPT-2 whose tokenizer knows one word and not its own unknown token."""
        gpt2().save_pretrained(tmp_path)
        vocabulary = {"model": {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}, "version": "1.0",
                      "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
                      "post_processor": None, "truncation": None, "padding": None}  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return tmp_path

    @pytest.mark.parametrize("command", ["measure", "diagnose"])
    def test_without_their_own_unknown_token(self, folder: Path, command: str) -> None:
        result = commanded(command, folder)
        check_command(result)
        assert result.status == 2 and "unknown token" in result.err


class TestMeasuring:
    def test_a_mask_of_zeros(self) -> None:
        batch = {"input_ids": ids(2, 8), "labels": ids(2, 8), "attention_mask": torch.zeros(2, 8)}
        with pytest.raises(InputError, match="attention_mask is zero everywhere"):
            sp.measure(gpt2(), batch)

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
    def test_an_empty_batch(self, shape: tuple[int, int]) -> None:
        with pytest.raises(InputError, match="input_ids is empty"):
            sp.measure(gpt2(), {"input_ids": ids(*shape), "labels": ids(*shape)})

    def test_under_inference_mode(self) -> None:
        model = gpt2().eval()
        expected = sp.measure(model, {"input_ids": ids(2, 8), "labels": ids(2, 8)})
        with torch.inference_mode():
            made = ids(2, 8).clone()
            assert made.is_inference()
            found = sp.measure(model, {"input_ids": made, "labels": made})
        assert found.gradient["stream_in"].variance == pytest.approx(expected.gradient["stream_in"].variance)

    def test_a_model_made_under_inference_mode(self) -> None:
        with torch.inference_mode():
            model = gpt2()
        with pytest.raises(InputError, match=r"created under torch\.inference_mode"):
            sp.measure(model, {"input_ids": ids(2, 8), "labels": ids(2, 8)})

    def test_arguments_that_the_model_does_not_take(self) -> None:
        mask = {"attention_mask": torch.ones(2, 5, dtype=torch.long)}
        for call in (sp.measure, input_kernels):
            with pytest.raises(InputError, match="LlamaForCausalLM failed on attention_mask: You must specify"):
                call(llama(), mask)

    @pytest.mark.parametrize(
        ("inputs", "says"),
        [
            (ids(2, 8).float(), "failed on input_ids: Expected .* Long, Int"),
            (lambda model: model(ids(2, 8).half()), "failed on input_ids: Expected .* Long, Int"),
            (
                {"input_ids": ids(2, 8), "labels": ids(2, 8).float()},
                "failed on input_ids, labels: .* Long",
            ),
            ({"inputs_embeds": torch.randn(2, 8, 7)}, "failed on inputs_embeds: .* must match"),
            ({"input_ids": ids(2, 8), "attention_mask": torch.ones(2, 3, 3, 3)}, "failed on input_ids, attention"),
            ([[1, 2], [3, 4]], "failed on input_ids, [a-z_]+: 'list'"),
            (ids(2, 8).to_sparse(), r"layout torch\.sparse_coo; give a dense one"),
            (ids(2, 8).to("meta"), "on the meta device, which has no numbers"),
            (np.array([None]), "an array of object; expected numbers"),
            (np.array(["a"]), "an array of <U1; expected numbers"),
        ],
    )
    def test_inputs_of_wrong_types_and_shapes(self, inputs: Any, says: str) -> None:
        for backward in (True, False):
            with pytest.raises(InputError, match=says):
                sp.measure(gpt2(), inputs, backward=backward)

    def test_ids_that_are_no_whole_numbers(self) -> None:
        with pytest.raises(InputError, match="tokens of a batch are float64; expected ids, which are whole numbers"):
            Batch(tokens=np.zeros((2, 8)), targets=np.zeros((2, 8), int))
        assert sp.predict(gpt2(), ids(2, 8).to(torch.uint8)).forward["stream_out"].variance[-1] > 0

    def test_ids_and_targets_that_the_model_does_not_have(self) -> None:
        many = torch.full((1, 4), 10**6)
        for batch in ({"input_ids": many}, {"input_ids": ids(1, 4), "labels": many}):
            with pytest.raises(InputError, match="GPT2LMHeadModel failed on input_ids"):
                sp.measure(gpt2(), batch)
        headless = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        targets = np.full((2, 4), 49)
        batch = Batch(tokens=targets, targets=targets)
        with pytest.raises(InputError, match="targets go up to 49, the model's output has 8 features"):
            loss_of(headless(torch.randn(2, 4, 8)), batch, None)

    @pytest.mark.parametrize("mapping", [[], np.zeros((2, 2))])
    def test_a_mapping_that_is_none(self, mapping: Any) -> None:
        with pytest.raises(InputError, match=f"is a {type(mapping).__name__}; expected a Mapping"):
            sp.study(gpt2(), seeds=1, mapping=mapping)

    @pytest.mark.parametrize("loss", ["x", [], {}, 1j, object()])
    def test_a_loss_that_is_no_number(self, loss: Any) -> None:
        with pytest.raises(InputError, match="takes as loss: Tensor or float or None"):
            sp.SignalMonitor(gpt2()).record(1, loss)


def test_a_family_that_is_no_name() -> None:
    """`--set family=[1]` of a directory."""
    with pytest.raises(InputError, match="family: Input should be a valid string"):
        sp.Architecture.from_hf(gpt2(), family=[1])


@pytest.mark.parametrize(
    "call",
    [sp.load, sp.Architecture.from_hf, sp.Profile.load, lambda path: sp.save(sp.build(TABLE), path)],
    ids=["load", "from_hf", "Profile.load", "save"],
)
def test_a_path_that_is_too_long(call: Any) -> None:
    with pytest.raises(InputError, match="too long") as caught:
        call("x" * 5000)
    check_line(str(caught.value))


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    applied = gpt2()
    sp.apply(applied, "xavier")
    for model in (applied, sp.build(TABLE)):
        with pytest.raises(InputError, match="is a file; expected a directory"):
            sp.save(model, tmp_path / "file")


def test_one_token_has_no_cosines() -> None:
    shown = commanded("kernel", "tgs", *TINY[:-1], "1").out
    assert "nan" not in shown and "one token has no rank to lose" in shown


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
class TestQuantised:
    @pytest.fixture
    def model(self) -> Any:
        return torch.ao.quantization.quantize_dynamic(llama().eval(), {torch.nn.Linear}, dtype=torch.qint8)

    def test_schemes_are_refused(self, model: Any, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="has no tensor as weight"):
            sp.apply(model, "xavier")


@pytest.mark.parametrize(("arch", "n"), [("gpt2-large", 10**12), ("vit-base", 10**30)])
def test_batches_larger_than_memory(arch: str, n: int) -> None:
    with pytest.raises(InputError, match=r"a batch of 1,000,.* needs at least .* GB of memory"):
        default_batch(sp.Architecture.preset(arch), batch_size=n)
