"""Checkpoints that bring Python of their own, and names of the hub: none is run, whatever standard input answers.

The processes are real, and so is the planted code: it creates a file. What would take a kernel from the hub creates it
too. A file that exists is a failure.
"""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import signalprop as sp
from applied import seal
from damage import check_command, commanded
from gguf_file import write_gguf
from signalprop.diagnosis.loading import load, read_model, read_tokenizer
from signalprop.errors import InputError
from signalprop.files import checkpoint_loading
from signalprop_lab.training import tokenizers

KERNEL = "somebody/kernel"
# Every attack in one process; the hub is one function of transformers, which stands for what it would run.
PROCESS = """
import json, sys
from pathlib import Path
import transformers.integrations.hub_kernels as hub
from signalprop.cli import run

def planted(*args, **kwargs):
    Path(sys.argv[1]).touch()
    raise ImportError("a kernel of the hub was asked for")

hub.is_kernels_available = lambda: True
hub.get_kernel = planted
for arguments in json.loads(sys.argv[2]):
    print("status", run(arguments), flush=True)
"""


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))


def plant(folder: Path) -> None:
    """A module that creates a file beside the directory, and has every class that is asked for."""
    marker = str(folder.parent / "ran")
    classes = "class Own(PreTrainedTokenizerFast): pass\nclass C(LlamaConfig): model_type = 'own'\n"
    classes += "class M(LlamaForCausalLM): config_class = C\n"
    head = f"from pathlib import Path\nPath({marker!r}).touch()\n"
    imported = "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
    (folder / "own.py").write_text(head + imported + classes)


def class_in_the_record(folder: Path) -> Path:
    """signalprop.json names an auto class, and config.json code; the digest is that of the changed record."""
    plant(folder)
    change(folder / "signalprop.json", class_name="AutoModelForCausalLM")
    seal(folder)
    own = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    change(folder / "config.json", model_type="own", auto_map=own)
    return folder


def tokenizer_beside_a_gguf(folder: Path) -> Path:
    plant(folder)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder / "tiny.gguf"


def kernel_in_an_object(folder: Path) -> Path:
    change(folder / "config.json", attn_implementation={"": KERNEL})
    return folder


def another_configuration(folder: Path) -> Path:
    """transformers reads the one that fits its version."""
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.4.0.0.json").write_text(json.dumps(own | {"_attn_implementation": KERNEL}))
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    return folder


