"""What the weights of a model are that replays cannot show, by its twin: a random model of its configuration.

On the meta device, in half precision and quantised, replays prove nothing. Of a model of transformers another one is
made then, in single precision, with few words, and with two layers where all layers hold modules of the same names.
What is proved there is carried over, layer by layer. A twin is proved once in a process.
"""

from __future__ import annotations

import copy
from dataclasses import is_dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.arguments import BatchArguments
from signalprop.attachment.found import taken
from signalprop.attachment.found_roles import mapping_with_roles
from signalprop.attachment.mapping import Mapping
from signalprop.errors import InputError
from signalprop.files.checkpoint_loading import fresh, without_numbers
from signalprop.streams.arguments import text_config
from signalprop.streams.parts import within
from signalprop.streams.streams import Streams

LARGEST = 10**9  # parameters of a twin: 4 GB
KEPT = 2  # layers of a twin whose layers are equal
WORDS = 1000  # of a twin: tables of tokens are drawn and multiplied as long as half of a small model
_NOISE = 0.1  # on what is fresh at 0 or 1 (biases, gains), behind which nothing may hide
_PROVED: dict[Any, Mapping | None] = {}


def mapping_by_twin(model: nn.Module, mapping: Mapping) -> Mapping | None:
    """The mapping with the roles of the weights that the model's twin proves; None if no twin can be built.

    Args:
        mapping: what the model's streams say of it.

    Raises:
        InputError: the twin's weights are not proved either.
    """
    assert mapping.found is not None
    paths = layer_paths(model, mapping.found)
    refusal: InputError | None = None
    for size in sizes(model, paths):
        key = type(model), str(getattr(model, "config", "")), size
        try:
            if key not in _PROVED:
                twin = twin_of(model, paths, *size)
                _PROVED[key] = None if twin is None else mapping_with_roles(twin)
        except InputError as error:
            refusal = error
            continue
        proved = _PROVED[key]
        found = None if proved is None else _carried(model, proved, paths, mapping)
        if found is not None:
            return found
    if refusal is not None:
        raise refusal
    return None


def layer_paths(model: nn.Module, found: Streams) -> list[str]:
    """Of the layers of the stacks that are taken."""
    return [layer.path for stack in taken(model, found) for layer in stack.layers]


def sizes(model: nn.Module, paths: list[str]) -> list[tuple[int | None, int | None]]:
    """How many layers and words a twin may have, the fewest first; None: as many as the model."""
    inside = {frozenset(_names(model.get_submodule(path))) for path in paths}
    depths = (KEPT, None) if len(paths) > KEPT and len(inside) == 1 else (None,)
    many = (getattr(text_config(model), "vocab_size", None) or 0) > WORDS
    return [(layers, words) for layers in depths for words in ((WORDS, None) if many else (None,))]


def first_twin(model: nn.Module, found: Streams) -> nn.Module | None:
    """The smallest twin that can be made of a model with these streams."""
    paths = layer_paths(model, found)
    twins = (twin_of(model, paths, *size) for size in sizes(model, paths))
    return next((twin for twin in twins if twin is not None), None)


def with_proofs(found: Streams, proved: Streams) -> Streams:
    """Streams without numbers, with what those of a twin prove of sums, norms and the axis of tokens, layer by layer.

    As they were, where the twin's layers have other branches.
    """
    stacks, norms = [], {norm.path: norm for norm in proved.norms}
    for here, there in zip(found.stacks, proved.stacks, strict=False):
        layers = []
        for layer, of_twin in zip_longest(here.layers, there.layers[: len(here.layers)], fillvalue=there.layers[-1]):
            moved = _moved(of_twin, of_twin.path, layer.path)
            if tuple(replace(b, error=None, rounding=0.0) for b in moved.branches) != layer.branches:
                return found
            layers.append(replace(layer, branches=moved.branches))
            inside = [norm for norm in proved.norms if within(norm.path, of_twin.path)]
            norms |= {norm.path: norm for norm in (_moved(one, of_twin.path, layer.path) for one in inside)}
        axis = {name: getattr(there, name) for name in ("causal", "memory", "tokens_first", "reads_tokens_first")}
        stacks.append(replace(here, layers=tuple(layers), **axis))
    same = [stack.path for stack in found.stacks] == [stack.path for stack in proved.stacks]
    return replace(found, stacks=tuple(stacks), norms=tuple(norms.values())) if same else found


