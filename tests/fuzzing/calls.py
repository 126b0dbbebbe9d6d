"""Random calls of the public Python interface by the thousand, to find what ends in an error from the inside.

    make fuzz                                  # with the command lines of campaign.py: 5,000 calls from seed 0
    PYTHONPATH=src:tests python tests/fuzzing/calls.py --seed 7 --calls 5000
    PYTHONPATH=src:tests python tests/fuzzing/calls.py --seed 7 --first 1234 --calls 1    # repeats one call

A call is made from its seed and number alone: a function, class, method or property of docs/api.md, or a scheme given
an architecture, with arguments that mostly make sense. What is raw is printed with what repeats it: any error that is
no InputError or MissingExtra, a message that is not one short line, no end. The exit status is 1 where there was any.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MPLBACKEND="Agg")

import numpy as np
import torch
import transformers

import signalprop as sp
from damage import check_line
from fuzzing import test_documents
from fuzzing.campaign import MEMORY, Hang, limited, tally
from signalprop.data import default_batch
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.parametrization import ROLES
from signalprop.network.presets import PRESETS
from signalprop.schemes import SCHEMES
from test_public_api import ENTRIES
from tiny import gpt2, llama

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_head": None, "d_ff": 24, "seq_len": 8,
        "vocab_size": 50}  # fmt: skip
SMALL = ({**TINY, "kind": "encoder"}, {**TINY, "kind": "decoder"}, {**TINY, "kind": "decoder", "norm": "rmsnorm"},
         {**TINY, "kind": "encoder-decoder", "n_decoder_layers": 2, "target_len": 6},
         {**TINY, "kind": "encoder", "input": "patches"})  # fmt: skip
COUNTS = (0, 1, 1, 2, 2, 3, -1, 99)
REALS = (0.0, 0.5, 1.0, 2.0, 1e-30, 1e30, -1.0, float("nan"), float("inf"))
WRONG = (None, "x", "", 3, -1, 1.5, b"x", 1j, [], {}, (), object(), np.zeros((2, 2)), True, "a\x00b", "x" * 5000)
NAMES: dict[str, tuple[str, ...]] = {
    "scheme": tuple(SCHEMES), "activation": tuple(ACTIVATIONS), "fidelity": ("auto", "moments", "kernel", "simulate"),
    "norm": ("layernorm", "rmsnorm"), "norm_placement": ("pre", "post", "sandwich", "none", "res-post"),
    "kind": ("encoder", "decoder", "encoder-decoder", "attention", "feed-forward", "tokens", "patches"),
    "role": tuple(ROLES),
    "optimizer": ("adamw", "sgd", "muon"), "family": ("gpt2", "llama"), "matrices": ("both", "forward", "none"),
    "device": ("cpu",), "field": ("text",), "head": ("lm", "classes", "none"), "input": ("tokens", "patches"),
    "positions": ("learned", "rotary", "none", "sinusoidal"), "cast": ("int8", "fp8"), "cast_of": ("weights", "both"),
}  # fmt: skip
# what is left to tests of its own: it trains, waits for hours, or belongs to a framework's loop
LEFT_OUT = {"train", "sweep", "Item", "register", "InputError", "MissingExtra", "load_recipe", "Recipe", "Positive",
            "Number", "Share", "Whole", "Scheme"}  # fmt: skip
MEASURING = {"compare", "study"}
OF_A_LOOP = ("Callback", "Transformer.forward")
FIELDS = tuple(sp.Architecture.model_fields)
Target = tuple[str, Callable[["Source"], Any]]  # its name, and what finds the callable (or the value of a property)


@functools.cache
def tables() -> dict[str, sp.Parametrization]:
    """One of every scheme for every small architecture that it takes, by name and number."""
    made = {f"{name} {i}": drawn(name, fields) for name in SCHEMES for i, fields in enumerate(SMALL)}
    return {name: table for name, table in made.items() if table is not None}


def drawn(name: str, fields: dict[str, Any]) -> sp.Parametrization | None:
    with contextlib.suppress(sp.InputError):
        return sp.scheme(name)(sp.Architecture(**fields))
    return None


@functools.cache
def profiles() -> tuple[sp.Profile, ...]:
    names = ("xavier 0", "deepscalelm 0", "xavier 1", "xavier 3")
    return tuple(sp.predict(tables()[name]) for name in names)


class Source:
    """The values of one call, drawn from its seed."""

    def __init__(self, key: str) -> None:
        self.r = random.Random(key)
        self.folder = Path.cwd()
        self.presets: tuple[str, ...] = tuple(PRESETS)

    def number(self, whole: bool) -> Any:
        return self.r.choice(COUNTS if whole else REALS)

    def name(self, parameter: str) -> str:
        known = NAMES.get(parameter)
        return self.r.choice(known if known and self.r.random() < 0.9 else ("x", "", "gpt2", "tgs", "xavier"))

    def field(self, name: str) -> Any:
        """The value of a field of an architecture."""
        if name in NAMES:
            return self.name(name)
        current = getattr(sp.Architecture(**self.r.choice(SMALL)), name)
        return self.r.choice((current, current, self.number(True), self.number(False), *WRONG))

    def changes(self) -> dict[str, Any]:
        return {name: self.field(name) for name in self.r.sample(FIELDS, self.r.choice((0, 1, 1, 2)))}

    def architecture(self) -> sp.Architecture:
        fields = self.r.choice(SMALL)
        with contextlib.suppress(sp.InputError):
            return sp.Architecture(**{**fields, **(self.changes() if self.r.random() < 0.3 else {})})
        return sp.Architecture(**fields)

    def table(self) -> sp.Parametrization:
        table = self.r.choice([*tables().values()])
        if self.r.random() < 0.3:  # one role or column at the ends of what floats hold
            columns = [name for name in table.columns() if table.columns()[name].dtype.kind == "f"]
            with contextlib.suppress(sp.InputError):
                return table.with_columns(**{self.r.choice(columns): self.r.choice((0.0, 1e-30, 1e30, 0.5))})
        return table

    def model(self) -> torch.nn.Module:
        """A new one: what is applied to it stays."""
        return self.r.choice(
            [
                gpt2,
                llama,
                lambda: torch.nn.Linear(2, 2),
                lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()),
                lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
                lambda: sp.build(tables()["xavier 0"]),
                lambda: sp.build(tables()["xavier 1"]),
                self.applied,
            ]
        )()

    def applied(self) -> torch.nn.Module:
        model = gpt2()
        sp.apply(model, "lns")
        return model

    def batch(self) -> Any:
        if self.r.random() < 0.5:
            return default_batch(sp.Architecture(**self.r.choice(SMALL)), batch_size=2)
        ids = torch.randint(0, 50, (self.r.choice((0, 1, 2)), self.r.choice((1, 8, 8, 8))))
        return self.r.choice(({"input_ids": ids}, {"input_ids": ids, "labels": ids}, {}, {"x": ids}))

    def file(self) -> Path:
        return self.folder / self.r.choice(("new", "new.json", "new.png", "no/such", "text.txt", "."))

    def array(self) -> Any:
        return self.r.choice(
            (np.ones(4), np.zeros(4), np.eye(8), 1.0, [0.5, 0.1], np.full((3, 3), np.nan), np.ones((8, 8)), [], "x")
        )

    def of(self, parameter: str, annotation: str) -> Any:
        """A value for a parameter, of one of the types in its annotation."""
        if self.r.random() < 0.06:
            return self.r.choice(WRONG)
        kinds = [part.strip() for part in split(annotation)]
        kind = self.r.choice(kinds)
        if kind.startswith(("Sequence[", "tuple[", "list[", "Iterable[")):
            inner = kind[kind.index("[") + 1 : -1].removesuffix(", ...")
            items = [self.of(parameter, inner) for _ in range(self.r.choice((0, 1, 2)))]
            return tuple(items) if kind.startswith("tuple") else items
        makers: dict[str, Callable[[], Any]] = {
            "None": lambda: None, "bool": lambda: self.r.random() < 0.5, "int": lambda: self.number(True),
            "float": lambda: self.number(False), "Architecture": self.architecture, "Parametrization": self.table,
            "nn.Module": self.model, "Profile": lambda: self.r.choice(profiles()), "Batch": self.batch,
            "Dictionary[str, Any]": self.batch, "Path": self.file, "ArrayLike": self.array, "FloatArray": self.array,
            "Array": self.array, "IntArray": self.array, "Scheme": lambda: sp.scheme(self.r.choice([*SCHEMES])),
            "InputStatistics": self.statistics, "slice": lambda: slice(*self.r.choice(((0, 1), (None, None), (9, 99)))),
            "Embedding": lambda: self.table().embedding, "torch.dtype": lambda: torch.float32,
            "Series": lambda: self.r.choice(profiles()).forward["stream_out"],
            "Comparison": lambda: sp.compare(*self.r.choices(profiles(), k=2)),
            "Mapping[str, ArrayLike]": lambda: {self.name("role"): self.array() for _ in range(2)},
            "Mapping[int, Profile]": lambda: {n: self.r.choice(profiles()) for n in self.r.sample(range(9), 2)},
            "Mapping[str, float]": lambda: {"variance": self.number(False)}, "Function": lambda: np.tanh,
        }  # fmt: skip
        if kind in makers:
            return makers[kind]()
        if kind in ("str", "Fidelity", "Mode", "Format", "Optimizer", "Matrices", "Of", "InputKind", "Adjustment"):
            if parameter in ("path", "directory", "source", "text", "jsonl"):
                return str(self.file())
            return self.r.choice(self.presets) if parameter in ("subject", "predicted") else self.name(parameter)
        return self.r.choice((None, self.array(), self.number(True), {}, self.name(parameter)))

    def statistics(self) -> sp.InputStatistics:
        with contextlib.suppress(sp.InputError):
            return sp.InputStatistics(token_correlation=self.r.choice((0.0, 0.3, 0.99, 1.0)))
        return sp.InputStatistics()

    def arguments(self, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                if self.r.random() < 0.5:
                    named |= self.changes()
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if parameter.default is not parameter.empty and self.r.random() < 0.7:
                continue
            value = self.of(name, str(parameter.annotation))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[name] = value
        return positional, named

    def instance(self, name: str) -> Any:
        """A value of a public class."""
        made: dict[str, Callable[[], Any]] = {
            "Architecture": self.architecture, "Head": lambda: self.table().head,
            "Parametrization": self.table, "InputStatistics": self.statistics,
            "Profile": lambda: self.r.choice(profiles()), "Batch": lambda: default_batch(self.architecture()),
            "Series": lambda: self.r.choice(profiles()).forward["stream_out"],
            "Comparison": lambda: sp.compare(*self.r.choices(profiles(), k=2)), "Moments": sp.Moments,
            "Trace": lambda: sp.trace(tables()[self.r.choice(("xavier 0", "xavier 1"))]),
            "Equivalence": lambda: sp.equivalent("tgs", "tgs"), "Scheme": lambda: sp.scheme(self.r.choice([*SCHEMES])),
            "Probe": lambda: sp.Probe(gpt2()), "Embedding": lambda: self.table().embedding,
            "Anatomy": lambda: sp.anatomy(gpt2()), "Check": lambda: sp.check(self.applied()),
            "SignalMonitor": lambda: sp.SignalMonitor(gpt2(), every=self.r.choice((1, 2))),
            "Transformer": lambda: sp.build(self.r.choice([*tables().values()])),
            "Diagnosis": lambda: type(self).diagnosis(),
        }  # fmt: skip
        return made[name]() if name in made else None

    @staticmethod
    @functools.cache
    def diagnosis() -> Any:
        from signalprop.diagnosis.result import Diagnosis

        return Diagnosis.from_json(test_documents.DIAGNOSIS)


def split(annotation: str) -> list[str]:
    """The members of a union: `a | b[c | d]` has two."""
    parts, depth = [""], 0
    for letter in annotation:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@functools.cache
def targets() -> list[Target]:
    """What a call may be of: every function of the interface, every class with its methods and properties, schemes."""
    found: list[Target] = [(f"scheme({name!r})()", functools.partial(_scheme, name)) for name in SCHEMES]
    for entry in ENTRIES:
        item = entry.item
        if entry.name in LEFT_OUT or not callable(item) or entry.name.endswith(OF_A_LOOP):
            continue
        if not inspect.isclass(item):
            found += [(entry.name, lambda _, item=item: item)] * 5
            continue
        found.append((entry.name, lambda _, item=item: item))
        for name, member in vars(item).items():
            if name.startswith("_") or f"{entry.name}.{name}".endswith(OF_A_LOOP) or "Callback" in entry.name:
                continue
            if isinstance(member, classmethod | staticmethod):
                found.append((f"{entry.name}.{name}", lambda _, item=item, name=name: getattr(item, name)))
            elif inspect.isfunction(member) or isinstance(member, property):
                found.append((f"{entry.name}.{name}", functools.partial(_member, entry.name, name)))
    return found


def _scheme(name: str, source: Source) -> Any:
    options = SCHEMES[name].__dataclass_fields__
    named = {key: source.r.choice((1, 2, *REALS, "x")) for key in options if source.r.random() < 0.3}
    # a scheme says in its __call__ what it takes; a preset's name and a configuration are tried beside
    made = sp.scheme(name, **named)
    return lambda *_, **__: made(
        source.r.choice((source.architecture(), source.architecture(), "gpt2", source.table(), *WRONG)),
        *((source.statistics(),) if source.r.random() < 0.3 else ()),
    )


def _member(owner: str, name: str, source: Source) -> Any:
    """A method of a value; a property is read."""
    one = source.instance(owner)
    return (lambda: None) if one is None else getattr(one, name)


def run_calls(seed: int, first: int, n: int) -> Iterator[tuple[str, str, str]]:
    """(name of what was called, how it ended, what is raw about it or '') of every call."""
    for number in range(first, first + n):
        source = Source(f"call {seed} {number}")
        name, of = source.r.choice(targets())
        shown, kind, raw = "", "returned", ""
        torch.manual_seed(0)
        try:
            with limited(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                function = of(source)
                if name in MEASURING:  # networks of the size of a preset take minutes
                    source.presets = ("x", "")
                if callable(function):
                    positional, named = source.arguments(function)
                    if named.get("fidelity") == "kernel" and isinstance(named.get("subject"), str):
                        named["fidelity"] = "auto"  # all positions of a preset take minutes
                    shown = f"{positional!r:.300}, {named!r:.300}"
                    result = function(*positional, **named)
                    if hasattr(result, "__enter__") and name.endswith("sampling"):
                        with result:
                            pass
        except (sp.InputError, sp.MissingExtra) as error:
            kind = "refused"
            try:
                check_line(str(error))
            except AssertionError as wrong:
                raw = f"{wrong}"
        except (Exception, Hang) as error:
            kind = "raw"
            last = traceback.extract_tb(error.__traceback__)[-1]
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "/signalprop" in f.filename]
            place = ours[-1] if ours else last
            raw = f"{type(error).__name__}: {error!s:.200} at {Path(place.filename).name}:{place.lineno}"
        yield name, kind, f"call {seed} {number} {name}({shown}): {raw}" if raw else ""


def main() -> int:
    """Run the calls, and print what is raw, counts and seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, default=5_000)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    place = Path(tempfile.mkdtemp(prefix="calls-"))
    os.chdir(place)
    (place / "text.txt").write_text("the state of the union is strong " * 30)
    calls = run_calls(asked.seed, asked.first, asked.calls)
    raw = tally(((kind, problem) for _, kind, problem in calls), f"seed {asked.seed}", "calls")
    os.chdir("/")
    shutil.rmtree(place)
    return int(raw > 0)


if __name__ == "__main__":
    sys.exit(main())
