"""`advise`: changes that cure what is wrong with a signal, each predicted for this very network, and ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from signalprop.checkpoint_start import at_start, is_checkpoint, of_checkpoint
from signalprop.data.batches import default_statistics, shortened
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture, Config, architecture_of
from signalprop.network.parametrization import Parametrization
from signalprop.network.shown import Shown, report_module
from signalprop.prediction import parametrization_of_model, predict
from signalprop.prediction_notes import scores_of
from signalprop.ranking import predict_for_ranking
from signalprop.results.findings import Finding, Findings
from signalprop.results.profile import Profile
from signalprop.results.text import headed, network_in_words, number, text_table
from signalprop.results.verdicts import cures, halves
from signalprop.schemes import SCHEMES, scheme
from signalprop.schemes.base import parametrized

if TYPE_CHECKING:
    from torch import nn

SCHEMA = "signalprop/advice/1"
UNKNOWN = (
    "not known from here: the learning rate, the data, the optimiser; a healthy start is necessary for depth, not "
    "sufficient"
)
_LARGEST = 1e6  # what a finding may count for; ln of factors beyond a bound
_UNEVEN, _MOST_UNEVEN = 0.3, 5.0  # what ln of a ratio of gradients counts for, and up to which it does
_UNDOES = -1.0  # a change that takes back what somebody set; it applies only there
_NOT_NAMED = 2.0  # what a change counts for that no rule names against what was found


class Change(NamedTuple):
    """Something to try.

    Attributes:
        name: what. make: the table with it, None where it does not apply. cost: in words. weighs: against effect, in
            units of ln of a gradient's ratio. python: the line to paste; keys: of configurations, by program.
    """

    name: str
    make: Callable[[Parametrization], Parametrization | None]
    cost: str
    weighs: float
    python: str
    keys: dict[str, str]


@dataclass(frozen=True)
class Option:
    """A change, predicted for the network.

    Attributes:
        name, cost, python, keys: as of the change. findings: what is wrong with it. gradient_ratio: first over last.
        uneven: ln of the largest over the smallest gradient variance after the first layer.
    """

    name: str
    cost: str
    python: str
    keys: dict[str, str]
    findings: Findings
    gradient_ratio: float
    uneven: float
    stream: float
    rank: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name, "cost": self.cost, "python": self.python, "keys": self.keys,
            "findings": self.findings.to_json(), "gradient_ratio": self.gradient_ratio, "uneven": self.uneven,
            "stream_variance": self.stream,
        }  # fmt: skip


@dataclass(frozen=True)
class Advice(Shown):
    """What is wrong, and what would cure it.

    Attributes:
        profile: the prediction of the network as it is. options: changes, the best first. refused: why others do not
            apply, by name. findings: what is wrong. seen: where that was found, in words; "": in the prediction.
    """

    profile: Profile
    options: tuple[Option, ...]
    refused: dict[str, str]
    findings: Findings
    seen: str = ""
    _columns: ClassVar[tuple[str, ...]] = (
        "change", "cost", "findings", "gradient_ratio", "uneven", "stream_variance"
    )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {
            "schema": SCHEMA, "seen": self.seen, "findings": self.findings.to_json(), "profile": self.profile.to_json(),
            "options": [item.to_json() for item in self.options], "refused": self.refused, "unknown": UNKNOWN,
        }  # fmt: skip

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"change": item.name, "cost": item.cost, "findings": ", ".join(found.name for found in item.findings),
             "gradient_ratio": item.gradient_ratio, "uneven": item.uneven, "stream_variance": item.stream}
            for item in self.options
        ]  # fmt: skip

    def _figure(self) -> Any:
        return self.profile.plot()

    def __str__(self) -> str:
        p = self.profile
        lines = [_wrapped("network", network_in_words(p.architecture)), headed("scheme", p.scheme)]
        lines += [_wrapped("seen", self.seen)] if self.seen else []
        lines += [_wrapped("wrong", f"{item.name}: {item.text}{_where(item)}") for item in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(headed("", f"and {len(self.findings) - _SHOWN} more"))
        if not self.findings:
            known = report_module("findings").as_known(p)  # a large ratio that models which train have too
            ratio = [headed("gradient ratio", number(p.gradient_ratio)), *known] if known and p.gradient_ratio else []
            return "\n".join([*lines, headed("wrong", "nothing"), *ratio, _wrapped("", UNKNOWN)])
        rows = [
            [f"{i}", item.name, ", ".join(found.name for found in item.findings) or "nothing wrong",
             number(item.gradient_ratio)] for i, item in enumerate(self.options, 1)
        ]  # fmt: skip
        if not rows:
            lines.append(_wrapped("changes", "none of the changes that were tried improves its start"))
            return "\n".join([*lines, _wrapped("", UNKNOWN)])
        lines += ["", text_table(["", "change", "then", "gradient"], rows, left=3), ""]
        first = self.options[0]
        lines += [f"1  {first.cost}", f"   {'Python':<14}{first.python}"]
        lines += [f"   {where:<14}{line}" for where, line in first.keys.items()]
        return "\n".join([*lines, "", "gradient: variance, first sublayer over last", fill(UNKNOWN, _ROOM)])


_ROOM, _SHOWN = 80, 5  # columns; findings


def _where(item: Finding) -> str:
    layers = f"layer{'s' * (len(item.layers) > 1)} {', '.join(map(str, item.layers[:8]))}" if item.layers else ""
    layers += f" and {len(item.layers) - 8} more" if len(item.layers) > 8 else ""
    return f" ({layers})" if layers else ""


def _wrapped(word: str, text: str) -> str:
    return fill(headed(word, text), _ROOM, subsequent_indent=" " * 20)


def _by_scheme(name: str) -> Callable[[Parametrization], Parametrization | None]:
    def made(p: Parametrization) -> Parametrization | None:
        return None if p.scheme == name and not _changed(p) else scheme(name)(p.architecture)

    return made


def _deepnorm(p: Parametrization) -> Parametrization | None:
    """Its multipliers are derived for post-norm."""
    return _by_scheme("deepnorm")(p) if set(p.architecture.placements) == {"post"} else None


def _changed(p: Parametrization) -> dict[str, np.ndarray]:
    """Columns that are not as the scheme makes them."""
    if p.scheme not in SCHEMES:
        return {}
    try:
        plain = scheme(p.scheme, **p.options)(p.architecture).columns()
    except InputError:
        return {}
    return {
        name: column
        for name, column in p.columns().items()
        if name in plain and not np.allclose(column, plain[name], rtol=1e-6, atol=0)
    }


def _of_architecture(**fields: Any) -> Callable[[Parametrization], Parametrization | None]:
    """The same scheme, and what differs from it, on another architecture."""

    def made(p: Parametrization) -> Parametrization | None:
        a = p.architecture
        if all(getattr(a, name) == value for name, value in fields.items()) or p.scheme not in SCHEMES:
            return None
        new = scheme(p.scheme, **p.options)(a.replace(**fields))
        kept = {name.replace(".", "__", 1): column for name, column in _changed(p).items() if name in new.columns()}
        return new.with_columns(**kept) if kept else new

    return made


def _smaller_scores(p: Parametrization) -> Parametrization | None:
    most = float(scores_of(p).max(initial=0.0))
    if most <= 1:
        return None
    columns = {f"weight__{role}": p.weights[role] / most**0.25 for role in ("query", "key") if role in p.weights}
    return p.with_columns(**columns) if len(columns) == 2 else None


def _ones(column: str) -> Callable[[Parametrization], Parametrization | None]:
    return lambda p: None if (getattr(p, column) == 1).all() else p.with_columns(**{column: 1.0})


def _half_as_deep(p: Parametrization) -> Parametrization | None:
    a = p.architecture
    if a.n_layers < 8 or a.n_decoder_layers or p.scheme not in SCHEMES or _changed(p):
        return None
    return scheme(p.scheme, **p.options)(a.replace(n_layers=a.n_layers // 2))


def _initialiser(name: str, cost: str, weighs: float, **keys: str) -> Change:
    lines = {"transformers": f'sp.initialize(model, "{name}") after from_config'} | keys
    return Change(name, _by_scheme(name), cost, weighs, f'sp.initialize(model, "{name}")', lines)


_FOLDS = "no parameters; folds into the weights after training; a new start"
_FRESH = "no parameters, no time; a new start"
_NORM = "two norms' gains a layer where none were; does not fold; a new start"
CHANGES: tuple[Change, ...] = (
    Change("skip multipliers of 1", _ones("skip"), _FRESH, _UNDOES, "p.with_columns(skip=1.0)", {}),
    Change("branch multipliers of 1", _ones("branch"), _FRESH, _UNDOES, "p.with_columns(branch=1.0)", {}),
    Change("norm gains of 1", _ones("norm_gain"), _FRESH, _UNDOES, "p.with_columns(norm_gain=1.0)", {}),
    Change("scores of variance 1", _smaller_scores, f"weights of queries and keys; {_FRESH}", 0.2,
           "p.with_columns(weight__query=q / s**.25, weight__key=k / s**.25)",
           {"transformers": "attention scaling 1/sqrt(head_dim), smaller initializer_range for q_proj and k_proj"}),
    _initialiser("xavier", _FRESH, 0.3),
    _initialiser("gpt2", _FRESH, 0.3, nanoGPT="the model's (model.py, _init_weights)",
                 torchtitan="model.depth_init = true"),
    _initialiser("takase", "embeddings times sqrt(d); a new start", 0.5),
    _initialiser("deepscalelm", _FOLDS, 0.5, nanoGPT="x = skip * x + branch * self.attn(self.ln_1(x))"),
    Change("QK-norm", _of_architecture(qk_norm=True), "2 gains of d_head a layer, 1 to 3 % of time; does not fold", 0.7,
           "a.replace(qk_norm=True)", {"transformers": "Qwen3Config", "torchtitan": "model.qk_norm = true"}),
    Change("pre-norm", _of_architecture(norm_placement="pre"), _NORM, 0.7, 'a.replace(norm_placement="pre")',
           {"transformers": "norm_first / GPT2Config", "nanoGPT": "x = x + self.attn(self.ln_1(x))"}),
    Change("sandwich norm", _of_architecture(norm_placement="sandwich"), f"4 norms a layer; {_NORM}", 1.2,
           'a.replace(norm_placement="sandwich")', {"transformers": "Gemma2Config"}),
    _initialiser("deepnorm", _FOLDS, 0.8)._replace(make=_deepnorm),
    _initialiser("lns", _FOLDS, 0.8),
    _initialiser("stable-resnet", _FOLDS, 0.8),
    Change("half as deep", _half_as_deep, "half of the layers' parameters and time", 3.0, "a.replace(n_layers=...)",
           {"transformers": "num_hidden_layers", "nanoGPT": "n_layer", "torchtitan": "model.n_layers"}),
)  # fmt: skip
# Two at once, where one is not enough.
PAIRS = (("pre-norm", "xavier"), ("pre-norm", "gpt2"), ("pre-norm", "deepscalelm"), ("QK-norm", "xavier"),
         ("sandwich norm", "xavier"), ("half as deep", "deepscalelm"))  # fmt: skip


@typed
def advise(
    subject: str | Path | Architecture | Config | Parametrization | nn.Module,
    *,
    scheme: str | None = None,
    most: int = 8,
    found: Findings | None = None,
    seen: str = "",
) -> Advice:
    """What is wrong with a network's start, and changes ranked by what theory predicts for this very network.

    Every change is applied to the description and predicted, at 128 tokens at most. Changes that leave nothing wrong
    come first; among them those that the rules name against what was found, ordered by their cost and by how even they
    leave the gradient. Gradients are within 1 % of `predict` if nothing is wrong.

    Args:
        subject, scheme: as of `predict`; of a model, its weights are taken as random, with the sizes that they have. Or
            a checkpoint's directory or .gguf file: fresh weights are taken by their sizes, trained ones are measured.
        most: how many changes to return.
        found: what is wrong, if that is known better than from a prediction: `findings` of a measurement, of a monitor
            or of a run. seen: where it was found, in words.

    Raises:
        InputError: as `predict`.
    """
    if isinstance(subject, Path) or (isinstance(subject, str) and is_checkpoint(subject)):
        path = Path(subject)
        if is_checkpoint(path) and scheme is None and found is None:
            subject, found, seen = of_checkpoint(path)
        else:
            subject, scheme = at_start(path, scheme=scheme), None
    if not isinstance(subject, (str, Architecture, Config, Parametrization)):
        subject = parametrization_of_model(subject)
    if not isinstance(subject, Parametrization):
        subject = shortened(architecture_of(subject))
    p = parametrized(subject, scheme)
    profile = predict(p, default_statistics(p.architecture))
    wrong = profile.findings if found is None else found
    if not wrong:
        return Advice(profile, (), {}, wrong, seen)
    named = cures(wrong)
    options, refused = [], dict[str, str]()
    for change in _all_changes():
        try:
            made = change.make(p)
            if made is None:
                continue
            after = predict_for_ranking(made, default_statistics(made.architecture))
        except InputError as error:
            refused[change.name] = str(error)
            continue
        options.append(_option(change, after, named))
    options.sort(key=lambda option: option.rank)
    as_it_is = rank_of(profile)
    if profile.findings:
        better = [item for item in options if item.rank < as_it_is]
    else:  # something else than its start is wrong
        better = [item for item in options if not item.findings and _names(item.name) <= named]
    return Advice(profile, tuple(better[:most]), refused, wrong, seen)


def _names(name: str) -> frozenset[str]:
    """The changes of one, or of a pair."""
    return frozenset(name.split(" and "))


def _all_changes() -> Iterator[Change]:
    yield from CHANGES
    by_name = {change.name: change for change in CHANGES}
    for one, other in PAIRS:
        yield _together(by_name[one], by_name[other])


def _together(one: Change, other: Change) -> Change:
    def made(p: Parametrization) -> Parametrization | None:
        first = one.make(p)
        return None if first is None else other.make(first)

    return Change(
        f"{one.name} and {other.name}", made, f"{one.cost}; {other.cost}", one.weighs + other.weighs,
        f"{one.python}; {other.python}", one.keys | other.keys,
    )  # fmt: skip


def uneven(profile: Profile) -> float:
    """ln of the largest over the smallest gradient variance, of the sublayers after the first layer of every stack.

    Of an encoder-decoder also how far the encoder's first is from the decoder's last.
    """
    if profile.gradient is None:
        return 0.0
    logs, per = profile.gradient["stream_in"].log_variance, max(profile.n_sublayers // profile.architecture.n_layers, 1)
    if profile.architecture.kind == "encoder-decoder":
        within = sum(abs(part.upper) + abs(part.lower) for part in halves(profile))
        return float(within + abs(logs[0]))  # an encoder that gets little of what the decoder gets
    after = logs[per:] if len(logs) > 2 * per else logs
    return float(after.max() - min(after.min(), 0.0))


def rank_of(profile: Profile, weighs: float = 0.0) -> float:
    """The less the better: what is wrong first, by how far bounds are passed; how uneven the gradient is; `weighs`."""
    beyond = 0.0
    for item in profile.findings:
        if item.value and item.bound:
            beyond += 10 + min(abs(math.log(max(item.value, 1e-300) / item.bound)), 700)
        else:
            beyond += _LARGEST
    return beyond + _UNEVEN * min(uneven(profile), _MOST_UNEVEN) + weighs


def _option(change: Change, after: Profile, named: frozenset[str]) -> Option:
    weighs = change.weighs + _NOT_NAMED * (change.weighs >= 0 and named.isdisjoint(_names(change.name)))
    return Option(
        change.name, change.cost, change.python, change.keys, after.findings, after.gradient_ratio or math.nan,
        uneven(after), float(after.forward["stream_out"].variance[-1]), rank_of(after, weighs),
    )  # fmt: skip


def made_by(subject: Parametrization, name: str) -> Parametrization:
    """The network with the change of that name, or pair of changes.

    Raises:
        InputError: no such change, or one that does not apply.
    """
    for change in _all_changes():
        if change.name == name:
            made = change.make(subject)
            if made is not None:
                return made
    raise InputError(f"there is no change {name!r} for this network; take one that advise lists")
