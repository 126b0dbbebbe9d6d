"""What signalprop can do with every config type of transformers, and with models of others: records/reach.json.

    python -m benchmarks.reach               # what records/reach.json does not hold yet, then the counts
    python -m benchmarks.reach NAME ...      # these anew, then the counts
    python -m benchmarks.reach --anew        # all of them: an hour of one core
    python -m benchmarks.reach --counts      # only the counts

Every model is small and random (`benchmarks.small_models`) and runs in a process of its own, with 30 seconds of
a core and 8 GiB. The models of others need packages: pip install diffusers x-transformers. Those of timm are given by
name, with timm and torchvision in a folder of their own on PYTHONPATH: pip install --no-deps --target FOLDER timm
torchvision. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import signalprop as sp
from benchmarks.layer_oracle import Layers, apart, boundaries, floating, nearest, projected
from benchmarks.other_models import OTHERS, declare_operators, other_model
from benchmarks.reach_counts import FILE, SCHEMES, counts
from benchmarks.small_configs import config_types, small_config
from benchmarks.small_models import candidate_inputs, model_classes, small_model
from signalprop.attachment.anatomy import attach, require_roles
from signalprop.families import find
from signalprop.files.storage import read_json, write_json
from signalprop.network.layout import PLACEMENTS, layer_ends, layer_starts, layout, stacks_of

NEAR = 1e-5  # relative difference up to which two variances are of one tensor
SECONDS, MEMORY = 30, 8 << 30
Record = dict[str, Any]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model and inputs that it runs with.

    Raises:
        LookupError: none was found; the message says why.
    """
    if name in OTHERS:
        return other_model(name)
    try:
        config = small_config(name)
    except Exception as error:
        raise LookupError(f"configuration: {_line(error)}") from error
    reason = "transformers has no model of it alone"
    for cls in model_classes(name, config)[:4]:
        try:
            model = small_model(cls, config)
        except Exception as error:
            reason = f"{cls.__name__}: {_line(error)}" if reason.startswith("transf") else reason
            continue
        for inputs in candidate_inputs(model):
            try:
                with torch.no_grad():
                    output = model(**inputs)
                if any(t.numel() > 1 for t in floating(output)):
                    return model, inputs
            except Exception as error:
                reason = f"{cls.__name__}: {_line(error)}" if reason.startswith("transf") else reason
        if reason.startswith("transf"):
            reason = f"{cls.__name__}: none of the tried inputs fits"
    raise LookupError(reason)


