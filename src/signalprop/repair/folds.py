"""`fold`: multiply everything that `apply` installed into weights, norms and attention, and give vanilla modules back.

All is planned before anything is changed, so that a model that cannot be folded stays as it was. docs/theory/gauge.md
has the rules.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, bare
from signalprop.attachment.rows import Held
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.kinds import ROLE
from signalprop.repair.initialisation import require_whole
from signalprop.repair.installation import Applied, eps_bound
from signalprop.repair.record import Record, attached_vanilla, take_off, the_record
from signalprop.repair.splices import Multiplied, TrainedMultiplier
from signalprop.repair.tiny_pass import arguments_for, norm_before
from signalprop.repair.undoing import all_or_nothing
from signalprop.repair.weight_changes import Change, Factor, Factors, equal, product
from signalprop.streams.calls import remember
from signalprop.streams.proof import gain_and_bias

# A change of a norm's output below this is not worth a warning: fp32 sums over a few hundred features err as much.
_NEGLIGIBLE = 1e-6
_REFUSAL = "{} cannot be folded into weights: {}; keep the scheme with the weights instead (signalprop.save)"


@typed
def fold(model: nn.Module | Anatomy, inputs: Any = None) -> nn.Module:
    """Multiply all multipliers of an applied model into its weights, in place: the same function, vanilla modules.

    Fixed multipliers, trained scalars, per-channel vectors and score scales go into weights, biases and gains (in
    float64, cast back). Classes, dropout, attributes and state-dict keys are then those of the vanilla model, so that
    `save_pretrained` writes a checkpoint that needs nothing but transformers. Fold to export: optimizer states and
    learning rates belong to the weights before.

    Where head and embedding share a weight, the head's factor goes into the norm before the head: logits stay, the last
    hidden state is multiplied. Matched epsilons go back to the model's; where that changes a norm's output by more
    than 1e-6, a UserWarning says by how much at most.

    Args:
        inputs: what the model is called with, as `measure` takes it, where its head shares its weight and the call
            cannot be told from the model.

    Returns:
        The given model, or the model of the Anatomy.

    Raises:
        InputError: no scheme was applied, weights that are not there yet or sharded, or something that no weight can
            hold (the message names the sublayer): a skip multiplier that does not gauge away. The model is then as it
            was, as after an interrupt.
    """
    inner = next((module for module in bare(model).modules() if isinstance(module, Applied)), bare(model))
    record = the_record(inner)
    remember(inner, inputs)
    require_whole(inner, "fold")
    the_record(inner, drawn_before="fold")
    plan = _Folding(attached_vanilla(inner), record)
    changes = plan.changes()
    error = plan.eps_error
    with torch.no_grad(), all_or_nothing(inner, [change.tensor for change in changes]):
        for change in changes:
            change.tensor.copy_(change.value())
        take_off(inner, record)
        config: Any = getattr(inner, "config", None)
        if hasattr(config, "signalprop"):  # where plain transformers had read a checkpoint of an applied model
            del config.signalprop
    if error > _NEGLIGIBLE:
        warnings.warn(
            "fold: a checkpoint has one epsilon for all norms, so those matched to the stream are reset to "
            f"the configuration's; outputs of norms change by up to {error:.1e} (relative)",
            UserWarning,
            stacklevel=2,
        )
    return model.outer if isinstance(model, Anatomy) else model


class _Folding:
    """What folding a model takes. Nothing in here changes the model."""

    def __init__(self, attached: Anatomy, record: Record) -> None:
        self.attached, self.record = attached, record
        self.eps_error = 0.0
        self.factors = Factors(attached, _REFUSAL, "fold", every_holder=True)

    def changes(self) -> list[Change]:
        """Every parameter that changes, once."""
        model, p, plan = self.attached.model, self.record.parametrization, self.record.plan
        where: dict[int, str] = {}
        for here in self.attached.rows:
            weights = [held.holder for held in here.weights.values()]
            for owner in (here.ending, here.norm, here.post_norm, here.query_norm, *weights):
                where.setdefault(id(owner), here.label)
        if self.record.matched_eps:
            self.eps_error = eps_bound(self.attached.mapping.architecture, p, plan)
        for here, row in zip(self.attached.rows, plan.rows, strict=True):
            if isinstance(here.ending, TrainedMultiplier):
                factor = product(_value(here.ending.multiplier), here.ending.gauge)
                self._into(here.ending, factor, factor, here.label)
            if row.score_ratio != 1 and here.scaling is not None:  # into the queries: their norm, or their map's rows
                queries = here.weights["query"] if here.query_norm is None else Held(here.query_norm)
                self.factors.scale(queries, row.score_ratio, row.score_ratio, here.label)
        for name, module in model.named_modules():
            if isinstance(module, Multiplied):
                self._multiplied(module, where.get(id(module), name))
        self._tied_head()
        return self.factors.changes()

    def _into(self, carrier: nn.Module, weight: Factor, bias: Factor, where: str) -> None:
        """A factor on what a carrier outputs: into its weight, or into those that end a branch without one."""
        here = next((row for row in self.attached.rows if row.ending is carrier), None)
        last = [] if here is None else [held for role, held in here.weights.items() if ROLE[role].writes]
        ends = any(held.copies for held in last) or (last and isinstance(carrier, nn.MultiheadAttention))
        whole = isinstance(gain_and_bias(carrier)[0], Tensor) or not ends
        for held in [Held(carrier)] if whole else last:
            self.factors.scale(held, weight, bias, where)

    def _multiplied(self, module: Multiplied, where: str) -> None:
        if isinstance(gain_and_bias(module)[0], Tensor):
            self.factors.scale(Held(module), module.input_scale * module.branch_scale, module.branch_scale, where)
            return
        readers = self._readers(module)  # of a norm without weight
        if not readers and module.input_scale == 1:
            self._into(module, module.branch_scale, module.branch_scale, where)
            return
        if not readers:
            raise _refused(where, f"{type(module)._vanilla.__name__} has no weight that its multiplier could go into")
        for reader in readers:
            self.factors.scale(Held(reader), module.branch_scale, 1.0, where)

    def _readers(self, norm: nn.Module) -> list[nn.Module]:
        """The maps that read a norm before a branch."""
        found: dict[int, nn.Module] = {}
        for row in self.attached.rows:
            if row.norm is norm and row.placement in ("pre", "sandwich"):
                found |= {id(owner): owner for owner in row.readers}
        return list(found.values())

    def _tied_head(self) -> None:
        """Give the norm before the head what a weight that the embedding shares cannot hold of the head's factor."""
        if self.attached.ends.head is None:
            return
        head = self.attached.ends.head.holder
        weight = getattr(head, "weight", None)
        others = [module for module in self.factors.holders(weight) if module is not head]
        if not others or weight is None:
            return
        mine, theirs = (self.factors.of(weight, module) for module in (head, others[0]))
        if equal(mine, theirs):
            return
        assert isinstance(mine, float) and isinstance(theirs, float)
        if theirs == 0:
            raise _refused("the head", "it shares its weight with embeddings whose multiplier is 0")
        norm = norm_before(self.attached, head, arguments_for(self.attached, None))
        if norm is None:
            why = "it shares its weight with the embedding, and its input is not a norm that nothing else reads"
            raise _refused("the head", why)
        ratio = mine / theirs
        self.factors.scale(Held(norm), ratio, ratio, "the norm before the head")
        self.factors.as_of(weight, head, others[0])


def _refused(where: str, why: str) -> InputError:
    return InputError(_REFUSAL.format(where, why))


def _value(multiplier: Tensor) -> Factor:
    """A multiplier as a number, or as one per feature in float64."""
    values = multiplier.detach().double()
    return float(values) if values.numel() == 1 else values.flatten()
