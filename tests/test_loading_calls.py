"""Whatever loads a checkpoint goes through one module, as the calls in the sources say."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOOR = "src/signalprop/files/checkpoint_loading.py"
# Calls that can run what a file brings, or fetch what it names. `load` of these modules; the others of anything.
LOADS = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "marshal", "shelve", "torch", "yaml", "jit", "hub"}
CALLS = {
    "from_pretrained", "from_config", "_from_config", "for_model", "load_dataset", "load_from_disk",
    "snapshot_download", "hf_hub_download", "get_class_from_dynamic_module", "load_checkpoint", "load_adapter",
    "unsafe_load", "full_load", "load_state_dict_from_url", "Unpickler", "eval", "exec", "__import__", "run_module",
    "run_path", "pipeline",
}  # fmt: skip
# What else there is, each looked at.
LOOKED_AT = {
    ("src/signalprop_lab/training/recipe_files.py", "yaml.load"): 1,  # with a loader that is a SafeLoader
    ("src/signalprop/files/checkpoint_tokenizers.py", "from_pretrained"): 1,  # in a directory of its own
    ("src/signalprop_lab/training/networks.py", "getattr(transformers, ...)"): 1,  # a table that stands there
    ("src/signalprop_lab/mutants.py", "exec"): 1,  # the project's own sources with a change
    ("benchmarks/doctor/models.py", "getattr(transformers, ...)"): 2,  # a table that stands there
    ("benchmarks/small_models.py", "getattr(transformers, ...)"): 1,  # names in transformers' own tables
    ("benchmarks/fresh_families.py", "for_model"): 1,  # a configuration by its type, of a table that stands there
    ("benchmarks/waiting.py", "from_config"): 1,  # the class of a checkpoint, with random weights
    ("benchmarks/waiting.py", "from_pretrained"): 1,  # the configuration of a folder that the benchmark names
    ("benchmarks/notebooks.py", "exec"): 1,  # the project's own examples
    ("benchmarks/notebooks.py", "eval"): 1,
}


def loads_of(node: ast.Call) -> list[str]:
    """What a call loads, or looks for in transformers by a name that is not written there."""
    found = []
    function = node.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        last = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        if function.attr in CALLS - {"eval"}:
            found.append(function.attr)
        elif function.attr in ("load", "loads", "load_all") and last in LOADS:
            found.append(f"{last}.{function.attr}")
        elif function.attr == "load" and last in ("np", "numpy"):
            wanted = [k for k in node.keywords if k.arg in ("allow_pickle", None)]  # by default it is not
            found += [] if all(getattr(k.value, "value", True) is False for k in wanted) else ["np.load"]
    elif isinstance(function, ast.Name):
        if function.id in CALLS:
            found.append(function.id)
        elif function.id == "getattr" and isinstance(node.args[0], ast.Name) and node.args[0].id == "transformers":
            found += [] if isinstance(node.args[1], ast.Constant) else ["getattr(transformers, ...)"]
    return found + [f"{k.arg}=True" for k in node.keywords if k.arg == "trust_remote_code" and _true(k.value)]


def _true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


# A file without any of these words before a bracket is not parsed.
NAMED = re.compile(rf"\b(?:{'|'.join(CALLS)}|load|loads|load_all|getattr)\(|trust_remote_code")


def calls(source: str) -> Iterator[ast.Call]:
    if not NAMED.search(source):
        return iter(())
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def test_every_load_goes_through_one_module() -> None:
    loaded: Counter[tuple[str, str]] = Counter()
    for top in ("src", "benchmarks"):
        for file in (ROOT / top).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            for node in calls(file.read_text("utf-8")):
                loaded.update((path, call) for call in loads_of(node) if path != DOOR)
    assert loaded == LOOKED_AT
    door = [call for node in calls((ROOT / DOOR).read_text("utf-8")) for call in loads_of(node)]
    assert {"from_pretrained", "load_dataset"} <= set(door)