def class_of_the_tokenizer(folder: Path) -> Path:
    """transformers takes anything of its own for a tokenizer, and forgets that code is not trusted."""
    plant(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AutoProcessor"}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "own.Own"}}))
    return folder


# What is asked for is refused, with these words, or (none) is not read at all.
ATTACKS: dict[str, tuple[str, Callable[[Path], Path], tuple[str, ...], str]] = {
    "class": ("applied", class_in_the_record, ("check", "--scheme", "lns"), "AutoModelForCausalLM, which is not"),
    "gguf": ("gguf", tokenizer_beside_a_gguf, ("diagnose",), ""),
    "kernel": ("plain", kernel_in_an_object, ("measure",), ""),
    "another configuration": ("plain", another_configuration, ("measure",), ""),
    "class of the tokenizer": ("plain", class_of_the_tokenizer, ("diagnose",), ""),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(place: Path, llama: Any, bpe: Any, tokenizer: Any) -> Callable[[str], Path]:
    """Directories of their own: `plain`, `applied` (with a scheme), `gguf`."""

    def make(kind: str) -> Path:
        folder = place / f"{kind}-{len(list(place.iterdir()))}"
        folder.mkdir()
        if kind == "gguf":
            write_gguf(folder / "tiny.gguf", llama, bpe)
            return folder
        llama.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if kind == "applied":
            model = read_model(folder)
            sp.apply(model, "lns", initialize=False, change_function=True)  # type: ignore[arg-type]
            sp.save(model, folder)
        return folder

    return make


def no_code(place: Path) -> bool:
    return not any(found.name == "ran" for found in place.rglob("ran"))


def answered(command: list[str], how: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run a command with standard input closed, with `y` piped in, or on a terminal where somebody types it."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    if how == "closed":
        with subprocess.Popen(["sh", "-c", 'exec "$@" <&-', "sh", *command], **pipes) as process:
            out, err = process.communicate(timeout=300)
    elif how == "piped":
        with subprocess.Popen(command, stdin=subprocess.PIPE, **pipes) as process:
            out, err = process.communicate("y\n" * 50, timeout=300)
    else:
        ours, theirs = pty.openpty()
        os.write(ours, b"y\n" * 50)
        with subprocess.Popen(command, stdin=theirs, start_new_session=True, **pipes) as process:
            out, err = process.communicate(timeout=300)
        os.close(ours)
        os.close(theirs)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "piped", "terminal"])
def test_processes(made: Callable[[str], Path], place: Path, how: str) -> None:
    commands = []
    for kind, attack, (command, *options), _ in ATTACKS.values():
        commands.append([command, str(attack(made(kind))), *options])
    environment = os.environ | {"HF_HOME": str(place / "home"), "HF_MODULES_CACHE": str(place / "modules")}
    process = [sys.executable, "-c", PROCESS, str(place / "ran"), json.dumps(commands)]
    begin = time.monotonic()
    status, out, err = answered(process, how, environment)
    assert no_code(place), err
    statuses = [f"status {2 if says else 0}" for _, _, _, says in ATTACKS.values()]
    assert status == 0 and [line for line in out.splitlines() if line.startswith("status ")] == statuses, (out, err)
    lines = [line for line in err.splitlines() if line.startswith("signalprop: ")]
    assert len(lines) == sum(bool(says) for _, _, _, says in ATTACKS.values()), err
    assert all(says in err for _, _, _, says in ATTACKS.values())
    assert "[y/N]" not in out + err
    assert time.monotonic() - begin < 300


@pytest.mark.parametrize("command", ["apply", "diagnose"])
def test_every_command_refuses_the_class_of_a_record(
    made: Callable[[str], Path], place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With `y` piped in."""
    folder = class_in_the_record(made("applied"))
    out = ["--out", place / "out"]
    options = {"apply": ["--scheme", "lns", *out], "fold": out}.get(command, [])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    result = commanded(command, folder, *options)
    check_command(result)
    assert result.status == 2 and "needs the class AutoModelForCausalLM" in result.err
    assert no_code(place)


def test_the_digest_is_checked_before_anything_is_loaded(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("applied")
    change(folder / "signalprop.json", match_eps=True)
    monkeypatch.setattr(checkpoint_loading, "pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match="has been changed since it was saved"):
        sp.load(folder)


@pytest.mark.parametrize("name", ["AutoModel", "RagRetriever", "pipeline", "__doc__"])
def test_classes_that_are_not_models(made: Callable[[str], Path], name: str) -> None:
    folder = made("plain")
    change(folder / "config.json", architectures=[name])
    with pytest.raises(InputError, match=f"needs the class {name}, which is not"):
        read_model(folder)


@pytest.mark.parametrize("name", ["AutoTokenizerFast", "RagTokenizer"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_classes_that_are_not_tokenizers(made: Callable[[str], Path], name: str, file: str) -> None:
    """No class is looked for where there is a tokenizer.json, and else none that is not a tokenizer."""
    folder = made("plain")
    before = read_tokenizer(folder)("the Union").input_ids
    change(folder / file, tokenizer_class=name)
    if file == "config.json":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": None}))
    for read in (lambda: read_tokenizer(folder), lambda: tokenizers.load(str(folder))):
        assert read()("the Union").input_ids == before
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=f"its tokenizer class '{name}' is not among"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_implementation", {"": KERNEL}), ("_attn_implementation", {"text_config": {"": KERNEL}}),
        ("_attn_implementation_internal", [[KERNEL]]), ("attn_implementation", f"paged|{KERNEL}"),
        ("_attn_implementation", "flash_attention_2"),
    ],
)  # fmt: skip
def test_kernels_at_any_depth(made: Callable[[str], Path], key: str, value: Any) -> None:
    """The entry is not taken."""
    folder = made("plain")
    before = read_model(folder).config  # type: ignore[union-attr]
    change(folder / "config.json", **{key: value})
    after = read_model(folder).config  # type: ignore[union-attr]
    assert after._attn_implementation == before._attn_implementation and after.to_dict() == before.to_dict()


@pytest.mark.parametrize("value", [["../config.4.0.0.json"], ["own/config.4.0.0.json"], "config.4.0.0.json", [3]])
def test_configurations_elsewhere(made: Callable[[str], Path], value: Any) -> None:
    """config.json alone is read."""
    folder = made("plain")
    before = read_model(folder).config.to_dict()  # type: ignore[union-attr]
    (folder / "config.4.0.0.json").write_text(json.dumps(before | {"num_hidden_layers": 1}))
    change(folder / "config.json", configuration_files=value)
    assert read_model(folder).config.to_dict() == before  # type: ignore[union-attr]


def test_weights_elsewhere(made: Callable[[str], Path]) -> None:
    """model.safetensors is read, whatever config.json names."""
    folder = made("plain")
    before = read_model(folder).state_dict()
    change(folder / "config.json", transformers_weights="../model.safetensors")
    after = read_model(folder).state_dict()
    assert all(tensor.equal(before[name]) for name, tensor in after.items()) and len(after) == len(before)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"_attn_implementation": {"": KERNEL}}, "takes no _attn_implementation"),
        ({"n_layer": "x"}, "n_layer is 'x'; expected a word that transformers has"),
        ({"n_layer": [1]}, "n_layer: transformers refuses it: .* expected int, got list"),
        ({"n_head": 0}, r"cannot make a gpt2 for causal-lm \(ZeroDivisionError"),
    ],
)
def test_configurations_in_a_recipe(fields: dict[str, Any], says: str) -> None:
    from types import SimpleNamespace

    from signalprop_lab.training.networks import network_of
    from signalprop_lab.training.recipe import parse

    own = {"model_type": "gpt2", "n_layer": 1, **fields}
    recipe = parse({"name": "x", "task": "causal-lm", "model": {"huggingface": own}})
    prepared: Any = SimpleNamespace(facts={})
    with pytest.raises(InputError, match=says):
        network_of(recipe, prepared)


def test_a_checkpoint_of_the_hub_is_looked_through(
    made: Callable[[str], Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a directory is: its configurations are fetched first, and the others after them."""
    commit = 40 * "a"
    cached = place / "cache" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(kernel_in_an_object(made("plain")), cached / "snapshots" / commit)
    for name in ("constants.HF_HUB_CACHE", "file_download.HF_HUB_CACHE", "_snapshot_download.HF_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.{name}", str(place / "cache"), raising=False)
    change(cached / "snapshots" / commit / "config.json", hidden_act="somebody/kernel")
    with pytest.raises(InputError, match="hidden_act is 'somebody/kernel'; expected a word"):
        load("somebody/tiny")


def test_what_lies_beside_a_gguf_file_is_not_read(made: Callable[[str], Path], llama: Any) -> None:
    """An adapter of another model, configurations that are damaged or of another model."""
    folder = made("gguf")
    before = load(folder / "tiny.gguf")
    for name in ("generation_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{damaged")
    change(folder / "config.json", model_type="bert", attn_implementation=KERNEL)
    change(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="/nowhere")
    change(folder / "tokenizer_config.json", tokenizer_class="AutoProcessor", bos_token="<other>")
    after = load(folder / "tiny.gguf")
    assert type(after.model) is type(llama) and after.model.name_or_path == str(folder)  # type: ignore[union-attr]
    assert after.tokenizer("the Union").input_ids == before.tokenizer("the Union").input_ids
    assert after.tokenizer.bos_token == before.tokenizer.bos_token
