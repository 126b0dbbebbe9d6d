"""How many tokens every expert of a layer gets, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.hooks import Hooks
from signalprop.results.profile import EXPERT_LOAD

# Tokens that an equal share must be before no token at all means something (1 in 500 million by chance).
_SHARE = 20


class ExpertLoad:
    """Counts the expert indices (tokens, k) that modules with `num_experts` are called with: transformers' layout.

    Args:
        attached: the model, with the layers that its mapping names.
        sequences: that a pass holds; their tokens stand one after the other.
    """

    def __init__(self, attached: Anatomy, sequences: int = 1) -> None:
        self._sequences = sequences
        self._found = [_experts(layer) for layer in attached.layers]
        self._counts: dict[int, Tensor] = {}
        self._hooks: Hooks | None = None

    def attach(self) -> None:
        """Count from here on, the first pass through every layer; nothing without experts."""
        self._counts.clear()
        if any(module is not None for module in self._found):
            self._hooks = Hooks()
            for k, module in enumerate(self._found):
                if module is not None:
                    self._hooks.before(module, lambda _, args, kwargs, k=k: self._see(k, args, kwargs))
            self._hooks.attach()

    def detach(self) -> None:
        """Take the hooks off; harmless when there are none."""
        if self._hooks is not None:
            self._hooks.detach()
            self._hooks = None

    def loads(self) -> dict[str, list[float | None]]:
        """Least (and whose) and largest load of experts, by layer; 1: an equal share; nothing where none was seen."""
        if not self._counts:
            return {}
        shares = [self._shares(k) for k in range(len(self._found))]
        return {
            "expert_load": [None if s is None else float(s.min()) for s in shares],
            "least_loaded_expert": [None if s is None else float(s.argmin()) for s in shares],
            "largest_expert_load": [None if s is None else float(s.max()) for s in shares],
        }

    def variation(self) -> dict[str, list[float]]:
        """Standard deviation of the experts' loads in a sequence over their mean, by layer (0: none seen).

        Root mean square over the sequences; nothing without experts.
        """
        if not self._counts:
            return {}
        loads = [self._counts.get(k) for k in range(len(self._found))]
        spread = [
            0.0 if n is None else float((n.double().var(1, correction=0) / n[0].double().mean() ** 2).mean())
            for n in loads
        ]
        return {EXPERT_LOAD: [one**0.5 for one in spread]}

    def _shares(self, k: int) -> Tensor | None:
        if k not in self._counts:
            return None
        counts = self._counts[k].sum(0)
        if counts.sum() < _SHARE * len(counts):
            return None
        return counts.double() * len(counts) / counts.sum()

    def _see(self, k: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        module = self._found[k]
        chosen = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and _indices(x)), None)
        if module is not None and chosen is not None and k not in self._counts:
            n = int(module.num_experts)  # type: ignore[arg-type]
            even = len(chosen) % self._sequences == 0
            rows = chosen.detach().long().clamp(0, n).reshape(self._sequences if even else 1, -1)
            self._counts[k] = torch.stack([torch.bincount(row, minlength=n + 1)[:n] for row in rows]).cpu()


def _indices(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool) and x.ndim == 2


def _experts(layer: Any) -> nn.Module | None:
    """The module of a layer that holds its experts and is called with indices of them."""
    parts = layer if isinstance(layer, (tuple, list)) else (layer,)
    found = [m for part in parts for m in part.modules() if isinstance(getattr(m, "num_experts", None), int)]
    return next((m for m in found if type(m).__name__.endswith("Experts")), None)
