"""Every model type of transformers with something hostile in every leaf of its configuration: nothing is reached.

Of the installed transformers, with timm where that is installed. Another version: put it first on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from choice import some
from signalprop.diagnosis.loading import read_structure
from signalprop.errors import InputError
from signalprop.files.checkpoint_loading import configuration, configuration_of
from signalprop.files.guard import _installed, within

MANY = 2_000_000_000
SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/share/zoneinfo/")
# what no configuration may lead to, by how the event begins
EVENTS = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.", "pickle.")

_seen: list[str] | None = None
_place = ""


@cache
def _paths() -> tuple[str, ...]:
    """Where Python imports from: packages may be installed elsewhere, as with --target."""
    return tuple(os.path.realpath(entry) for entry in sys.path if entry)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if not (path.startswith(SYSTEM) or _installed(path) or within(path, (_place, *_paths()))):
            _seen.append(f"open {path}")
    elif event == "exec" and not str(args[0].co_filename).startswith("<"):
        path = os.path.realpath(args[0].co_filename)
        if not (_installed(path) or within(path, _paths())):
            _seen.append(f"exec {path}")
    elif event.startswith(EVENTS):
        _seen.append(f"{event} {args!s:.80}")


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[list[str]]:
    """The events outside of the directory and the installed packages, while anything is loaded."""
    global _seen, _place
    if not getattr(_watch, "installed", False):
        sys.addaudithook(_watch)
        _watch.installed = True  # type: ignore[attr-defined]
    found: list[str] = []
    _place = os.path.realpath(tmp_path / "checkpoint")
    yield found
    _seen = None


def strings(canary: Path) -> tuple[str, ...]:
    """What leads to other files, code, programs and hosts: whatever follows one of them is seen."""
    code = str(canary / "module.py")
    return (str(canary), code, "../canary", "/dev/zero", "somebody/model", "https://example.org/model", "builtins.eval",
            "hf-hub:somebody/model", "local-dir:" + str(canary))  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of everything that a configuration says."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value[:2]):
            yield from leaves(inner, (*path, i))
    else:
        yield path, value


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a path; what lies beside the path is shared."""
    if not path:
        return value
    step, *rest = path
    out = document.copy()
    out[step] = changed(out[step], tuple(rest), value) if rest else value
    return out


def outcome(folder: Path, document: dict[str, Any], seen: list[str], *, structure: bool) -> str:
    """How loading ends."""
    global _seen
    (folder / "config.json").write_text(json.dumps(document))
    _seen = seen
    try:
        read_structure(folder) if structure else configuration(folder)
    except InputError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    finally:
        _seen = None
    return "loaded"


def defaults_of(name: str) -> dict[str, Any] | None:
    """What a type's configuration says by itself, as a checkpoint's config.json has it."""
    try:
        document = transformers.AutoConfig.for_model(name).to_diff_dict()
        whole = transformers.AutoConfig.for_model(name).to_dict()
    except Exception:  # two of transformers' own cannot be made without values
        return None
    names = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES.get(name)
    first = names[0] if isinstance(names, (tuple, list)) else names
    more = {} if first is None else {"architectures": [first]}
    return json.loads(json.dumps({**whole, **document, "model_type": name, **more}, default=str))


