"""Sweeps as one validated value: axes, seeds, what is tuned, compared and claimed."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from signalprop.errors import InputError
from signalprop.files.validation import Value
from signalprop_lab.training.recipe_files import AsTuple

SCHEMA = "signalprop/sweep/1"
SEPARATOR = " / "  # between the labels in the name of a cell
MAX_CELLS = 10_000


# Columns of the results; an axis cannot have the name of one.
COLUMNS = (
    "cell", "seed", "status", "reason", "steps", "score", "train_loss", "eval_loss", "chance", "parameters",
    "trained_parameters", "seconds", "throughput", "unit", "scores", "revision", "environment", "directory",
)  # fmt: skip


_Label = Annotated[str, Field(min_length=1, max_length=60)]


def _text_keys(data: Any) -> Any:
    """YAML reads a label such as 12 as a number."""
    if not isinstance(data, dict):
        return data
    return {f"{key}" if type(key) in (int, float) else key: value for key, value in data.items()}


def _text_values(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: f"{value}" if type(value) in (int, float) else value for key, value in _text_keys(data).items()}


_Labelled = Annotated[dict[_Label, dict[str, Any]], BeforeValidator(_text_keys)]
_Place = Annotated[dict[str, str], BeforeValidator(_text_values)]
_Names = Annotated[tuple[str, ...], AsTuple, Field(min_length=1)]


class Tune(Value):
    """The number that every cell tunes for itself.

    Attributes:
        key: of the recipe. values: tried in every cell, ascending.
        extend: how many further rungs are tried on either side while the best value is the outermost one.
    """

    key: str = "optimizer.learning_rate"
    values: Annotated[tuple[float, ...], AsTuple, Field(min_length=1, max_length=50)]
    extend: int = Field(0, ge=0, le=10)

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        if any(value <= 0 for value in self.values):
            raise ValueError("values are a geometric ladder; all have to be above 0")
        if any(low >= high for low, high in itertools.pairwise(self.values)):
            raise ValueError("values have to ascend")
        if self.extend and len(self.values) < 2:
            raise ValueError("a single value is not a ladder that could be extended; give two or more")
        return self

    @property
    def column(self) -> str:
        """The key's last part: its name in tables and directories."""
        return self.key.rpartition(".")[2]


class Reference(Value):
    """Published numbers, shown beside ours.

    Attributes:
        label: what they are and where they stand. cells: by the cell's name.
    """

    label: str
    cells: dict[str, float | str]


class Paper(Value):
    """What the paper ran, where its claim is judged.

    Attributes:
        variant: of its method. warm_up, rates: what its schedule was, and which learning rates it tried. All in words.
        per_parameter: tokens (or images, or whatever `unit` says) that it read, by the parameters of its network.
    """

    variant: str
    warm_up: str
    rates: str
    per_parameter: float = Field(gt=0)
    unit: str = "tokens"


class Check(Value):
    """One part of the paper's claim, as something that the results decide. Exactly one of `less`, `trains`, `fails`.

    Attributes:
        claim: in words.
        less: of two cells the one whose score the paper has lower, then the other.
        by: what the difference has to exceed: `spread` (two standard errors), or a number (and two standard errors).
        effect: the paper's difference in the unit of the score, which the runs should be able to see.
        trains: cells whose runs all end below chance. fails: cells whose runs all diverge or stall.
        needs: two cells of which the first must not end higher than the second: a control without which the part says
            nothing, such as that depth helps anyone within this budget.
    """

    claim: str = ""
    less: _Names | None = None
    by: Literal["spread"] | float = "spread"
    effect: float | None = Field(None, gt=0)
    trains: _Names | None = None
    fails: _Names | None = None
    needs: _Names | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("less", "trains", "fails") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of less, trains and fails; got {' and '.join(given) or 'none of them'}")
        for name, pair in (("less", self.less), ("needs", self.needs)):
            if pair is not None and (len(pair) != 2 or pair[0] == pair[1]):
                raise ValueError(f"{name} takes two different cells")
        if isinstance(self.by, float) and self.by < 0:
            raise ValueError("by is `spread` or a number that is not negative")
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        """Those that it is about."""
        return self.less or self.trains or self.fails or ()