def twin_of(model: Any, paths: list[str], layers: int | None, words: int | None = None) -> nn.Module | None:
    """A random model of the same class and configuration, in single precision; None where none can be made.

    Args:
        paths: of the model's layers. layers, words: how many the twin has; None: as many.
    """
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "to_dict"):
        return None
    vars(config).pop("quantization_config", None)
    config.dtype, config._attn_implementation = torch.float32, "eager"
    if layers is not None and not _shortened(config.get_text_config(), layers):
        return None
    if words is not None:
        _with_words(config.get_text_config(), words)
    try:
        if sum(p.numel() for p in without_numbers(type(model), config).parameters()) > LARGEST:
            return None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            twin: nn.Module = fresh(type(model), config)
            with torch.no_grad():
                for p in twin.parameters():
                    if p.ndim == 1 or not p.any():
                        p.add_(_NOISE * torch.randn_like(p))
    except Exception:  # whatever a constructor may raise
        return None
    left_out = [] if layers is None else paths[layers:]
    names = {name for name in _names(model) if not any(within(name, path) for path in left_out)}
    return twin.eval() if _names(twin) == names else None


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}


def _shortened(config: Any, layers: int) -> bool:
    """Whether a configuration has fewer layers now: where it says nothing of single ones, in lists."""
    n = getattr(config, "num_hidden_layers", None)
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == n}
    if n is None or any(one != value[0] for value in lists.values() for one in value):
        return False
    for name, value in lists.items():
        setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return True


def _with_words(config: Any, words: int) -> None:
    """Give a configuration so many words, with its special ones among them."""
    config.vocab_size = words
    for name, value in vars(config).items():
        if name.endswith("token_id") and isinstance(value, int):
            setattr(config, name, value % words)


def _carried(model: nn.Module, proved: Mapping, paths: list[str], mapping: Mapping) -> Mapping | None:
    """What was proved of a twin, of the model with layers at these paths; None where the twin's two layers differ."""
    a, items = proved.architecture, list(proved.sublayers)
    note = "this was proved on a random model of the same configuration, in single precision"
    if a.n_layers_total < len(paths):
        half = len(items) // KEPT
        first, second = [_moved(item, paths[0], paths[1]) for item in items[:half]], items[half:]
        by_layer = [a.norm_placement, *(value for one in a.settings.values() for value in vars(one).values())]
        if first != second or a.layer_inputs is not None or any(isinstance(value, tuple) for value in by_layer):
            return None
        a = a.replace(n_layers=len(paths), branches=a.layer_branches[:1] * len(paths))
        items += [_moved(item, paths[KEPT - 1], path) for path in paths[KEPT:] for item in second]
        note += f", with {KEPT} layers: the others hold modules of the same names, and were taken to be wired like them"
    for i, (item, here) in enumerate(zip(items, mapping.sublayers, strict=True)):
        trained = [name for name in ("skip", "multiplier") if isinstance(getattr(item, name), Tensor)]
        items[i] = replace(item, **{name: getattr(here, name) for name in trained})
    if isinstance(proved.embedding.token, str) and a.input == "tokens":
        table: Any = model.get_submodule(proved.embedding.token)
        a = a.replace(vocab_size=getattr(table, "num_embeddings", None) or table.weight.shape[0])
    made = proved.arguments
    if isinstance(made, BatchArguments):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), made.dtype)
        made = replace(made, architecture=a, dtype=dtype)
    return replace(
        proved, architecture=a, sublayers=items, arguments=made, layers=mapping.layers, found=mapping.found,
        notes=(*proved.notes, note),
    )  # fmt: skip


def _moved(item: Any, old: str, new: str) -> Any:
    """What is said of the layer at one path, as of the layer at another."""

    def move(value: Any) -> Any:
        if isinstance(value, str) and within(value, old):
            return new + value[len(old) :]
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{name: move(one) for name, one in vars(value).items()})
        if isinstance(value, tuple):
            return tuple(move(one) for one in value)
        return {role: move(one) for role, one in value.items()} if isinstance(value, dict) else value

    return move(item)
