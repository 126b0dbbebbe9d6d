"""Plain initialisations: Xavier, one fixed standard deviation, GPT-2's, and what PyTorch and Hugging Face do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from signalprop.errors import InputError
from signalprop.families import find
from signalprop.families.base import SINUSOIDS
from signalprop.files.validation import typed
from signalprop.network.architecture import ADDED, Architecture
from signalprop.network.embedding_and_head import Distribution
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import KINDS, ROLE
from signalprop.network.layout import layout
from signalprop.network.parametrization import ROLES, Embedding, Head, Parametrization, fan
from signalprop.schemes.base import Scheme, fill, register, xavier_std
from signalprop.schemes.options import Positive
from signalprop.theory.embedding import activated

__all__ = ["head_of", "same_embedding", "small_logits_head", "stream_ends", "unit_embedding"]

_PACKED = ("query", "key", "value")  # one matrix in nn.MultiheadAttention


@typed
def unit_embedding(architecture: Architecture) -> Embedding:
    """Tables (of an `architecture`) whose sum has variance 1 after dropout: (1 - p) / tables (TGS section 3.5).

    Convolutions over frames count as a table: of features of mean square 1 they make a stream of its variance.
    """
    a = architecture
    std = math.sqrt((1 - (a.embedding_dropout or 0.0)) / a.n_embedding_tables) / a.embedding_scale
    return _embedding(
        a,
        std,
        token=std / math.sqrt(a.patch_dim) if a.input == "patches" else std,
        convolutions=_unit_convolutions(a, std) if a.input == "frames" else (),
    )


@typed
def same_embedding(architecture: Architecture, std: float) -> Embedding:
    """Every table of an `architecture` with one standard deviation `std`; so the convolutions that read frames."""
    n = len(architecture.conv_kernels) if architecture.input == "frames" else 0
    return _embedding(architecture, std, token=std, convolutions=(std,) * n)


def _embedding(architecture: Architecture, std: float, *, token: float, convolutions: tuple[float, ...]) -> Embedding:
    a = architecture
    return Embedding(
        token=token if a.has_token_table or a.input == "patches" else 0.0,
        position=std if {a.positions, a.decoder_positions} & set(ADDED) else 0.0,
        segment=std if a.n_segments else 0.0,
        convolutions=convolutions,
        scale=a.embedding_scale,
    )


def _unit_convolutions(architecture: Architecture, std: float) -> tuple[float, ...]:
    """Standard deviations that give every convolution outputs of variance 1, the stream after the last `std`^2."""
    a = architecture
    low, high = 0.0, 1.0
    while activated(a.conv_activation, high, 0.0)[1] < std**2:
        low, high = high, 2 * high
        if high > 1e9:
            raise InputError(f"conv_activation {a.conv_activation!r} gives no variance of {std**2:.3g}; choose another")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if activated(a.conv_activation, middle, 0.0)[1] < std**2 else (low, middle)
    mean, variance, _ = activated(a.conv_activation, 1.0, 0.0)
    out = []
    for i in range(len(a.conv_kernels)):
        inputs, _, kernel = a.convolution(i)
        wanted = high if i == len(a.conv_kernels) - 1 else 1.0
        out.append(math.sqrt(wanted / (inputs * kernel * (variance + mean**2 if i else 1.0))))
    return tuple(out)


@typed
def head_of(architecture: Architecture, std: float, embedding: Embedding, scale: float = 1.0) -> Head:
    """A head of one standard deviation, as the dense layer before it; where it is tied, it is the token table.

    Args:
        architecture: that it belongs to. std: of its weights. embedding: whose token table it may be.
        scale: factor on its input.
    """
    a = architecture
    return Head(
        weight=embedding.token if a.has_tied_head else std,
        scale=scale,
        transform=std if a.head_transform else 0.0,
    )


@typed
def small_logits_head(architecture: Architecture, embedding: Embedding) -> Head:
    """A head whose logits start of order 1: weights like the token table's, its input divided by sqrt(d).

    TGS section 4.1 divides the model's output so, where the head is not scaled otherwise.

    Args:
        architecture: that it belongs to. embedding: whose token table gives its size.
    """
    a = architecture
    return Head(
        weight=embedding.token if a.has_token_table else 1.0,
        scale=1 / math.sqrt(a.d_model),
        transform=1 / math.sqrt(a.d_model) if a.head_transform else 0.0,
    )


@typed
def stream_ends(table: Parametrization) -> Parametrization:
    """The table with embeddings that start the stream at variance 1 and a head with small logits (as TGS has them)."""
    embedding = unit_embedding(table.architecture)
    return replace(table, embedding=embedding, head=small_logits_head(table.architecture, embedding))


@dataclass(frozen=True)
class _Xavier(Scheme):
    distribution: ClassVar[Distribution]
    gain: Positive = 1.0
    qk_gain: Positive = 1.0
    value_per_head: bool = False

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        std = {role: self.gain * xavier_std(a, role) for role in ROLES}
        std |= {role: self.qk_gain * std[role] for role in ("query", "key")}
        if self.value_per_head:
            std["value"] = self.gain * math.sqrt(2 / (a.d_model + a.d_head))
        table = fill(a, self, std)
        return stream_ends(replace(table, distribution=dict.fromkeys(ROLES, self.distribution)))


@register
@dataclass(frozen=True)
class XavierNormal(_Xavier):
    """Xavier initialisation, normal: sigma_w^2 = gain^2 * 2 / (fan_in + fan_out); lambda = beta = 1.

    Embeddings have sigma_e^2 = (1 - p) / tables, so that the model's input has variance 1, and the head's input is
    divided by sqrt(d), so that logits start small (both as in TGS; Glorot and Bengio speak of neither). `qk_gain`
    multiplies the standard deviation of queries and keys (2: the gradient explosion of TGS section 3.3).
    `value_per_head` counts the fan-out of each head's d x d_head value matrix: values of up to twice the variance,
    which the constants of TGS's v1 appendices F and G.1.1 are of.
    """

    name: ClassVar[str] = "xavier"
    paper: ClassVar[str] = "Glorot and Bengio 2010, AISTATS, eq. 16"
    summary: ClassVar[str] = "variance 2/(fan_in + fan_out), normal; skip = branch = 1"
    distribution: ClassVar[Distribution] = "normal"


@register
@dataclass(frozen=True)
class XavierUniform(_Xavier):
    """Xavier initialisation, uniform on +-sqrt(6 / (fan_in + fan_out)): the same variance as the normal form."""

    name: ClassVar[str] = "xavier-uniform"
    paper: ClassVar[str] = "Glorot and Bengio 2010, AISTATS, eq. 16"
    summary: ClassVar[str] = "variance 2/(fan_in + fan_out), uniform; skip = branch = 1"
    distribution: ClassVar[Distribution] = "uniform"


@register
@dataclass(frozen=True)
class FixedStd(Scheme):
    """Every weight and embedding normal with one standard deviation (BERT's 0.02); lambda = beta = 1."""

    name: ClassVar[str] = "fixed"
    paper: ClassVar[str] = "Devlin et al. 2019, NAACL (BERT), released code: initializer_range"
    summary: ClassVar[str] = "every weight has standard deviation `std` (0.02); skip = branch = 1"
    std: Positive = 0.02

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return one_std(architecture, self, self.std, residual=1.0)


@register
@dataclass(frozen=True)
class GPT2(Scheme):
    """GPT-2's: normal with `std` 0.02, and 0.02 / sqrt(2N) for the two matrices that write to the residual stream.

    N counts layers; 2N residual branches, so that at std 0.02 the branches together add what one would.
    """

    name: ClassVar[str] = "gpt2"
    paper: ClassVar[str] = "Radford et al. 2019 (GPT-2), section 2.3"
    summary: ClassVar[str] = "standard deviation 0.02; output projections divided by sqrt(2 n_layers)"
    std: Positive = 0.02

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return one_std(architecture, self, self.std, residual=1 / math.sqrt(2 * architecture.n_layers_total))


@register
@dataclass(frozen=True)
class PyTorchDefault(Scheme):
    """What torch's modules do: nn.Linear uniform on +-1/sqrt(fan_in), weights and biases; nn.Embedding N(0, 1).

    As in nn.TransformerEncoderLayer, the packed query/key/value projection is Xavier-uniform over its (3d, d) shape
    and, like the attention output, has zero biases.
    """

    name: ClassVar[str] = "pytorch"
    paper: ClassVar[str] = "PyTorch source: nn.Linear.reset_parameters, nn.MultiheadAttention._reset_parameters"
    summary: ClassVar[str] = "nn.Linear and nn.MultiheadAttention defaults; embeddings N(0, 1)"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        std = {role: 1 / math.sqrt(3 * fan(a, role)[0]) for role in ROLES}
        packed = math.sqrt(2 / (a.d_model + (a.n_heads + 2 * a.n_kv_heads) * a.d_head))
        std |= dict.fromkeys(_PACKED, packed)
        table = fill(a, self, std)
        if a.bias:
            plain = [role for role in ROLES if role not in (*_PACKED, "output")]  # nn.MultiheadAttention starts at 0
            table = table.with_columns(**{f"bias__{role}": std[role] for role in plain})
        embedding = same_embedding(a, 1.0)
        if a.input == "patches":
            bound = 1 / math.sqrt(3 * a.patch_dim)
            embedding = Embedding(token=bound, position=embedding.position, patch_bias=bound, distribution="uniform")
        if a.input == "frames":
            reads = (a.convolution(i) for i in range(len(a.conv_kernels)))
            bounds = tuple(1 / math.sqrt(3 * inputs * kernel) for inputs, _, kernel in reads)
            made = {"convolutions": bounds, "convolution_biases": bounds, "distribution": "uniform"}
            embedding = Embedding(**embedding.model_dump() | made)
        return replace(
            table,
            distribution=dict.fromkeys(ROLES, "uniform"),
            embedding=embedding,
            head=head_of(a, 1 / math.sqrt(3 * a.d_model), embedding),
        )


@register
@dataclass(frozen=True)
class HuggingFaceDefault(Scheme):
    """What transformers' `_init_weights` draws for the architecture's family (transformers 5.23).

    Each family's file in `signalprop.families` says it (`initialisation`): normal 0.02 everywhere, convolutions too,
    for all but a few (a truncation 100 standard deviations out counts for nothing). Sinusoidal positions are plain
    sines and cosines, of mean square 1/2. Biases are zero where a family does not say otherwise. The standard deviation
    that a configuration sets (initializer_range, init_std, initializer_factor) comes with the architecture, as its
    `init_scale`.

    Raises:
        InputError: the architecture has no family, or one whose initialisation is not known here.
    """

    name: ClassVar[str] = "huggingface"
    paper: ClassVar[str] = "transformers source, _init_weights of each family"
    summary: ClassVar[str] = "what transformers initialises for this family"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        family = find(a.family)
        if family is None:
            raise InputError(
                f"the default initialisation of family {a.family!r} is not known here; give the architecture a family "
                "that `signalprop.families` holds, or choose another scheme"
            )
        drawn = family.initialisation
        tables = drawn.tables * a.init_scale
        embedding = same_embedding(a, tables)
        own = {"transform": drawn.transform(a) * a.init_scale} if drawn.transform and a.head_transform else {}
        scale = family.tied_head_scale(a) if family.tied_head_scale and a.tied_embeddings else a.head_scale
        factor = {role: a.init_scale * a.role_scale.get(role, 1.0) for role in ROLES}
        biases = {f"bias__{role}": std * factor[role] for role, std in drawn.biases.items()}
        weights = {role: std * factor[role] for role, std in drawn.weights(a).items()}
        branch = np.array([a.branch_scale_of(name) for name in KINDS])[layout(a).kind]
        gain = a.init_scale if drawn.gains else 1.0
        own["final_norm_gain"] = gain
        return replace(
            fill(a, self, weights, branch=branch, norm_gain=gain, **biases),
            embedding=_with_positions(a, embedding, drawn.positions),
            head=Head(**head_of(a, tables, embedding, scale).model_dump() | own),
        )


def _with_positions(architecture: Architecture, embedding: Embedding, positions: float | None) -> Embedding:
    """The embedding with what transformers starts `positions` with, where that is not like the tables."""
    a = architecture
    sinusoids = SINUSOIDS / a.embedding_scale  # added after the scale
    changes = {} if positions is None else {"position": positions * a.init_scale}
    if a.positions == "sinusoidal":
        changes["position"] = sinusoids
    if a.positions_of(decoder=True) != a.positions:
        changes["decoder_position"] = sinusoids if a.decoder_positions == "sinusoidal" else embedding.position
    return Embedding(**embedding.model_dump() | changes)


def one_std(architecture: Architecture, made_by: Scheme, std: float, *, residual: float) -> Parametrization:
    """Everything of one standard deviation, the two matrices that write to the stream times `residual`."""
    values = {role: std * residual if made.writes else std for role, made in ROLE.items()}
    embedding = same_embedding(architecture, std)
    head = head_of(architecture, std, embedding)
    return replace(fill(architecture, made_by, values), embedding=embedding, head=head)
