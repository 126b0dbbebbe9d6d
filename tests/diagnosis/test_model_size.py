"""Configurations of a few hundred bytes that ask for more memory than there is are refused before anything is made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

import signalprop as sp
from gguf_file import write_gguf
from signalprop.diagnosis.loading import load, read_model, read_tokenizer
from signalprop.errors import InputError
from signalprop.files.configuration import check_sizes
from signalprop.files.model_size import check_gguf, check_model

NEEDS = r"needs at least [\d,]+\.\d GB of memory; there are|expected at most 1\d*,\d|needs more than 1.1 GB of memory"
BILLION = 10**9
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2,
    "n_positions": 16, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8, "patch_size": 4,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 16,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
TOO_MUCH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GPT2, {"n_layer": BILLION}), (GPT2, {"n_embd": 10**6}), (GPT2, {"num_labels": 1_000_001}),
    (GPT2, {"n_layer": 9_999, "n_embd": 10_000}), (GPT2, {"vocab_size": [BILLION]}),
    (VIT, {"image_size": 10**6, "patch_size": 1}), (VIT, {"patch_size": 10**6, "image_size": 10**6}),
    (MIXTRAL, {"num_local_experts": BILLION}),
]  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TestConfigurations:
    @pytest.mark.parametrize(("config", "changes"), TOO_MUCH, ids=lambda value: "-".join(value)[:40])
    def test_a_fresh_model(self, tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=NEEDS):
            read_model(write(tmp_path, config | changes), random_init=True)

    def test_weights_and_schemes_in_it(self, tmp_path: Path) -> None:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
        model.save_pretrained(tmp_path / "plain")
        sp.apply(model, "stable-resnet", seed=0)
        sp.save(model, tmp_path / "applied")
        for folder, reader in ((tmp_path / "plain", read_model), (tmp_path / "applied", sp.load)):
            kept = json.loads((folder / "config.json").read_text())
            with pytest.raises(InputError, match=NEEDS):
                reader(write(folder, kept | {"num_labels": BILLION}))

    def test_predictions_refuse_it_likewise(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=NEEDS):
            sp.Architecture.from_hf(write(tmp_path, GPT2 | {"num_labels": BILLION}))

    def test_what_has_no_size_is_not_refused(self, tmp_path: Path) -> None:
        """Rotary positions, ids, bases and lengths: numbers of which nothing is made."""
        config = LLAMA | {"max_position_embeddings": 10**8, "rope_theta": 10**12, "pad_token_id": 49, "seed": 10**18}
        assert sum(p.numel() for p in read_model(write(tmp_path, config), random_init=True).parameters()) < 10_000
        check_sizes({"num_labels": 1000, "num_hidden_layers": 1000, "id2label": {"1000000000": "x"}}, "x")


class TestModels:
    def test_a_tied_table_counts_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make() -> nn.Module:
            model = nn.Sequential(nn.Embedding(1000, 100), nn.Linear(100, 1000, bias=False))
            model[1].weight = model[0].weight
            return model

        monkeypatch.setattr("signalprop.files.limits.memory_limit", lambda: 500_000)
        check_model(make, "x")
        monkeypatch.setattr("signalprop.files.limits.memory_limit", lambda: 399_999)
        with pytest.raises(InputError, match="the model of x needs at least"):
            check_model(make, "x")
        check_model(make, "x", itemsize=2)

    def test_it_stops_before_everything_is_made(self) -> None:
        made = 0

        def make() -> nn.Module:
            nonlocal made
            layers = []
            for made in range(1000):  # noqa: B007
                layers.append(nn.Linear(10**6, 10**6))
            return nn.Sequential(*layers)

        with pytest.raises(InputError, match=NEEDS):
            check_model(make, "x")
        assert made < 100
        nn.Linear(10**3, 10**3)  # nothing is counted any more


class TestGGUF:
    @pytest.fixture
    def file(self, tmp_path: Path, llama: Any, bpe: Any) -> Path:
        write_gguf(tmp_path / "tiny.gguf", llama, bpe)
        return tmp_path / "tiny.gguf"

    @staticmethod
    def change(file: Path, name: str, value: bytes, skip: int) -> None:
        """Write over what stands `skip` bytes behind a name in the header."""
        content = file.read_bytes()
        at = content.index(name.encode()) + len(name) + skip
        file.write_bytes(content[:at] + value + content[at + len(value) :])

    def test_numbers_that_multiply_memory(self, file: Path) -> None:
        self.change(file, "llama.block_count", struct.pack("<I", BILLION), skip=4)
        with pytest.raises(InputError, match=NEEDS):
            load(file)

    @pytest.mark.parametrize("name", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
    def test_arrays_that_are_longer_than_the_file(self, file: Path, name: str) -> None:
        self.change(file, name, struct.pack("<Q", 2**60), skip=8)
        for reader in (load, read_tokenizer):
            with pytest.raises(InputError, match=r"it counts 1,152,921,504,606,846,976 (texts|numbers)"):
                reader(file)

    @pytest.mark.parametrize("at", [8, 16])
    def test_more_tensors_or_entries_than_the_file(self, file: Path, at: int) -> None:
        content = file.read_bytes()
        file.write_bytes(content[:at] + struct.pack("<Q", 2**40) + content[at + 8 :])
        with pytest.raises(InputError, match=r"it counts 1,099,511,627,776 (tensors|entries)"):
            load(file)

    def test_cut_anywhere(self, file: Path) -> None:
        content = file.read_bytes()
        for n in (0, 3, 4, 7, 12, 23, 24, 40, 100, 500):
            file.write_bytes(content[:n])
            with pytest.raises(InputError, match="it is not a GGUF file, or it is damaged"):
                check_gguf(file)

    def test_a_tokenizer_that_cannot_be_read(self, file: Path) -> None:
        """It used to be told to give the .gguf file itself."""
        self.change(file, "tokenizer.ggml.model", b"what", skip=12)
        with pytest.raises(InputError, match=r"cannot read the tokenizer in .*tiny\.gguf: .*put the tokenizer\.json"):
            read_tokenizer(file)


class TestMessages:
    def test_weights_of_another_shape_are_named(self, tmp_path: Path) -> None:
        """transformers says which they are in a report that is silenced."""
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path)
        kept = json.loads((tmp_path / "config.json").read_text())
        with pytest.raises(
            InputError, match=r"transformer\.wpe\.weight has the shape \(16, 16\) in the weights and \(8,"
        ):
            read_model(write(tmp_path, kept | {"n_positions": 8}))
