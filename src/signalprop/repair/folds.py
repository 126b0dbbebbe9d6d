"""`fold`: multiply everything that `apply` installed into weights, norms and attention, and give vanilla modules back.

All is planned before anything is changed, so that a model that cannot be folded stays as it was. docs/theory/gauge.md
has the rules.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached
from signalprop.attachment.rows import AttachedRow, is_transposed
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.kinds import ROLE
from signalprop.network.layout import PLACEMENTS
from signalprop.repair.initialisation import plain
from signalprop.repair.installation import Applied, eps_bound
from signalprop.repair.record import Record, attached_vanilla, take_off, the_record
from signalprop.repair.splices import Multiplied, Rewired, Splice, restore
from signalprop.repair.tiny_pass import arguments_for, norm_before
from signalprop.repair.undoing import all_or_nothing
from signalprop.repair.weight_changes import Change, Factor, product
from signalprop.streams.calls import remember
from signalprop.streams.proof import affine, gain_and_bias
from signalprop.streams.wrappers import unwrapped

# A change of a norm's output below this is not worth a warning: fp32 sums over a few hundred features err as much.
_NEGLIGIBLE = 1e-6


@typed
def fold(model: nn.Module, inputs: Any = None) -> nn.Module:
    """Multiply all multipliers of an applied model into its weights, in place: the same function, vanilla modules.

    Fixed multipliers, trained scalars, per-channel vectors and score scales go into weights, biases and gains (in
    float64, cast back). Classes, dropout, attributes and state-dict keys are then those of the vanilla model, so that
    `save_pretrained` writes a checkpoint that needs nothing but transformers. Fold to export: optimizer states and
    learning rates belong to the weights before.

    Where head and embedding share a weight, the head's factor goes into the norm before the head: logits stay, the last
    hidden state is multiplied. Matched epsilons go back to the model's own; where that changes a norm's output by more
    than 1e-6, a UserWarning says by how much at most.

    Args:
        inputs: what the model is called with, as `measure` takes it, where its head shares its weight and the call
            cannot be told from the model.

    Returns:
        The model that was given.

    Raises:
        InputError: no scheme was applied, weights that are not there yet or sharded, or something that no weight can
            hold (the message names the sublayer): a skip multiplier that does not gauge away. The model is then as it
            was, as after an interrupt.
    """
    inner = next((module for module in unwrapped(model).modules() if isinstance(module, Applied)), unwrapped(model))
    record = the_record(inner)
    remember(inner, inputs)
    _refuse_what_is_not_there(inner, record)
    plan = _Folding(attached_vanilla(inner), record)
    changes = plan.changes()
    error = plan.eps_error
    with torch.no_grad(), all_or_nothing(inner, [change.tensor for change in changes]):
        for change in changes:
            change.tensor.copy_(change.value())
        take_off(inner, record)
        restore(inner)
        config: Any = getattr(inner, "config", None)
        if hasattr(config, "signalprop"):  # where plain transformers had read a checkpoint of an applied model
            del config.signalprop
    if error > _NEGLIGIBLE:
        warnings.warn(
            f"fold: a checkpoint keeps one epsilon for all norms, so those that were matched to the stream are back at "
            f"the model's own; outputs of norms change by up to {error:.1e} of themselves",
            UserWarning,
            stacklevel=2,
        )
    return model


def _refuse_what_is_not_there(model: nn.Module, record: Record) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is on the meta device; fold needs weights: to_empty, initialize, or load them first"
            )
        if not plain(parameter):
            raise InputError(
                f"{name} is sharded over processes; gather the state dict into a whole model, and fold that"
            )
    if record.pending:
        raise InputError("the weights have not been drawn yet; call signalprop.initialize(model) before fold")


@dataclass
class _Folding:
    """What folding a model takes. Nothing in here changes the model."""

    attached: Attached
    record: Record
    eps_error: float = 0.0
    factors: dict[tuple[int, str], Factor] = field(default_factory=dict)  # of the weight and the bias of a module
    modules: dict[int, nn.Module] = field(default_factory=dict)
    where: dict[int, str] = field(default_factory=dict)
    holders: dict[int, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    bare: list[Change] = field(default_factory=list)  # of parameters that no module has as its weight
    several: set[int] = field(default_factory=set)  # modules whose weights' first axis counts maps

    def changes(self) -> list[Change]:
        """Every parameter that changes, once."""
        model, p, plan = self.attached.model, self.record.parametrization, self.record.plan
        for here, path in zip(self.attached.rows, self.record.carriers, strict=True):
            weights = [held.holder for held in here.weights.values()]
            for owner in (model.get_submodule(path), here.norm, here.post_norm, here.query_norm, *weights):
                self.where.setdefault(id(owner), here.label)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.holders.setdefault(id(parameter), []).append((module, name))
        if self.record.matched_eps:
            self.eps_error = eps_bound(self.attached.mapping.architecture, p, plan)
        for i, (here, row) in enumerate(zip(self.attached.rows, plan.rows, strict=True)):
            where = here.label
            carrier = model.get_submodule(self.record.carriers[i])
            if isinstance(carrier, Rewired):
                self._rewired(carrier, i, where, post=PLACEMENTS[p.placement[i]] == "post")
            if row.score_ratio != 1 and here.scaling is not None:
                self._scores(here, row.score_ratio)
        for name, module in model.named_modules():
            if isinstance(module, Multiplied):
                self._multiplied(module, self.where.get(id(module), name))
        self._tied_head()
        return self._gathered()

    # --- the factors of modules --------------------------------------------------------------------------------

    def _factor(self, module: nn.Module, name: str) -> Factor:
        return self.factors.get((id(module), name), 1.0)

    def _scale(self, module: Any, weight: Factor, bias: Factor, where: str) -> None:
        """Factors on a module's weight and bias, beside those that there are."""
        module = _with_weight(module, where)
        self.modules[id(module)] = module
        for name, factor in zip(affine(module), (weight, bias), strict=True):
            self.factors[id(module), name] = product(self._factor(module, name), factor)

    def _rewired(self, carrier: Rewired, i: int, where: str, *, post: bool) -> None:
        multiplier = _value(carrier.multiplier)
        skip = _value(carrier.skip)
        scale = 1.0
        if carrier.stream is not None:
            values = torch.as_tensor(skip, dtype=torch.float64).flatten()
            first = float(values[0])
            same = bool((values == first).all())
            if not same:
                raise _refused(where, "its skip multipliers differ from channel to channel")
            if post and first > 0:  # norm(skip x + m f) = norm(x + m / skip f), but for the epsilon
                scale = 1 / first
                bound = self.attached.mapping.architecture.norm_eps * abs(scale**2 - 1) / 2
                gain = float(self.record.parametrization.norm_gain[i])
                self.eps_error = max(self.eps_error, bound / gain**2 if gain else math.inf)
            elif first != 1:
                raise _refused(where, f"the stream is multiplied with {first:.4g} there")
        factor = product(multiplier, carrier.gauge * scale)
        self._into(carrier, factor, factor, where)

    def _into(self, carrier: nn.Module, weight: Factor, bias: Factor, where: str) -> None:
        """A factor on what a carrier outputs: into its weight, or into those that end a branch without one."""
        here = next((row for row, path in zip(self.attached.rows, self.record.carriers, strict=True)
                     if self.attached.model.get_submodule(path) is carrier), None)  # fmt: skip
        last = [] if here is None else [held for role, held in here.weights.items() if ROLE[role].writes]
        ends = any(held.copies for held in last) or (last and isinstance(carrier, nn.MultiheadAttention))
        if isinstance(gain_and_bias(carrier)[0], Tensor) or not ends:
            self._scale(carrier, weight, bias, where)
            return
        for held in last:
            if isinstance(held.holder, Tensor):
                self.bare.append(Change(held.holder, weight, held.copies + held.transposed, 0.0))
                self.bare += [] if held.bias is None else [Change(held.bias, bias, int(held.copies), 0.0)]
            else:
                self.several |= {id(held.holder)} if held.copies else set()
                self._scale(held.holder, weight, bias, where)

    def _scores(self, row: AttachedRow, ratio: float) -> None:
        """A factor on scores goes into the queries: their norm, or the rows of the map that makes them."""
        if row.query_norm is not None:
            self._scale(row.query_norm, ratio, ratio, row.label)
            return
        query = row.weights["query"]
        factor: Factor = ratio
        if query.rows is not None:
            weight: Any = _with_weight(query.holder, row.label).weight
            factor = torch.ones(weight.shape[1 if query.transposed else 0], dtype=torch.float64)
            factor[query.rows] = ratio
        self._scale(query.holder, factor, factor, row.label)

    def _multiplied(self, module: Multiplied, where: str) -> None:
        if isinstance(gain_and_bias(module)[0], Tensor):
            self._scale(module, module.input_scale * module.branch_scale, module.branch_scale, where)
            return
        readers = self._readers(module)  # of a norm without weight
        if not readers and module.input_scale == 1:
            self._into(module, module.branch_scale, module.branch_scale, where)
            return
        if not readers:
            raise _refused(where, f"{type(module)._vanilla.__name__} has no weight that its multiplier could go into")
        for reader in readers:
            self._scale(reader, module.branch_scale, 1.0, where)

    def _readers(self, norm: nn.Module) -> list[nn.Module]:
        """The maps that read a norm before a branch."""
        found: dict[int, nn.Module] = {}
        for row in self.attached.rows:
            if row.norm is norm and row.placement in ("pre", "sandwich"):
                found |= {id(owner): owner for owner in row.readers}
        return list(found.values())

    # --- the head, and weights that are shared -----------------------------------------------------------------

    def _tied_head(self) -> None:
        """Give the norm before the head what a weight that the embedding shares cannot hold of the head's factor."""
        if self.attached.ends.head is None:
            return
        head = self.attached.ends.head.holder
        weight = getattr(head, "weight", None)
        others = [module for module, _ in self.holders.get(id(weight), []) if module is not head]
        if not others:
            return
        mine, theirs = self._factor(head, "weight"), self._factor(others[0], "weight")
        if _equal(mine, theirs):
            return
        assert isinstance(mine, float) and isinstance(theirs, float)
        if theirs == 0:
            raise _refused("the head", "it shares its weight with embeddings whose multiplier is 0")
        norm = norm_before(self.attached, head, arguments_for(self.attached, None))
        if norm is None:
            why = "it shares its weight with the embedding, and its input is not a norm that nothing else reads"
            raise _refused("the head", why)
        ratio = mine / theirs
        self._scale(norm, ratio, ratio, "the norm before the head")
        self.where.setdefault(id(norm), "the norm before the head")
        self.modules[id(head)] = head
        self.factors[id(head), "weight"] = theirs

    def _gathered(self) -> list[Change]:
        """The changes of parameters, every one once; all their holders have to agree."""
        norms = {id(norm) for norm in self.attached.norms}
        changes: dict[int, Change] = {}
        for (key, name), factor in self.factors.items():
            module = self.modules[key]
            tensor, where = getattr(module, name, None), self.where.get(key, type(module).__name__)
            if not isinstance(tensor, Tensor):
                continue
            gain = key in norms and name == affine(module)[0]
            if gain and self.attached.mapping.gains_differ and not _equal(factor, 1.0):
                raise _refused(where, "some of the model's norms have the gain weight, and some 1 + weight")
            for other, attribute in self.holders.get(id(tensor), []):
                if not _equal(factor, self._factor(other, attribute)):
                    raise _refused(where, "it shares a weight with another module, which has another multiplier")
            if not _equal(factor, 1.0):
                axis = 1 if key in self.several or (name == "weight" and is_transposed(module)) else 0
                offset = self.attached.mapping.gain_offset if gain else 0.0
                changes[id(tensor)] = change = Change(tensor, factor, axis, offset)
                if problem := change.problem():
                    raise _refused(where, problem)
        for change in self.bare:
            if problem := change.problem():
                raise _refused(self.where.get(id(change.tensor), "a branch of experts"), problem)
        return [*changes.values(), *(change for change in self.bare if not _equal(change.factor, 1.0))]


def _refused(where: str, why: str) -> InputError:
    return InputError(
        f"{where} cannot be folded into weights: {why}; keep the scheme with the weights instead (signalprop.save)"
    )


def _with_weight(module: Any, where: str) -> nn.Module:
    """The module, if its weight can take a factor."""
    if hasattr(module, "base_layer"):
        raise InputError(f"{where}: a map with a multiplier has an adapter; fold before adapters are added")
    if not isinstance(module, nn.Module) or not isinstance(gain_and_bias(module)[0], Tensor):
        what = type(module)._vanilla if isinstance(module, Splice) else type(module)
        raise _refused(where, f"{what.__name__} has no `weight` that its multiplier could go into")
    return module


def _value(number: float | nn.Parameter) -> Factor:
    """A multiplier as a number, or as one per feature in float64."""
    if not isinstance(number, Tensor):
        return float(number)
    values = number.detach().double()
    return float(values) if values.numel() == 1 else values.flatten()


def _equal(one: Factor, other: Factor) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool((torch.as_tensor(one).cpu() == torch.as_tensor(other).cpu()).all())
    return one == other
