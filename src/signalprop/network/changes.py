"""What follows from a changed field of an architecture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, TypeGuard

import numpy as np

from signalprop.network.architecture_fields import ArchitectureFields, is_one_layer

_FOLLOWS = (  # (field, what is equal to it by default)
    ("dropout", "attention_dropout"),
    ("dropout", "embedding_dropout"),
    ("n_layers", "n_decoder_layers"),
    ("seq_len", "target_len"),
    ("bias", "qkv_bias"),
    ("n_heads", "n_kv_heads"),
)


def changed_fields(a: ArchitectureFields, changes: dict[str, Any]) -> dict[str, Any]:
    """All fields of `a` after `changes`, with what follows from these (`Architecture.replace`); not validated."""
    fields = a.model_dump()
    for source, follower in _FOLLOWS:
        if source in changes and getattr(a, follower) == getattr(a, source):
            fields[follower] = None
    if changes.get("kind", a.kind) != a.kind:
        fields |= {"n_decoder_layers": None, "target_len": None, "decoder_positions": None, "branches": None}
    changes = _branches_at(a, changes.get("n_layers")) | changes
    fields["settings"] = _settings_after(a, changes)
    changes = {key: value for key, value in changes.items() if key != "settings"}
    if changes.get("parallel") is False:
        fields["shared_norm"] = None
    if changes.get("norm_placement", a.norm_placement) != a.norm_placement:
        fields["final_norm"] = None
    if "n_heads" in changes and a.d_model == a.n_heads * a.d_head:
        fields["d_head"] = None
    d_model = changes.get("d_model")
    if is_width(d_model) and d_model != a.d_model:
        fields["d_ff"] = max(1, round(a.d_ff * d_model / a.d_model))
        if changes.keys().isdisjoint({"n_heads", "d_head"}):
            fields |= _heads_at(a, d_model)
    return {**fields, **changes}


def _branches_at(a: ArchitectureFields, n_layers: Any) -> dict[str, Any]:
    """Branches that are named layer by layer, for so many layers; nothing where they are not."""
    of_any_depth = a.branches is None or is_one_layer(a.branches) or a.kind == "encoder-decoder"
    if of_any_depth or not is_width(n_layers):
        return {}
    return {"branches": tuple(islice(cycle(a.layer_branches), int(n_layers)))}


def _settings_after(a: ArchitectureFields, changes: dict[str, Any]) -> Any:
    """Of the kinds that stay; a mapping in `changes` changes the fields that it names."""
    settings: dict[str, Any] = dict(a.settings)
    if "branches" in changes or changes.get("kind", a.kind) != a.kind:
        there = set(_names(changes.get("branches") or ("attention", "feed_forward", "cross_attention")))
        settings = {name: value for name, value in settings.items() if name in there}
    wanted = changes.get("settings") or {}
    if not isinstance(wanted, dict):
        return wanted  # to be refused
    for name, given in wanted.items():
        before = settings[name].model_dump() if name in settings and isinstance(given, dict) else {}
        settings[name] = before | given if isinstance(given, dict) else given
    return settings


def _heads_at(a: ArchitectureFields, d_model: int) -> dict[str, int | None]:
    """Heads of the same width at another d_model, in groups of the same size where that goes."""
    n_heads, remainder = divmod(a.n_heads * d_model, a.d_model)
    if remainder or n_heads == 0:
        return {"n_heads": 1, "n_kv_heads": None, "d_head": None}
    group = a.n_heads // a.n_kv_heads
    options = [n_heads // group if n_heads % group == 0 else 0, a.n_kv_heads]
    return {"n_heads": n_heads, "n_kv_heads": next((n for n in options if n and n_heads % n == 0), None)}


def _names(branches: Any) -> Iterator[str]:
    """The kinds that a value of `branches` names."""
    for item in branches if isinstance(branches, (list, tuple)) else ():
        yield from (item,) if isinstance(item, str) else _names(item)


def is_width(value: Any) -> TypeGuard[int]:
    """Whether it is a positive whole number."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0