def tried(name: str, tmp_path: Path, seen: list[str], counts: Counter[str]) -> None:
    document = defaults_of(name)
    if document is None:
        counts["types that cannot be made without values"] += 1
        return
    folder, canary = tmp_path / "checkpoint", tmp_path / "canary"
    for place in (folder, canary):
        place.mkdir(exist_ok=True)
    (canary / "module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (canary / "config.json").write_text(json.dumps({"model_type": "bert"}))
    counts["types"] += 1
    if outcome(folder, document, seen, structure=True) == "refused" and seen:
        # transformers' own code runs a program, whatever a file says (RWKV looks for a compiler): never loaded
        counts["types that transformers runs a program for, refused"] += 1
        seen.clear()
        return
    hostile = strings(canary)
    accepted: dict[tuple[Any, ...], Any] = {}
    known = [*leaves(document), (("backbone",), None), (("backbone_kwargs",), None), (("backbone_config",), None)]
    for number, (path, value) in enumerate(known):
        if path[-1] in ("model_type", "transformers_version"):
            continue
        # one of them in every leaf, another one in the next: each meets each kind of leaf somewhere
        text = hostile[number % len(hostile)]
        tries: list[Any] = [text, [text], {"trust_remote_code": True, "path": text}]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            tries.append(MANY)
        for item in tries:
            ended = outcome(folder, changed(document, path, item), seen, structure=False)
            counts[f"leaves {ended}"] += 1
            assert seen == [], (name, path, item, seen)
            assert ended in ("loaded", "refused"), (name, path, item, ended)
            if ended == "loaded" and item in (text, MANY):
                accepted[path] = item
    for path, item in accepted.items():  # and the model of those that were taken, or not looked at, one by one
        if item == MANY:
            ended = outcome(folder, changed(document, path, item), seen, structure=True)
            counts[f"models with {MANY:,} {ended}"] += 1
            assert seen == [], (name, path, item, seen)
    whole = document
    for path, item in accepted.items():
        if item != MANY and path[0] != "architectures":  # whose class would be refused before any other is followed
            whole = changed(whole, path, item)
    counts[f"models {outcome(folder, whole, seen, structure=True)}"] += 1
    assert seen == [], (name, "all at once", seen)
    assert not (tmp_path / "ran").exists()


TYPES = sorted(CONFIG_MAPPING_NAMES)
FEW = ("gpt2", "llama", "detr", "timm_backbone", "timm_wrapper", "deepseek_v3")


@pytest.mark.parametrize("name", some([name for name in FEW if name in TYPES], ("gpt2", "detr", "timm_wrapper")))
def test_a_type(name: str, tmp_path: Path, seen: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried(name, tmp_path, seen, Counter())


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"model_type": "gpt2", "n_layer": [1]}, "n_layer: .* expected int, got list"),
        ({"model_type": "llama", "hidden_size": 65}, "hidden_size: .*65.* not a multiple of .*32"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads: .* by zero"),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": [3], "vocab_size": 9}},
         r"text_config\.hidden_size: .* expected int, got list"),
    ],
)  # fmt: skip
def test_what_transformers_refuses_is_one_line_with_the_entry(
    document: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Its checks of fields, its checks of several of them, and its arithmetic."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"^{file}: {said}"):
        configuration(tmp_path)
    fields = {key: value for key, value in document.items() if key != "model_type"}
    with pytest.raises(InputError, match=f"^the configuration of {document['model_type']}: {said}"):  # of a recipe
        configuration_of(document["model_type"], **fields)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.*.gate"]}, ""),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, ""),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'; expected one of fp8, mxfp4"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        (FP8 | {"fmt": "../elsewhere"}, "fmt is '../elsewhere'; expected a word"),
        (FP8 | {"modules_to_not_convert": ["/dev/zero"]}, "modules_to_not_convert is '/dev/zero'; expected a word"),
        (FP8 | {"modules_to_not_convert": 3.5e99, "weight_block_size": [MANY]}, "expected at most"),
    ],
)
def test_formats_of_weights(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Those that transformers reads without another package, and of their settings words and numbers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    if said:
        with pytest.raises(InputError, match=said):
            configuration(tmp_path)
    else:
        assert configuration(tmp_path).quantization_config == settings


def test_the_watch_sees_what_is_elsewhere(tmp_path: Path, seen: list[str]) -> None:
    global _seen
    (tmp_path / "elsewhere").write_text("x = 1\n")
    _seen = seen
    (tmp_path / "elsewhere").read_text()
    exec(compile("x = 1\n", str(tmp_path / "elsewhere"), "exec"))
    _seen = None
    assert [line.split()[0] for line in seen] == ["open", "exec"]


PARTS = 16  # each a test of its own, so that they can run side by side


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type(part: int, tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints how many there were, and how they ended."""
    # some write themselves to transformers' log as they are made, and so do those within them: a minute for one type
    monkeypatch.setattr(transformers.PretrainedConfig, "__repr__", object.__repr__)
    counts: Counter[str] = Counter()
    names = TYPES[part::PARTS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            tried(name, tmp_path, seen, counts)
    print(f"\ntransformers {transformers.__version__}, part {part + 1} of {PARTS}: {dict(sorted(counts.items()))}")
    assert counts["types"] > 0.9 * len(names)