def examined(name: str) -> Record:
    """What comes out for one model: see the page's introduction."""
    try:
        model, inputs = built(name)
    except LookupError as error:
        return {"ran": False, "reason": str(error)}
    record: Record = {
        "ran": True,
        "class": type(model).__name__,
        "inputs": sorted(inputs),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    norms: dict[str, int] = {}
    before = output_of(model, inputs)
    record["measured"] = _attempt(lambda: measured(model, inputs, norms))
    if "reason" not in record["measured"]:
        record["untouched"] = bool(torch.equal(before, output_of(model, inputs)))
        for scheme in SCHEMES:
            record[scheme] = _attempt(lambda scheme=scheme: applied(copy.deepcopy(model), inputs, scheme, norms))
        paths = record["measured"]["stacks"]
        if not record["measured"]["post"]:
            record["silenced"] = _attempt(lambda: silenced(copy.deepcopy(model), inputs, paths))
        record["predicted"] = _attempt(lambda: predicted(copy.deepcopy(model), inputs))
        if "stream" in record["predicted"]:
            record["initialised"] = _attempt(lambda: initialised(copy.deepcopy(model), inputs))
    return record


def measured(model: nn.Module, inputs: dict[str, Any], norms: dict[str, int]) -> Record:
    """`signalprop.measure` against plain hooks. `norms` receives the norms that read the stream, with their layers."""
    names = {module: name for name, module in model.named_modules()}
    begins = entry_norms(model, inputs)
    mapping = attach(model, None, inputs).mapping
    torch.manual_seed(0)  # of models that mask at random
    oracle = boundaries(model, inputs, begins)
    torch.manual_seed(0)
    profile = sp.measure(model, inputs, loss=projected)
    rows = layout(profile.architecture)
    forward, gradient = profile.forward, profile.gradient
    starts, ends = layer_starts(rows), layer_ends(rows)
    found: list[tuple[str, int, float]] = []
    backward, inner, correlations = [], [], []
    for _, stack in stacks_of(rows):
        first = [i for i in starts if i in stack]
        entering = forward["stream_in"].variance[first]
        last = next(i for i in reversed(ends) if i in stack)
        after = forward["stream_out"].variance[last]
        post = PLACEMENTS[rows.placement[last]] in ("post", "res-post")

        every = forward["stream_in"].variance[list(stack)]

        def fits(layers: Layers, choices: Any = (entering, every), after: float = after, post: bool = post) -> float:
            ours = next((row for row in choices if len(row) == len(layers.entering)), None)
            if ours is None:
                return float("inf")
            return max(apart(ours, layers.entering), 0.0 if post else apart([after], [layers.leaving[-1]]))

        best = nearest(oracle, fits)
        if best is None or best[1] == float("inf"):
            raise ValueError(f"{len(first)} layers were measured; the lists of modules that ran have "
                             f"{sorted({len(one.entering) for one in oracle})}")  # fmt: skip
        layers, difference = best
        found.append((layers.path, len(first), difference))
        if np.isfinite(layers.correlations).all() and len(layers.correlations) == len(first):
            ours = forward["stream_in"].token_correlation[first]
            correlations.append(float(np.abs(ours - layers.correlations).max()))
        if gradient is not None and profile.gradient_scale is not None and len(layers.gradients) == len(first):
            there = np.isfinite(layers.gradients)
            ours = gradient["stream_in"].variance[first] * profile.gradient_scale
            backward.append(apart(ours[there], np.array(layers.gradients)[there]))
        for layer, inside in enumerate(layers.norms if len(layers.norms) == len(first) else []):
            reading = [i for i in stack if rows.layer[i] == layer and mapping.sublayers[i].norm is not None]
            streams = [forward["stream_in"].variance[i] for i in reading]
            near = [[apart([stream], [value]) for stream in streams] for _, value in inside]
            norms.update(
                {
                    names[norm]: layer
                    for (norm, _), row in zip(inside, near, strict=True)
                    if min(row, default=1.0) < NEAR
                }
            )
            if inside and not post:
                inner += [min(column) for column in zip(*near, strict=True)]
    for name in [name for name in norms if any(name.startswith(f"{other}.") for other in norms)]:
        del norms[name]  # within another one, which scales it
    return {
        "by": "table" if _in_table(model) else "anatomy",
        "stacks": {path: n for path, n, _ in found},
        "post": any(PLACEMENTS[p] == "post" for p in rows.placement),
        "difference": max(d for *_, d in found),
        **({"gradient": max(backward)} if backward else {}),
        **({"inner": max(inner)} if inner else {}),
        **({"correlation": max(correlations)} if correlations else {}),
    }


def entry_norms(model: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    """Of layers that begin with a norm on the stream, that norm, by paths (MiniMax, RWKV, Grounding DINO)."""
    if _in_table(model):
        return {}
    found: dict[str, str] = {}
    for stack in sp.anatomy(model, inputs).stacks:
        for before, layer in zip((None, *stack.layers), stack.layers, strict=False):
            norm = layer.entry_norm or (before.branches[-1].norm if before is not None and before.branches else None)
            if norm is not None and norm.startswith(f"{layer.path}."):
                found[layer.path] = norm
    return found


def _in_table(model: nn.Module) -> bool:
    """Whether the model's family is one of the table's."""
    return find(getattr(getattr(model, "config", None), "model_type", None)) is not None


def applied(model: nn.Module, inputs: dict[str, Any], scheme: str, norms: dict[str, int]) -> Record:
    """A scheme on the model as it is, then folded into plain weights: largest differences over the largest output.

    `expected`: from the function that the paper writes down, made with plain hooks.
    """
    by_hand = scaled_norms(copy.deepcopy(model), norms) if scheme == "lns" and norms else None
    before = output_of(model, inputs)
    sp.apply(model, scheme, initialize=False, change_function=True, data=inputs)
    with_scheme = output_of(model, inputs)
    sp.fold(model)
    size = float(with_scheme.abs().max())

    def off(other: torch.Tensor) -> float:
        return float((other - with_scheme).abs().max()) / size

    record = {"changed": off(before), "fold": off(output_of(model, inputs))}
    return record if by_hand is None else {**record, "expected": off(output_of(by_hand, inputs))}


def scaled_norms(model: nn.Module, norms: dict[str, int]) -> nn.Module:
    """LNS by hand: what the norms of layer l (from 1) give is divided by sqrt(l)."""

    def scaled(out: Any, factor: float) -> Any:
        return type(out)(scaled(x, factor) for x in out) if isinstance(out, tuple) else out * factor

    for name, layer in norms.items():
        model.get_submodule(name).register_forward_hook(lambda _, __, out, f=(layer + 1) ** -0.5: scaled(out, f))
    return model


def silenced(model: nn.Module, inputs: dict[str, Any], paths: Collection[str]) -> Record:
    """Every branch times 0 (SkipInit, with its norms): the stream leaves a layer as it entered."""
    begins = entry_norms(model, inputs)
    mapping = attach(model, None, inputs).mapping
    table = sp.scheme("skipinit", norm=True)(mapping.architecture)
    head = table.head.model_copy(update={"scale": mapping.head.scale})
    embedding = table.embedding.model_copy(update={"scale": mapping.embedding.scale})
    sp.apply(model, replace(table, head=head, embedding=embedding), initialize=False, change_function=True, data=inputs)
    seen = boundaries(model, inputs, begins)
    return {"identity": max(apart(one.leaving, one.entering) for one in seen if one.path in paths)}


def predicted(model: nn.Module, inputs: dict[str, Any]) -> Record:
    """Whether it is known what every weight is, so that the model's own numbers can be read and predicted from.

    `stream`, `measured`: the variance after the last layer.
    """
    mapping = require_roles(attach(model, None, inputs)).mapping
    a, tokens = mapping.architecture, inputs.get("input_ids")
    changes = {} if tokens is None else {"seq_len": tokens.shape[1]}
    changes |= {"target_len": tokens.shape[1]} if tokens is not None and a.kind == "encoder-decoder" else {}
    table = sp.read_parametrization(model, mapping, a.replace(**changes))
    profile = sp.predict(table, backward=False)
    with torch.no_grad():
        there = sp.measure(model, inputs, mapping=mapping, backward=False)
    last = [float(p.forward["stream_out"].variance[-1]) for p in (profile, there)]
    return {"stream": last[0], "measured": last[1]}


def initialised(model: nn.Module, inputs: dict[str, Any]) -> Record:
    """Xavier's initialisation in the model: the largest relative difference of a weight's rms from what was asked."""
    table = sp.apply(model, "xavier", redraw=True, data=inputs, seed=0)
    drawn = sp.read_parametrization(model, require_roles(attach(model, None, inputs)).mapping)
    off = [
        float(np.max(np.abs(drawn.weights[role] - asked)[asked > 0] / asked[asked > 0]))
        for role, asked in table.weights.items()
        if (asked > 0).any()
    ]
    return {"weights": max(off)}


def output_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The first floating tensor of the model's output, of more than one number."""
    torch.manual_seed(0)
    with torch.no_grad():
        return next(t for t in floating(model(**inputs)) if t.numel() > 1).double()


def _attempt(action: Callable[[], Record]) -> Record:
    """What comes out, or the one line why not. `refused`: signalprop said it; `error`: anything else."""
    try:
        return action()
    except sp.InputError as error:
        return {"reason": _line(error, kind=False), "how": "refused"}
    except Exception as error:
        return {"reason": _line(error), "how": "error"}


def _line(error: BaseException, kind: bool = True) -> str:
    text = " ".join(str(error).split())[:220]
    return f"{type(error).__name__}: {text}" if kind else text


def in_a_process(name: str, examined: Callable[[str], Record] = examined) -> Record:
    """`examined` of a name, in a fork of this process, with limits on time and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(10 * SECONDS)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            record = examined(name)
        except BaseException as error:
            record = {"ran": False, "reason": _line(error)}
        with os.fdopen(writing, "w") as pipe:
            json.dump(record, pipe)
            pipe.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"ran": False, "reason": f"took more than {SECONDS} s or {MEMORY >> 30} GiB"}


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="config types, or models of others")
    parser.add_argument("--anew", action="store_true", help="also what records/reach.json holds already")
    parser.add_argument("--counts", action="store_true", help="run nothing; print the table of counts")
    given = parser.parse_args()
    if any(name.startswith("timm") for name in given.names):
        declare_operators()
    import transformers
    import transformers.models.llama.modeling_llama  # what most models need, once for all processes

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # in evaluation nn.TransformerEncoder would pass over its modules
    known = [*config_types(), *OTHERS]
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)} among the {len(known)} config types and models of others")
    stored = read_json(FILE) if Path(FILE).is_file() else {"models": {}}
    stored["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    models = stored["models"]
    todo = given.names or [name for name in known if given.anew or name not in models]
    new: dict[str, Record] = {}
    for i, name in enumerate([] if given.counts else todo):
        new[name] = in_a_process(name)
        print(f"{i + 1}/{len(todo)} {name}: {summary(new[name])}", flush=True)
        if i % 10 == 9 or i + 1 == len(todo):  # another run may have written meanwhile
            models = {**(read_json(FILE)["models"] if Path(FILE).is_file() else {}), **new}
            stored["models"] = models = {name: models[name] for name in known if name in models}
            write_json(FILE, stored)
    print(counts(models))
    print(Counter(summary(record).split(":")[0].split(" ")[0] for record in models.values()), file=sys.stderr)


def summary(record: Record) -> str:
    """One line for whoever waits."""
    if not record["ran"]:
        return f"not run: {record['reason']}"
    measurement = record["measured"]
    if "reason" in measurement:
        return f"{measurement['how']}: {measurement['reason']}"
    return f"measured to {measurement['difference']:.0e} " + " ".join(
        f"{scheme} {held['fold']:.0e}" if "fold" in (held := record[scheme]) else f"{scheme}: {held['reason'][:60]}"
        for scheme in SCHEMES
    )


if __name__ == "__main__":
    main()
