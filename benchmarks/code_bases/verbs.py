"""What each verb does with one model: works, is refused in one line, ends raw, or is wrong; and how far it is off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import signalprop as sp
from benchmarks.code_bases.parts import Case
from benchmarks.layer_oracle import apart, correlation, floating, projected
from signalprop.diagnosis import diagnose
from signalprop.network.layout import STACKS, layer_ends, layout

Record = dict[str, Any]
LIMITS = {"variance": 1e-5, "correlation": 1e-5, "gradient": 1e-4}
FOLD, SEEDS = 1e-4, 3
PREDICTED = 0.25  # of a logarithm: how far a variance may be predicted from the mean of SEEDS networks of width 64
VERBS = ("anatomy", "measure", "Probe", "SignalMonitor", "predict", "apply", "check", "fold", "diagnose")
USED = ("predict", "apply")


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output."""
    if callable(inputs):
        return inputs(model)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def fresh(case: Case, seed: int = 0) -> nn.Module:
    """A model with numbers where it starts at zero: zeros would hide a branch."""
    torch.manual_seed(seed)
    model = case.make()
    for p in model.parameters():
        if p.ndim > 1 and not p.detach().any():
            nn.init.normal_(p, std=0.02)
    return model.eval()


def loss_of(case: Case) -> Callable[[Any], Tensor]:
    """The case's loss, or a random projection of the output."""
    return case.loss or projected


class Oracle:
    """Plain hooks after the case's layers: variance, token correlation, variance of the gradient, layer by layer."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.streams, self.held = case, [], []
        self.handles = [self._hook(m) for m in dict.fromkeys(case.layers(model))]

    streams: list[Tensor]
    held: list[Tensor]

    def _hook(self, module: nn.Module) -> Any:
        if self.case.side == "input":
            return module.register_forward_pre_hook(lambda _, args: self._see(args))
        return module.register_forward_hook(lambda _, __, output: self._see(output))

    def _see(self, values: Any) -> None:
        held = self.case.held(values)
        if held.requires_grad:
            held.retain_grad()
        self.held.append(held)
        self.streams.append(self.case.stream(values).detach().double())

    def rows(self, loss: Tensor) -> dict[str, list[float]]:
        """The numbers, after the backward pass."""
        for handle in self.handles:
            handle.remove()
        loss.backward()
        gradients = [float("nan") if h.grad is None else float(h.grad.double().var(correction=0)) for h in self.held]
        streams = [x.transpose(0, 1) if self.case.tokens_first else x for x in self.streams]
        return {
            "variance": [float(x.var(correction=0)) for x in streams],
            "correlation": [correlation(x) for x in streams],
            "gradient": gradients,
        }


def by_hooks(case: Case, seed: int = 0) -> dict[str, list[float]]:
    """What plain hooks see of a fresh model."""
    model = fresh(case, seed)
    oracle = Oracle(case, model)
    return oracle.rows(loss_of(case)(called(model, case.inputs())))


def distances(case: Case, profile: Any, truth: dict[str, list[float]]) -> Record:
    """How far a Profile is from plain hooks after every layer; of two stacks the one that the hooks stand in.

    Raises:
        AssertionError: it has another number of layers.
    """
    rows = layout(profile.architecture)
    last, n = layer_ends(rows), len(truth["variance"])
    of = {name: [i for i in last if STACKS[rows.stack[i]] == name] for name in STACKS}
    near = [ends for ends in (*of.values(), list(last), list(range(len(rows.stack)))) if len(ends) == n]
    assert near, f"{len(last)} layers were measured, {n} ran"
    forward, gradient = profile.forward["stream_out"], profile.gradient and profile.gradient["stream_out"]
    ends = min(near, key=lambda ends: apart(forward.variance[ends], truth["variance"]))
    off = {
        "variance": apart(forward.variance[ends], truth["variance"]),
        "correlation": float(np.abs(forward.token_correlation[ends] - np.array(truth["correlation"])).max()),
    }
    there = np.isfinite(truth["gradient"])
    if gradient is not None and there.any():
        found = gradient.variance[ends] * profile.gradient_scale
        off["gradient"] = apart(found[there], np.array(truth["gradient"])[there])
    return judged(off, LIMITS)


def judged(off: Record, limits: dict[str, float]) -> Record:
    """Distances, and whether any is too large."""
    wrong = [name for name, value in off.items() if name in limits and not value <= limits[name]]
    return {"how": "wrong" if wrong else "works", **off}


def anatomy(case: Case) -> Record:
    found = sp.anatomy(fresh(case), case.inputs())
    return {
        "how": "works" if found.proved else "refused",
        **({} if found.proved else {"reason": str(found).splitlines()[0]}),
    }


def measure(case: Case) -> Record:
    model = fresh(case)
    return distances(case, sp.measure(model, case.inputs(), loss=loss_of(case), skip_first=0), by_hooks(case))


def probe(case: Case) -> Record:
    model = fresh(case)
    with sp.Probe(model) as watching:
        loss_of(case)(called(model, case.inputs())).backward()
        profile = watching.profile()
    assert profile is not None, "a step without a Profile"
    return distances(case, profile, by_hooks(case))


def monitor(case: Case) -> Record:
    """Two steps in training mode at a learning rate of 0; one in evaluation mode, held against plain hooks."""
    model = fresh(case).train()
    optimizer, values = torch.optim.SGD(model.parameters(), lr=0.0), {}
    with sp.SignalMonitor(model, every=1, skip_first=0, tolerance=None) as watching:
        for step in range(3):
            loss = loss_of(case)(called(model.train(step < 2), case.inputs()))
            loss.backward()
            values = watching.step(loss) or values
            optimizer.step()
            optimizer.zero_grad()
    leaving = [value for name, value in values.items() if name.endswith("/variance")]
    truth = by_hooks(case)["variance"]
    assert leaving, "three steps without a number"
    if len(leaving) > len(truth):  # the hooks stand in one of two stacks
        return {"how": "works", "numbers": len(values)}
    assert len(leaving) == len(truth), f"{len(leaving)} layers were watched, {len(truth)} ran"
    return judged({"variance": apart(leaving, truth), "numbers": len(values)}, LIMITS)


def predict(case: Case) -> Record:
    """The stream's last variance against the mean of SEEDS fresh networks."""
    model = fresh(case)
    profile = sp.predict(model, case.inputs())
    return _against_networks(case, profile, [fresh(case, seed) for seed in range(SEEDS)])