class Sweep(Value):
    """A grid of training runs.

    Attributes:
        name: of the sweep. title, description, claim: for its page; `claim` is the paper's.
        base: a recipe that comes with the package, a path, or the recipe itself.
        axes: every combination of their values is a cell; a value sets keys of the recipe, such as `model.scheme`.
        skip: combinations that are left out; an axis that is not named is any.
        best_of: axes that are tuned, as `tune` is, and not compared: of the cells that differ in nothing else, the
            first seed's best one stands for all, and only it runs the other seeds.
        tune: what every cell tunes for itself; none: nothing.
        seeds: at least one. seeds_at: `best`: the first seed tunes, the others run at its best value; `all`: all
            of them run everywhere.
        score: what is tuned and compared: a key of a run's result or of its scores. direction: which scores are good.
        keep: of a run that is over: `numbers`, or `models` (the trained one and the last checkpoints): takes room.
        reference: published numbers. paper: what it ran; None: the claim is none of a paper's.
        verdict: what the claim comes to.
        controls: cells that train in the paper; one that does not here makes every part of the claim void that compares
            it. spread: standard deviation of the score between seeds that is expected, from earlier runs; it says
            beforehand which differences the sweep can see.
        shared_error: standard error of a difference of two cells by the choice of the validation examples, which all
            seeds share; it adds to the one between seeds.
    """

    schema_: Literal["signalprop/sweep/1"] = Field(alias="schema")
    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    title: str = ""
    description: str = ""
    claim: str = ""
    base: str | dict[str, Any]
    axes: Annotated[dict[_Label, _Labelled], BeforeValidator(_text_keys), Field(min_length=1)]
    skip: Annotated[tuple[_Place, ...], AsTuple] = ()
    best_of: Annotated[tuple[str, ...], AsTuple] = ()
    tune: Tune | None = None
    seeds: Annotated[tuple[int, ...], AsTuple, Field(min_length=1, max_length=100)] = (0,)
    seeds_at: Literal["best", "all"] = "best"
    score: str = "eval_loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    keep: Literal["numbers", "models"] = "numbers"
    reference: Reference | None = None
    paper: Paper | None = None
    verdict: Annotated[tuple[Check, ...], AsTuple] = ()
    controls: Annotated[tuple[str, ...], AsTuple] = ()
    spread: float | None = Field(None, gt=0)
    shared_error: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds has one of them twice")
        taken = {*COLUMNS, self.tune.column if self.tune else ""} & self.axes.keys()
        if taken:
            raise ValueError(f"an axis cannot be named {min(taken)}: the results have a column of that name")
        for axis, values in self.axes.items():
            if not values:
                raise ValueError(f"axis {axis} has no values")
            if any(SEPARATOR in label for label in values):
                raise ValueError(f"axis {axis}: a label cannot hold {SEPARATOR!r}")
        self._check_keys()
        for axis, label in (item for place in self.skip for item in place.items()):
            if axis not in self.axes:
                raise ValueError(f"skip: there is no axis {axis!r}; axes are {', '.join(self.axes)}")
            if label not in self.axes[axis]:
                known = ", ".join(self.axes[axis])
                raise ValueError(f"skip: axis {axis} has no value {label!r}; its values are {known}")
        for axis in self.best_of:
            if axis not in self.axes:
                raise ValueError(f"best_of: there is no axis {axis!r}; axes are {', '.join(self.axes)}")
        if not self.compared:
            raise ValueError("best_of names every axis; nothing is left that could be compared")
        if self.best_of and self.seeds_at == "all":
            raise ValueError("best_of is decided by the first seed; it does not go with seeds_at: all")
        names = {SEPARATOR.join(self.compared_labels(labels)) for labels in self.labels()}
        if not names:
            raise ValueError("skip leaves out every cell")
        told = [
            *(self.reference.cells if self.reference else ()),
            *(cell for check in self.verdict for cell in (*check.cells, *(check.needs or ()))),
            *self.controls,
        ]
        for name in told:
            if name not in names:
                raise ValueError(f"there is no cell {name!r}; cells are {', '.join(sorted(names)[:4])}, ...")
        return self

    def _check_keys(self) -> None:
        """No key is set twice, where the second would hide the first."""
        before: dict[str, str] = {}
        for axis, values in self.axes.items():
            keys = {key for settings in values.values() for key in settings}
            for key, other in itertools.product(sorted(keys), sorted(before)):
                if other == key or other.startswith(f"{key}."):
                    raise ValueError(f"axis {axis} sets {key}, which hides {other} of axis {before[other]}")
            before |= dict.fromkeys(keys, axis)
        own = {"seed": "seeds"} | ({self.tune.key: "tune"} if self.tune else {})
        for key, place in own.items():
            if key in before:
                raise ValueError(f"axis {before[key]} sets {key}, which {place} sets")

    def labels(self) -> list[tuple[str, ...]]:
        """One label of every axis for every cell that is not left out; the last axis changes fastest."""
        if math.prod(len(values) for values in self.axes.values()) > MAX_CELLS:
            raise ValueError(f"the axes make more than {MAX_CELLS} cells")
        return [
            labels
            for labels in itertools.product(*self.axes.values())
            if not any(place.items() <= dict(zip(self.axes, labels, strict=True)).items() for place in self.skip)
        ]

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Those that choose the best rung."""
        return self.seeds if self.seeds_at == "all" else self.seeds[:1]

    @property
    def compared(self) -> list[str]:
        """Axes that are not tuned."""
        return [axis for axis in self.axes if axis not in self.best_of]

    def compared_labels(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Of a cell's labels those of the axes that are compared."""
        return tuple(label for axis, label in zip(self.axes, labels, strict=True) if axis not in self.best_of)

    def names(self) -> list[str]:
        """Of the cells: their labels with ` / ` between."""
        return [SEPARATOR.join(labels) for labels in self.labels()]

    def score_of(self, row: Mapping[str, Any]) -> float | None:
        """The number of a run that the sweep compares; None: the run has failed, or the number is not finite."""
        if row["status"] != "finished":
            return None
        numbers = {f"scores.{key}": value for key, value in (row.get("scores") or {}).items()}
        numbers |= {key.removeprefix("scores."): value for key, value in numbers.items()}
        numbers |= {key: value for key, value in row.items() if not isinstance(value, (str, bool, dict))}
        if self.score not in numbers:
            known = ", ".join(sorted(key for key, value in numbers.items() if isinstance(value, float)))
            raise InputError(f"sweep {self.name}: runs have no score {self.score!r}; they have {known}")
        value = numbers[self.score]
        finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
        return float(value) if finite else None

    def cost_of(self, row: Mapping[str, Any]) -> float:
        """What is minimised: the score or its negative; infinite for a run that has failed."""
        score = self.score_of(row)
        if score is None:
            return math.inf
        return score if self.direction == "minimize" else -score

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON and YAML have it."""
        return self.model_dump(mode="json", by_alias=True)
