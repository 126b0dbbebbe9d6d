"""What a diagnosis of a trained model found: plain values, one JSON form (`signalprop/diagnosis/1`).

Layers count from 0, the encoder's first. Statistics of the signal leave out the first `skip_first` positions of every
sequence, where trained models park activations thousands of times larger than all others; those are reported apart.
A number that could not be formed (a NaN in the model, a single token) is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, cast

from pydantic import ConfigDict, Field, model_validator

from signalprop.diagnosis.whole_model_values import BadTensor, Ends, Fresh, Tried
from signalprop.diagnosis.whole_model_values import Number as Number
from signalprop.files.documents import Document, fields_of
from signalprop.files.storage import finite
from signalprop.files.validation import Value, typed
from signalprop.network.shown import COLUMNS, Shown, report_module, wrapped
from signalprop.results.findings import Finding, Findings

SCHEMA: Literal["signalprop/diagnosis/1"] = "signalprop/diagnosis/1"
Numbers = tuple[Number, ...]
ONE_SCALE = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8")  # cast with one scale per tensor, or none

# Largest numbers of formats that activations are held in.
RANGES = {"fp16": 65504.0, "bf16": 3.38953139e38, "fp8 e4m3": 448.0, "fp8 e5m2": 57344.0}


def number(value: float) -> Number:
    """A Python float, or None for what is not finite."""
    return float(value) if math.isfinite(value) else None


class Estimate(Value):
    """A mean and its standard error (None where there is only one sample)."""

    value: Number
    standard_error: Number = None


class Data(Value):
    """What the model was run on.

    Attributes:
        source: in words. sequences, tokens: how many; length: tokens of a sequence. skip_first: positions that the
            statistics of the signal leave out at the start of every sequence.
    """

    source: str
    sequences: int
    tokens: int
    length: int
    skip_first: int


class LayerSignal(Value):
    """The signal at one layer, on real data.

    Attributes:
        layer, stack: which. finite: whether every number that it output was.
        variance_in, variance: of the stream before and after the layer: over features of a token, then over tokens.
        first_variance: after the layer, over the first positions, which all others leave out; padding is in neither.
        token_correlation: of the stream after the layer (as in a Profile).
        effective_rank: exp of the entropy of the eigenvalues of the kernel of normalised tokens, of up to 512 tokens.
        attention_share, feed_forward_share: variance that each branch adds (multiplier included) over that of the sum
            that it makes with the stream, before a norm there. Cross-attention counts to attention; recurrences and
            convolutions to the other.
        alignment: cosine between what the layer adds and the stream that enters it, mean over tokens.
        gradient: variance of d loss / d stream after the layer, relative to that after the last one.
        largest: |entry| of all tokens' streams, of what branches output and of what the maps that end them read.
        outlier, first_outlier: largest |entry| of a token over the root mean square of the stream, without and within
            the first positions (over the same root mean square).
        score_std: standard deviation of attention scores along a row, per head (position biases included).
            largest_score: the largest of them, per head. entropy: of attention weights over that of equal weights, per
            head (1: equal). head_share: what each head adds, squared, over the sum of that over heads. Self-attention
            only.
        norm_factor: what the attention and the feed-forward read, over the outputs of the norms before them with
            their weights: the fixed factor that the norm carries (1 in an ordinary model).
    """

    layer: int
    stack: str
    finite: bool = True
    variance_in: Number = None
    variance: Number = None
    first_variance: Number = None
    token_correlation: Number = None
    effective_rank: Number = None
    attention_share: Number = None
    feed_forward_share: Number = None
    alignment: Number = None
    gradient: Number = None
    largest: Number = None
    outlier: Number = None
    first_outlier: Number = None
    score_std: Numbers = ()
    largest_score: Numbers = ()
    entropy: Numbers = ()
    head_share: Numbers = ()
    norm_factor: Numbers = ()


class Weights(Value):
    """Standard deviations of one layer's weights, by role, and the predicted signal after it from those alone.

    Attributes:
        norm_scale: fixed factors on the norms of the attention and the feed-forward, as the model's description has
            them: what `LayerSignal.norm_factor` should be. norm_gain: root mean square of the gains of those norms.
        predicted_variance, predicted_gradient: as `LayerSignal.variance` and `gradient`, by the theory for random
            weights of these sizes: what training has aligned is what differs.
        identity: predicted |J - I| / sqrt(n) of the layer (docs/papers/curse-of-depth.md).
    """

    layer: int
    stack: str
    std: dict[str, Number]
    norm_scale: Numbers = ()
    norm_gain: Numbers = ()
    predicted_variance: Number = None
    predicted_gradient: Number = None
    identity: Number = None


class Identity(Value):
    """How near layers are to doing nothing.

    Attributes:
        cosine: between a token's stream before and after each layer, mean over tokens.
        angular: angular[n - 1][l]: angle between the stream before layer l and after layer l + n - 1, over pi, mean
            over tokens (0 the same direction, 1 the opposite).
        jacobian: ||J - I||_F / sqrt(number of entries of the stream) per layer, by random projections.
    """

    cosine: Numbers
    angular: tuple[Numbers, ...]
    jacobian: tuple[Estimate, ...] = ()


class Removed(Value):
    """The loss without some layers.

    Attributes:
        layers: which were removed. loss: mean cross-entropy per token without them. increase: what it lies above the
            whole model's, with the standard error of the difference over sequences. accuracy: of a task, where there is
            one.
    """

    layers: tuple[int, ...] = Field(min_length=1)
    loss: Estimate
    increase: Estimate
    accuracy: Estimate | None = None


class Removal(Value):
    """What layers are worth: the loss without each of them, one at a time."""

    single: tuple[Removed, ...]


class Cast(Value):
    """A direct cast to few bits.

    Attributes:
        format: of `signalprop.diagnosis.number_formats.FORMATS`. of: weights, activations or both. scaled: with scales
            (one per tensor, or as the format has them). loss, increase: as in `Removed`. signal_to_noise: of the stream
            after each layer, in dB.
    """

    format: str
    of: Literal["weights", "activations", "both"]
    scaled: bool
    loss: Estimate
    increase: Estimate
    signal_to_noise: Numbers = ()


class ScaledGradient(Value):
    """The gradient of a matrix or a stream in float16, times a loss scale, over the passes of single sequences.

    Attributes:
        name: path of the parameter, or `stream after layer 3`. layer: None at the ends of the model.
        n: entries that are not 0 in the model's precision. zero, subnormal, infinite: shares of them that become 0,
            keep fewer digits (below 2^-14), or overflow (above 65,504). largest: |entry| times the scale.
    """

    name: str
    layer: int | None
    n: int
    zero: float
    subnormal: float
    infinite: float
    largest: Number


class ScaledGradients(Value):
    """Gradients in float16 at a loss scale.

    Attributes:
        scale: the stated one. tensors: those whose gradients are not 0 throughout.
        fitting: the largest power of two as a scale that leaves the largest entry a factor of 4 below the end of the
            format. lost: at that scale, the largest share of a tensor's entries that become 0.
    """

    scale: float
    tensors: tuple[ScaledGradient, ...]
    fitting: float
    lost: float


class Diagnosis(Value, Document, Shown):
    """All that was found; sections that were not asked for are None or empty.

    Attributes:
        model, family, n_parameters: its name, its kind of architecture, how many numbers it holds.
        data: what it was run on.
        loss: mean cross-entropy per token of the whole model, in nats; perplexity: its exponential; accuracy: of a
            task, if there is one.
        signal, weights: by layer. identity: how near layers are to doing nothing. removal: what it costs to leave them
            out. casts: to few bits. gradients: in float16, at a loss scale.
        bad_tensors: with numbers that are not finite. ends: embedding, norm and head. trials: changes that were tried
            on a short text, the best first. fresh: of fresh weights alone. wired: faults of the wiring and of parts.
        findings: what follows, the most severe first.
        notes: what was left out, and why.
        schema_: version of the JSON form.
    """

    model_config = ConfigDict(title="diagnosis")
    schema_: Literal["signalprop/diagnosis/1"] = Field(alias="schema")
    model: str
    family: str
    n_parameters: int
    data: Data
    loss: Estimate | None = None
    perplexity: Number = None
    accuracy: Estimate | None = None
    signal: tuple[LayerSignal, ...] = ()
    weights: tuple[Weights, ...] = ()
    identity: Identity | None = None
    removal: Removal | None = None
    casts: tuple[Cast, ...] = ()
    gradients: ScaledGradients | None = None
    bad_tensors: tuple[BadTensor, ...] = ()
    ends: Ends | None = None
    trials: tuple[Tried, ...] = ()
    fresh: Fresh | None = None
    wired: tuple[Finding, ...] = ()
    findings: Findings = Findings()
    notes: tuple[str, ...] = ()

    def _rows(self) -> list[dict[str, Any]]:
        return [item.model_dump(mode="json") for item in self.signal]

    def _figure(self) -> Any:
        return report_module("diagnoses").figure([self])

    def _in_notebook(self) -> str:
        return cast("str", report_module("diagnosis_tables").screen(self)).replace("--all prints", "print() has")

    def __repr__(self) -> str:
        found = ", ".join(f"{v.severity} {v.name}" for v in self.findings) or "nothing found"
        loss = "" if self.loss is None or self.loss.value is None else f", loss {self.loss.value:.4g}"
        return f"<Diagnosis: {self.model}, {len(self.signal)} layers{loss}; {found}>"

    def __str__(self) -> str:
        return wrapped(report_module("diagnosis_tables").diagnosis_text(self, room=COLUMNS))

    @model_validator(mode="after")
    def _of_the_same_layers(self) -> Self:
        """A file may say of its layers what it likes; what reads it goes by their number."""
        n = len(self.signal)
        columns: dict[str, Sequence[Any]] = {
            f"casts of {cast.format}": cast.signal_to_noise for cast in self.casts if cast.signal_to_noise
        }
        if self.identity is not None:
            columns["identity.cosine"] = self.identity.cosine
            if self.identity.jacobian:
                columns["identity.jacobian"] = self.identity.jacobian
        for name, column in columns.items():
            if len(column) != n:
                raise ValueError(f"{name} has {len(column)} numbers; signal has {n} layers")
        removed = () if self.removal is None else self.removal.single
        strange = next((k for item in removed for k in item.layers if not 0 <= k < n), None)
        if strange is not None:
            raise ValueError(f"removal names layer {strange}; signal has {n} layers")
        return self

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_json` gives the same Diagnosis back."""
        data: dict[str, Any] = finite(self.model_dump(mode="json", by_alias=True))
        return data | {"findings": self.findings.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what `to_json` wrote (`data`).

        Raises:
            InputError: another schema version, a missing or unknown field, or a value out of range.
        """
        found = fields_of(data, SCHEMA, "a diagnosis")
        findings = Findings.from_json(found.pop("findings", []))
        return cls(**{key: tuples(value) for key, value in found.items()}, findings=findings)

    @typed
    def of_layers(self, layers: Sequence[int]) -> list[LayerSignal]:
        """The signal at some layers."""
        return [item for item in self.signal if item.layer in layers]


def known(values: Iterable[Number]) -> list[float]:
    """Without those that were not measured."""
    return [value for value in values if value is not None]


def mean_of(values: Iterable[Number]) -> Number:
    """Of those that were measured."""
    found = known(values)
    return sum(found) / len(found) if found else None


def paired(d: Diagnosis) -> list[tuple[LayerSignal, Weights | None]]:
    """The signal of every layer with its weights, where they are known."""
    weights = {(w.stack, w.layer): w for w in d.weights}
    return [(s, weights.get((s.stack, s.layer))) for s in d.signal]


def tuples(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return value
