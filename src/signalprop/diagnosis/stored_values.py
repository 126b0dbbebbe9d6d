"""What the reading of a checkpoint's files gives, as values."""

from __future__ import annotations

from typing import Any

from signalprop.diagnosis.result import Number
from signalprop.files.storage import finite
from signalprop.files.validation import Value
from signalprop.results.findings import Findings

SCHEMA = "signalprop/weights/2"


class TensorWeights(Value):
    """One tensor. Numbers that cannot be formed are None.

    Attributes:
        name, dtype, shape, n: as stored. role: the name within its layer; layer, stack: where.
        zeros, nan, infinite: counts. mean, std, rms, least, most: of finite numbers.
        first_bad: index of the first number that is NaN or infinite, () if there is none.
        change: norm of the difference from the other checkpoint's tensor over the norm of that one. equal: bit by bit.
    """

    name: str
    role: str
    layer: int | None
    stack: str | None
    dtype: str
    shape: tuple[int, ...]
    n: int
    zeros: int
    nan: int
    infinite: int
    mean: Number = None
    std: Number = None
    rms: Number = None
    least: Number = None
    most: Number = None
    first_bad: tuple[int, ...] = ()
    change: Number = None
    equal: bool | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with it, in words, the worst first."""
        constant = len(self.shape) > 1 and self.n > 1 and self.least is not None and self.least == self.most
        said = {
            f"{self.nan:,} NaN": self.nan > 0,
            f"{self.infinite:,} infinite": self.infinite > 0,
            f"all numbers are {self.least}": constant and not self.nan + self.infinite,
        }
        return tuple(text for text, holds in said.items() if holds)


class RoleWeights(Value):
    """All tensors of a role in a stack.

    Attributes:
        tensors, n, zeros, not_finite: counts. largest: absolute value. layers, rms: of every layer, in order.
        change: norm of the difference over the norm, together; equal: tensors.
    """

    role: str
    stack: str | None
    tensors: int
    n: int
    zeros: int
    not_finite: int
    largest: Number
    layers: tuple[int | None, ...]
    rms: tuple[Number, ...]
    change: Number = None
    equal: int | None = None


class StoredWeights(Value):
    """The weights of a checkpoint, tensor by tensor and role by role.

    Attributes:
        model, against: as given. n: numbers in all tensors. left_out: names of tensors that hold no floating-point
            numbers, with their dtype. only_here, only_there: names that the other checkpoint does not, or alone has.
        findings: what is wrong, in the words of a diagnosis.
    """

    model: str
    n: int
    tensors: tuple[TensorWeights, ...]
    roles: tuple[RoleWeights, ...]
    left_out: dict[str, str]
    against: str | None = None
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()
    findings: Findings = Findings()

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        data: dict[str, Any] = finite(self.model_dump(mode="json"))
        return {"schema": SCHEMA, **data, "findings": self.findings.to_json()}
