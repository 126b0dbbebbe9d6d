"""Trials of the configuration: the same weights in a model with one entry changed.

The first is a control: a new model of the configuration as it is. Where that alone lowers the loss, hooks, other code
or buffers of this model are to blame, not an entry. What an entry means is not known here. Those are tried whose other
values leave every parameter its name and shape: switches, numbers of heads and of chosen experts, windows, caps,
factors, the share of a head that is rotated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from signalprop.attachment.anatomy import Anatomy
from signalprop.diagnosis.temporary_changes import Trial
from signalprop.diagnosis.whole_model_values import REBUILT

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_KEY_HEADS, _SIZE = "num_key_value_heads", "head_dim"
_CHOSEN = ("num_experts_per_tok", "num_selected_experts", "moe_topk", "moe_top_k")
_RATIOS = (2, 3, 4)  # of numbers of heads, both ways
_FACTORS = (2.0, 4.0, 8.0, 16.0)  # both ways
_SHARES = (0.25, 0.4, 0.5, 0.75, 1.0)  # of a head that is rotated, in released configurations
_CAPS = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0)  # of logits and of scores; Gemma 2 has the last two
_SHORTEST = 4  # tokens of a window
# Prefixes of switches that do not change what is computed; a tied head is a separate trial.
_NO_SWITCH = ("use_cache", "output_", "return_", "summary_", "torchscript", "tie_", "is_encoder", "add_cross", "grad")


def setting_trials(attached: Anatomy, tokens: int) -> Iterator[Trial]:
    """All that fit a model of transformers; tokens: of the text."""
    model: Any = attached.model
    if not type(model).__module__.startswith("transformers.models."):
        return
    try:
        plain = type(model.config)()
    except Exception:  # a configuration that has no defaults
        plain = None
    for changes, words in _others(model.config, tokens):
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, value)
        other = _built(model, config)
        if other is None:
            continue
        if not changes:
            yield Trial(
                REBUILT, "the model computes something else than its class does with this configuration",
                "a new model of the same configuration around the same weights",
                lambda other=other: _in_place_of(model, other),  # type: ignore[misc]
            )  # fmt: skip
            continue
        now = ", ".join(f"{name} is {getattr(model.config, name)}" for name in changes if name in words)
        unset = all(getattr(model.config, name) == getattr(plain, name, None) for name in changes)
        yield Trial(
            "unset" if unset else "setting", f"{now}, which these weights were not trained with", words,
            lambda other=other: _in_place_of(model, other),  # type: ignore[misc]
        )  # fmt: skip


def _others(config: Any, tokens: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Entries with other values, and the change in words; none first."""
    yield {}, ""
    entries = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, own in entries.items():
        values: list[Any] = []
        if isinstance(own, bool):
            values = [] if name.startswith(_NO_SWITCH) else [not own]
        elif name in _CHOSEN and isinstance(own, int):
            values = [n for n in (own // 2, own - 1, own + 1, 2 * own) if n > 0 and n != own]
        elif name == "sliding_window":
            lengths = [2**k for k in range(2, 20) if _SHORTEST <= 2**k < tokens]
            everywhere = "sliding" not in str(entries.get("layer_types"))  # else a layer needs one
            values = [*([None] if everywhere else []), *lengths]
        elif name.endswith("softcapping"):
            values = [x for x in (None, *_CAPS) if x != own]
        elif isinstance(own, float) and own and ("multiplier" in name or "logit" in name) and "coef" not in name:
            values = [own * f for factor in _FACTORS for f in (factor, 1 / factor)]
        elif name in _HEADS and isinstance(own, int):
            yield from _heads(entries, name, own)
        elif name == "rope_parameters" and isinstance(own, dict) and "partial_rotary_factor" in own:
            for share in _SHARES:
                if share != own["partial_rotary_factor"]:
                    yield {name: own | {"partial_rotary_factor": share}}, f"{name}: partial_rotary_factor = {share:g}"
        for value in dict.fromkeys(values):
            yield {name: value}, f"{name} = {f'{value:g}' if isinstance(value, float) else value}"


def _heads(entries: dict[str, Any], name: str, own: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Other numbers of heads, with as many key heads to each and the same width of all."""
    for up, down in [(r, 1) for r in _RATIOS] + [(1, r) for r in _RATIOS]:
        changes = {name: own * up // down}
        exact = own * up % down == 0
        if entries.get(_KEY_HEADS) is not None:
            changes[_KEY_HEADS] = entries[_KEY_HEADS] * up // down
            exact = exact and entries[_KEY_HEADS] * up % down == 0
        if entries.get(_SIZE) is not None:
            changes[_SIZE] = entries[_SIZE] * down // up
            exact = exact and entries[_SIZE] * down % up == 0
        if exact:
            yield changes, ", ".join(f"{key} = {value}" for key, value in changes.items())


class _Empty(TorchFunctionMode):
    """Weights, which constructors ask of `torch.empty`, take no memory and no time; buffers are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.get("tensor")  # as torch.nn.init gives it
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")  # as initialisers are
        if isinstance(first, Tensor) and first.is_meta and in_place:
            return first
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _built(model: Any, config: Any) -> nn.Module | None:
    """A model of that configuration around the parameters of this one; None where they do not fit."""
    try:
        with _Empty(), torch.random.fork_rng(devices=[]):
            other: nn.Module = type(model)(config)
    except Exception:  # whatever a constructor raises of a value that it does not take
        return None
    held, made = _parameters(model), _parameters(other)
    if {n: p.shape for n, p in held.items()} != {n: p.shape for n, p in made.items()}:
        return None
    for path, module in other.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = held[f"{path}.{name}".removeprefix(".")]
    stored = model.state_dict()
    for name, b in other.named_buffers():
        if b.is_meta:
            return None
        if name in stored and stored[name].shape == b.shape:
            b.data = stored[name]
    device = next(iter(held.values())).device
    for b in other.buffers():
        b.data = b.data.to(device)
    return other.eval()


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


@contextmanager
def _in_place_of(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """The model is the other one for as long as the block runs."""
    held = model.__dict__
    try:
        model.__dict__ = other.__dict__
        yield
    finally:
        model.__dict__ = held
