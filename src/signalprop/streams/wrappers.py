"""The model inside wrappers, layers without adapters: the one home of unwrapping.

Libraries that may not be installed are looked up among the imported modules: what has not been imported has wrapped
nothing.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers: of torch.compile, DataParallel, DistributedDataParallel, PEFT.

    One of PEFT's that adds tokens (prompt and prefix tuning) is more than the model inside, and stays.
    FSDP2 (`fully_shard`) and accelerate's `device_map` wrap nothing: they change modules in place.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def adds_tokens(model: nn.Module) -> bool:
    """Whether PEFT puts tokens that it learns before those that a model reads, or keys and values before theirs."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    return bool(getattr(model.active_peft_config, "is_prompt_learning", False))


def _inner(model: nn.Module) -> nn.Module | None:
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return compiled
    found: Any = None
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        found = model.module
    elif (peft := sys.modules.get("peft")) is not None:  # by type: a PeftModel has all attributes of what it wraps
        if adds_tokens(model):
            return None
        if isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
            found = model.base_model
        elif isinstance(model, peft.tuners.tuners_utils.BaseTuner):
            found = model.model
    return found if isinstance(found, nn.Module) else None


def adapters_in(model: nn.Module) -> list[str]:
    """The paths of the layers that PEFT has put adapters on."""
    return [name for name, module in model.named_modules() if _is_adapted(module)]


def _is_adapted(module: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def without_adapters(module: Any) -> Any:
    """The layer under PEFT's adapters; anything else passes through."""
    return module.get_base_layer() if _is_adapted(module) else module


def with_adapters_merged(module: Any) -> Any:
    """A layer whose weight acts on the signal: the base weight with the active adapters merged into it, in a copy.

    A layer without active adapters, and anything else, passes through.
    """
    if not _is_adapted(module) or module.merged or module.disable_adapters:
        return without_adapters(module)
    merged = copy.deepcopy(module)
    merged.merge()
    return merged.get_base_layer()
