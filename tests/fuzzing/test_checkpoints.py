"""Checkpoints that somebody else made: damaged in every file, and made to reach for files or code elsewhere."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.numpy import load_file

import signalprop as sp
import tiny
from damage import Bomb, check_command, commanded, damaged_bytes, examine, files_of
from gguf_file import write_gguf
from signalprop.data.model_batches import model_batch
from signalprop.diagnosis.loading import load, read_model, read_tokenizer
from signalprop.errors import InputError
from signalprop.files.tensor_files import stored_tensors
from signalprop_lab.training import checkpoints, tokenizers
from signalprop_lab.training.checkpoints import MARKER, problem_of
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.weight_files import PROCESS, STATE, load_tensors


def make_plain(folder: Path) -> Path:
    """A tiny GPT-2 with its tokenizer."""
    tiny.gpt2().save_pretrained(folder)
    tiny.wordpiece("the state of the union " * 20, 60).save(str(folder / "tokenizer.json"))
    return folder


def make_applied(plain: Path) -> Path:
    """The same with a scheme, beside it."""
    folder = plain.with_name("applied")
    model: Any = read_model(plain)
    sp.apply(model, "layerscale")
    sp.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("checkpoint") / "plain")


@pytest.fixture(scope="module")
def applied(plain: Path) -> Path:
    return make_applied(plain)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "checkpoint"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps((read_json(path) if path.exists() else {}) | entries))


def header_of(content: bytes) -> tuple[Any, bytes]:
    """Header and numbers of a safetensors file."""
    (n,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def with_header(header: bytes, numbers: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + numbers


def weights(plain: Path) -> st.SearchStrategy[bytes]:
    """Safetensors files with a damaged header, a header of another length, or cut."""
    content = (plain / "model.safetensors").read_bytes()
    header, numbers = header_of(content)
    lengths = st.sampled_from([0, 1, 7, 8, len(content), 2**31, 2**63, 2**64 - 1])
    return st.one_of(
        files_of(header).map(lambda found: with_header(found, numbers)),
        lengths.map(lambda n: struct.pack("<Q", n) + content[8:]),
        damaged_bytes(content[:3000]).map(lambda found: found + content[3000:]),
    )


def index(plain: Path) -> dict[str, Any]:
    header, numbers = header_of((plain / "model.safetensors").read_bytes())
    names = {name: "model.safetensors" for name in header if name != "__metadata__"}
    return {"metadata": {"total_size": len(numbers)}, "weight_map": names}


TOKENS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 12, "eos_token": "[PAD]",
    "added_tokens_decoder": {"0": {"content": "[PAD]", "special": True}},
}  # fmt: skip
Making = Callable[[Path, Path], st.SearchStrategy[bytes]]
# the checkpoint, the file in it, what may stand there, what reads the directory
SUBJECTS: dict[str, tuple[str, str, Making, Callable[[Path], Any]]] = {
    "config": ("plain", "config.json", lambda p, _: files_of(read_json(p / "config.json")), sp.Architecture.from_hf),
    "config of a model": ("plain", "config.json", lambda p, _: files_of(read_json(p / "config.json")), read_model),
    "weights": ("plain", "model.safetensors", lambda p, _: weights(p), read_model),
    "weights of a run": (
        "plain", "model.safetensors", lambda p, _: weights(p), lambda found: load_tensors(found / "model.safetensors"),
    ),
    "index": ("plain", "model.safetensors.index.json", lambda p, _: files_of(index(p)), read_model),
    "tokenizer": (
        "plain", "tokenizer.json", lambda p, _: files_of(read_json(p / "tokenizer.json")), read_tokenizer,
    ),
    "tokenizer of a batch": (
        "plain", "tokenizer.json", lambda p, _: files_of(read_json(p / "tokenizer.json")),
        lambda found: model_batch(sp.Architecture.from_hf(found), found, None, 1, 0),
    ),
    "tokenizer of a recipe": ("plain", "tokenizer.json", lambda p, _: files_of(read_json(p / "tokenizer.json")),
                              lambda found: tokenizers.load(str(found))),
    "tokenizer's configuration": ("plain", "tokenizer_config.json", lambda *_: files_of(TOKENS), read_tokenizer),
    "record": ("applied", "signalprop.json", lambda _, a: files_of(read_json(a / "signalprop.json")), sp.load),
    "multipliers": (
        "applied", "signalprop.safetensors",
        lambda _, a: damaged_bytes((a / "signalprop.safetensors").read_bytes()), sp.load,
    ),
}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.filterwarnings("ignore")  # libraries say what they think of what they read all the same
def test_damaged_checkpoints(subject: str, plain: Path, applied: Path, tmp_path: Path) -> None:
    which, name, making, reader = SUBJECTS[subject]
    found = Path(shutil.copytree({"plain": plain, "applied": applied}[which], tmp_path / "checkpoint"))
    content = making(plain, applied)
    if name.endswith("index.json"):
        (found / "model.safetensors").rename(found / "a.safetensors")
        content = content.map(lambda text: text.replace(b"model.safetensors", b"a.safetensors"))
    examine(found / name, content, lambda: reader(found))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["check", "fold", "measure"])
def test_commands_on_damaged_configurations(name: str, folder: Path, tmp_path: Path) -> None:
    more = {"check": ["--scheme", "layerscale"], "fold": ["--out", tmp_path / "new"], "measure": []}[name]
    content = files_of(read_json(folder / "config.json"))
    examine(folder / "config.json", content, lambda: check_command(commanded(name, folder, *more)))


def gguf_of(path: Path) -> bytes:
    """A tiny model in llama.cpp's format."""
    bpe = tiny.bpe("the state of the union " * 20, 300)
    write_gguf(path, tiny.llama(vocab_size=bpe.get_vocab_size(), num_hidden_layers=1, intermediate_size=32).eval(), bpe)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damaged_gguf_files(tmp_path: Path) -> None:
    """Anywhere, and in the header."""
    whole = gguf_of(tmp_path / "tiny.gguf")
    header = damaged_bytes(whole[:4000]).map(lambda head: head + whole[4000:])
    examine(tmp_path / "a.gguf", damaged_bytes(whole) | header, lambda: load(tmp_path / "a.gguf"))