def _against_networks(case: Case, profile: Any, models: list[nn.Module]) -> Record:
    measured = [sp.measure(m, case.inputs(), loss=loss_of(case)) for m in models]
    out: Record = {}
    for name, there in (
        ("variance", lambda p: p.forward["stream_out"].variance[-1]),
        ("gradient", lambda p: p.gradient["stream_in"].variance[0]),
    ):
        values = np.array([there(p) for p in measured])
        error = values.std(ddof=1) / len(values) ** 0.5 / values.mean()
        out[name] = float(np.log(there(profile) / values.mean()))
        out[f"{name}_error"] = float(error)
    wrong = (
        abs(out["variance"]) > PREDICTED + 4 * out["variance_error"]
        or abs(out["gradient"]) > 2 * PREDICTED + 4 * out["gradient_error"]
    )
    noted = any("gradient" in note for note in profile.notes)
    return {"how": "works" if not wrong else "noted" if noted else "wrong", **out}


def apply(case: Case) -> Record:
    """Xavier's weights drawn in place, against the prediction from the table."""
    models, table = [], None
    for seed in range(SEEDS):
        model = fresh(case, seed)
        table = sp.apply(model, "xavier", redraw=True, seed=seed, inputs=case.inputs())
        models.append(model)
    assert table is not None
    return _against_networks(case, sp.predict(models[0], case.inputs()), models)


def check(case: Case) -> Record:
    """True after `apply`, and False after one map was doubled."""
    model = fresh(case)
    sp.apply(model, "xavier", redraw=True, seed=0, inputs=case.inputs())
    before = sp.check(model, inputs=case.inputs()).ok
    largest = max((p for p in case.layers(model)[0].parameters() if p.ndim == 2), key=lambda p: p.numel(), default=None)
    if largest is None:
        largest = max((p for p in model.parameters() if p.ndim == 2), key=lambda p: p.numel())
    with torch.no_grad():
        largest.mul_(3)
    after = sp.check(model, inputs=case.inputs()).ok
    return {"how": "works" if before and not after else "wrong", "ok": before, "ok after a map was tripled": after}


def fold(case: Case) -> Record:
    """LNS or LayerScale on the model as it is, then in plain weights: the outputs' largest difference."""
    refused: Exception | None = None
    for scheme in ("lns", "layerscale"):
        model = fresh(case)
        try:
            sp.apply(model, scheme, initialize=False, change_function=True, inputs=case.inputs())
            with torch.no_grad():
                one = next(t for t in floating(_plain(called(model, case.inputs()))))
                sp.fold(model)
                other = next(t for t in floating(_plain(called(model, case.inputs()))))
        except sp.InputError as error:
            refused = error
            continue
        off = float((one - other).abs().max() / one.abs().max())
        return judged(
            {"difference": off, "scheme": scheme}, {"difference": FOLD * max(1.0, torch.finfo(one.dtype).eps / 1e-7)}
        )
    assert refused is not None
    raise refused


def _plain(output: Any) -> Any:
    return (
        vars(output)
        if not isinstance(output, (Tensor, tuple, list, dict))
        else dict(output)
        if isinstance(output, dict)
        else output
    )


def diagnosed(case: Case) -> Record:
    found = diagnose(fresh(case), inputs=case.inputs())
    return {"how": "works", "findings": sorted({f"{one.severity}: {one.name}" for one in found.findings})}


ACTIONS = dict(zip(VERBS, (anatomy, measure, probe, monitor, predict, apply, check, fold, diagnosed), strict=True))


def examined(case: Case) -> Record:
    """Every verb, on a fresh model each."""
    try:
        with torch.no_grad():
            called(fresh(case), case.inputs())
    except ImportError as error:
        return {"ran": False, "reason": f"pip install {case.needs} ({error})"}
    record: Record = {"ran": True, "parameters": sum(p.numel() for p in fresh(case).parameters())}
    for verb, action in ACTIONS.items():
        record[verb] = _attempt(action, copy.copy(case))
    return record


def _attempt(action: Callable[[Case], Record], case: Case) -> Record:
    try:
        return action(case)
    except sp.InputError as error:
        return {"how": "refused", "reason": " ".join(str(error).split())[:300]}
    except AssertionError as error:
        return {"how": "wrong", "reason": str(error)[:200]}
    except Exception as error:
        return {"how": "raw", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"}