def refused_by_all(folder: Path, says: str) -> None:
    """Whatever reads weights and tokenizers refuses the directory, and so do the commands."""
    readers: list[Callable[[], Any]] = [
        lambda: read_model(folder),
        lambda: load(folder),
        lambda: read_tokenizer(folder),
        lambda: tokenizers.load(str(folder)),
    ]
    for read in readers:
        with pytest.raises(InputError, match=says):
            read()
    for command in ("measure", "diagnose", "compare"):
        result = commanded(command, folder)
        check_command(result)
        assert result.status == 2, command


class TestElsewhere:
    """Nothing is read that lies outside of the directory."""

    @pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", 3, "\x00"])
    def test_shards(self, folder: Path, name: Any) -> None:
        (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
        found = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(found))
        for read in (read_model, load, stored_tensors):
            with pytest.raises(InputError, match=r"expected \.safetensors files next to it"):
                read(folder)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
    def test_links(self, folder: Path, name: str) -> None:
        outside = folder.parent / "outside"
        change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        refused_by_all(folder, "is a link that leads out of its directory")

    def test_weights_may_be_links(self, folder: Path) -> None:
        """Old releases of huggingface_hub made them, into its cache, and people do who keep weights on other disks."""
        (folder / "model.safetensors").rename(folder.parent / "blob")
        (folder / "model.safetensors").symlink_to(folder.parent / "blob")
        read_model(folder)
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        names = load_file(folder.parent / "blob")
        found = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(found))
        read_model(folder)

    def test_links_of_the_hubs_cache(self, folder: Path) -> None:
        snapshot, blobs = folder.parent / "m" / "snapshots" / "abc", folder.parent / "m" / "blobs"
        snapshot.parent.mkdir(parents=True)
        folder.rename(snapshot)
        blobs.mkdir()
        (snapshot / "model.safetensors").rename(blobs / "1")
        (snapshot / "model.safetensors").symlink_to("../../blobs/1")
        read_model(snapshot)
        (snapshot / "config.json").rename(folder.parent / "other")
        (snapshot / "config.json").symlink_to("../../../other")
        with pytest.raises(InputError, match="leads out of its directory"):
            read_model(snapshot)

    def test_base_models_of_adapters(self, plain: Path, folder: Path) -> None:
        base = {"peft_type": "LORA", "base_model_name_or_path": str(plain), "r": 2, "target_modules": ["c_attn"]}
        (folder / "adapter_config.json").write_text(json.dumps(base))
        (folder / "model.safetensors").unlink()
        refused_by_all(folder, "holds an adapter")

    @pytest.mark.parametrize("entry", ["vocab_file", "tokenizer_file", "fast_tokenizer_files", "vocab", "init_inputs"])
    @pytest.mark.parametrize("name", ["../secret.json", "/dev/stdin"])
    def test_vocabularies(self, folder: Path, entry: str, name: str) -> None:
        """What names one in tokenizer_config.json is not read."""
        before = read_tokenizer(folder)("the state").input_ids
        (folder.parent / "secret.json").write_text("{}")
        for kind in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
            change(folder / "tokenizer_config.json", tokenizer_class=kind, **{entry: [name], f"{entry}s": name})
            assert read_tokenizer(folder)("the state").input_ids == before

    @pytest.mark.parametrize("name", ["../secret.json", "/dev/zero"])
    def test_vocabularies_without_a_tokenizer_json(self, folder: Path, name: str) -> None:
        """Of the class that it names, from the plain files beside it."""
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "state"]))
        change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab=name, vocab_file=name)
        assert read_tokenizer(folder)("the state", add_special_tokens=False).input_ids == [5, 6]
        (folder / "vocab.txt").unlink()
        (folder / "vocab.txt").symlink_to("/dev/zero")
        with pytest.raises(InputError, match="it is a device"):
            read_tokenizer(folder)

    def test_of_how_to_generate_numbers_alone(self, folder: Path) -> None:
        change(folder / "generation_config.json", max_length=33, eos_token_id=[1, 2], assistant_model="/etc/passwd",
               custom_generate="somebody/model", watermarking_config={"a": 1})  # fmt: skip
        found: Any = read_model(folder)
        assert (found.generation_config.max_length, found.generation_config.eos_token_id) == (33, [1, 2])
        assert not re.search("passwd|somebody", str(found.generation_config.to_dict()))

    def test_a_companion_is_not_copied_from_elsewhere(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("secret")
        (folder / "vocab.txt").symlink_to(tmp_path / "key")
        result = commanded("apply", folder, "--scheme", "lns", "--out", tmp_path / "out")
        check_command(result)
        assert result.status == 2 and not (tmp_path / "out").exists()


class TestCode:
    """Nothing that a file brings is run."""

    @pytest.mark.parametrize(
        "name", ["pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
    )
    def test_pickles_beside_are_not_touched(self, folder: Path, name: str) -> None:
        marker = folder.parent / "ran"
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
        load(folder)
        (folder / "model.safetensors").unlink()
        with pytest.raises(InputError, match="pickled"):
            load(folder)
        assert not marker.exists()

    def test_names_that_steer_the_terminal(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        token = {"content": "[PAD]", "\x1b[2J": 1, "__type": "AddedToken"}
        change(folder / "tokenizer_config.json", added_tokens_decoder={"0": token}, **{"\x1b[2J": 1})
        read_tokenizer(folder)
        assert "\x1b" not in "".join(capfd.readouterr())


class TestRuns:
    """What a run that goes on reads of a checkpoint."""

    def checkpoint(self, folder: Path) -> Path:
        target = folder / "checkpoint-5"
        target.mkdir(parents=True)
        generator = torch.get_rng_state().numpy().tobytes().hex()
        state = {"torch": generator, "cuda": None, "numpy": ["MT19937", [1] * 624, 1, 0, 0.0],
                 "python": [3, [1] * 625, None], "loss": 0.5}  # fmt: skip
        (target / PROCESS.format(0)).write_text(json.dumps(state))
        (target / STATE).write_text(json.dumps({"optimizer": [], "schedule": {}, "scaler": None, "last_logged": 3,
                                                "seconds": 1.0}))  # fmt: skip
        checkpoints.mark(target, 5)
        return target

    @pytest.mark.parametrize("name", ["/dev/zero", "../../../../../../../../dev/zero", "../x", "\x00"])
    def test_files_that_are_not_in_it(self, tmp_path: Path, name: str) -> None:
        target = self.checkpoint(tmp_path)
        change(target / MARKER, files={name: {"bytes": 0, "sha256": "x"}})
        problem = problem_of(target)
        assert problem is not None and ("which is not in it" in problem or "damaged" in problem)


def test_pretrained_models_of_recipes(folder: Path) -> None:
    """A recipe's model.pretrained is looked through as well."""
    from types import SimpleNamespace

    from signalprop_lab.training.recipe import parse

    recipe = parse({"name": "x", "task": "causal-lm", "model": {"pretrained": str(folder)}})
    prepared: Any = SimpleNamespace(facts={})
    os.symlink("/etc/passwd", folder / "vocab.txt")
    with pytest.raises(InputError, match="leads out of its directory"):
        network_of(recipe, prepared)
