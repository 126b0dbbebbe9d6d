"""What a network is: shape, norms, mask, positions, dropout. A frozen value, without any number of a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import model_validator

from signalprop.errors import InputError
from signalprop.files.validation import Value, typed
from signalprop.network.architecture_fields import ADDED as ADDED
from signalprop.network.architecture_fields import ArchitectureFields
from signalprop.network.architecture_fields import Placement as Placement
from signalprop.network.changes import changed_fields, is_width
from signalprop.network.consistency import check_consistent, settings_of, streams_of
from signalprop.network.kinds import kind_named
from signalprop.network.presets import preset

READERS: list[Callable[..., Architecture]] = []  # of Hugging Face configs: `signalprop.families.reading` stands here


class Architecture(ArchitectureFields):
    """What a transformer is, before any scheme says how it is initialised and scaled.

    Attributes:
        kind: `encoder` (bidirectional), `decoder` (causal) or `encoder-decoder` (with cross-attention).
        n_layers: layers of the stack (of the encoder, in an encoder-decoder); what one layer is, `branches` says.
        n_decoder_layers: layers of the decoder of an encoder-decoder (default: n_layers).
        d_model: width of the residual stream.
        n_heads, n_kv_heads, d_head: heads; key/value heads (fewer: grouped-query attention); features per head.
        d_ff: width of the feed-forward hidden layer; `gated`: SwiGLU-like, f(x W_gate) * (x W_up).
        activation: name in `signalprop.network.activations`; `unknown` of a model of which only the stream is known.
        norm, norm_placement: kind of norm, and its place: `pre` (on the branch input), `post` (after the addition),
            `sandwich` (branch input and branch output), `none`, `res-post` (on the branch output alone: OLMo 2, Swin
            v2); one word, or one per layer (mixtures). In an encoder-decoder a tuple counts the encoder's layers, then
            the decoder's.
        parallel: the branches of a layer read the same stream (GPT-NeoX, GPT-J); or names of kinds: only these read
            what the branch before them reads (Falcon-H1: `attention` beside `mamba2`). shared_norm: through one norm
            (Phi, Falcon 7B).
        branches: kinds of the sublayers of a layer, in their order: one tuple of names for all layers, or one per layer
            (hybrids; in an encoder-decoder the encoder's layers, then the decoder's). Default: `attention`,
            `feed_forward`, in a decoder that reads an encoder with `cross_attention` between.
        settings: what some kinds of sublayers need beyond these fields, by the kind's name: a mapping, or the value
            that it makes. Kinds that are there and are not named get their defaults.
            `dyt` and `derf` are not norms but take their place (before branches, and before the head): tanh and erf of
            the stream times `norm_slope` of the table, times a gain.
        streams: several residual streams (hyper-connections, skips from the input): a `Streams`, a mapping of its
            fields, or how many. Default: one.
        layer_inputs: what enters every layer, where more than what left the layer before does (x0 of nanochat, U-Nets):
            per layer factors by source, 0 for what enters the first layer, k for what left layer k - 1. Layer 0 has
            {0: 1.0}; layer 2 of {2: 0.9, 0: 0.1} reads 0.9 of the stream and 0.1 of the first one. With {-1: 1.1} in
            layer 0 it reads 1.1 of the model's input, and that is source -1 of the others.
        final_norm: a norm after the last layer (default: unless the last layer is post-norm). norm_eps: added to the
            variance (mean square) under a norm's root.
        qk_norm: queries and keys are RMS-normalised: per head (True), or over all heads (`whole`, OLMo 2). The theory
            treats both equally: after the second a head's mean square is 1 only on average, and scatters by
            sqrt(2 / d_head).
        attention_scale: factor on q.k (default 1/sqrt(d_head); T5 has 1).
        positions: `learned` and `sinusoidal` add a table; `rotary`; `relative` (a bias on scores); `none`.
        decoder_positions: of the decoder of an encoder-decoder, where the two add different tables (Whisper); default:
            positions.
        rotary_fraction: share of each head's features that rotates; rotary_base: base of its frequencies.
        n_segments: rows of a segment table that is added (2 in BERT, 1 in RoBERTa, 0: none).
        embedding_norm: a norm on the sum of the embeddings (BERT). embedding_scale: factor on it (sqrt(d) in Gemma).
        input: `tokens`; `patches` of `patch_dim` numbers through a linear embedding, with `class_token` (and
            `distillation_token`, DeiT) before them or not; or `frames` of `frame_dim` numbers (log-mel features)
            through convolutions over time.
        conv_kernels, conv_strides: one odd width and one stride per convolution; the input is padded by half a kernel
            on both sides, so a stride of 2 halves the length. conv_channels: width between the convolutions (default:
            d_model, which the last one has). conv_activation: after each convolution; `glu` gates half of its outputs
            with the other half.
        vocab_size, seq_len: rows of the token table; tokens that the model reads. target_len: of the decoder
            of an encoder-decoder (default: seq_len).
        dropout: on every branch output; attention_dropout (on attention weights), embedding_dropout: default: dropout.
        bias, qkv_bias, norm_bias: whether linear maps, the q/k/v maps (default: bias) and norms have biases.
        tied_embeddings: the head is the token table. head: `lm`, `classes` (then n_classes; of the first position, in a
            decoder of the last) or `none`.
        head_transform: dense + activation + norm before the head (BERT). head_bias: default: only on classes and
            after a head_transform, where linear maps have biases.
        family: model_type of Hugging Face, where it came from there. init_scale: what its configuration says of the
            standard deviations drawn (initializer_range, init_std, initializer_factor) over the family's default; read
            by scheme `huggingface` alone, as are `branch_scale`, `head_scale` and `role_scale`: fixed factors that the
            model's code has on every branch (Granite's residual_multiplier; or by kind of sublayer), on the head's
            input, and by role on what its maps give (Falcon-H1).
    """

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """Fill in what follows from other fields. A bad width is left to the check of that field."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if value is not None}
        for name in ("norm_placement", "conv_kernels", "conv_strides", "parallel"):  # JSON has no tuples
            if isinstance(data.get(name), list):
                data[name] = tuple(data[name])
        if isinstance(data.get("branches"), (list, tuple)):
            data["branches"] = tuple(tuple(x) if isinstance(x, list) else x for x in data["branches"])
        if isinstance(data.get("layer_inputs"), (list, tuple)):
            data["layer_inputs"] = _layer_inputs(data["layer_inputs"])
        if isinstance(data.get("settings"), dict):
            data["settings"] = {name: settings_of(name, given) for name, given in data["settings"].items()}
        if isinstance(data.get("streams"), (int, dict)) and not isinstance(data["streams"], bool):
            data["streams"] = streams_of(data["streams"])
        d_model = data.get("d_model")
        if not is_width(d_model):
            return data
        n_heads = data.setdefault("n_heads", d_model // 64 if d_model % 64 == 0 else 1)
        if not is_width(n_heads):
            return data
        data.setdefault("n_kv_heads", n_heads)
        if "d_head" not in data:
            if d_model % n_heads:
                raise ValueError(
                    f"d_model {d_model} is not divisible by n_heads {n_heads}; choose a divisor, or give d_head"
                )
            data["d_head"] = d_model // n_heads
        data.setdefault("d_ff", 4 * d_model)
        dropout = data.get("dropout", 0.0)
        if isinstance(dropout, (int, float)) and 0 <= dropout < 1:  # else one complaint, not three
            data.setdefault("attention_dropout", dropout)
            data.setdefault("embedding_dropout", dropout)
        data.setdefault("qkv_bias", data.get("bias", True))
        if data.get("kind") == "encoder-decoder":
            data.setdefault("n_decoder_layers", data.get("n_layers"))
            data.setdefault("target_len", data.get("seq_len", 512))
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_consistent(self)
        object.__setattr__(self, "settings", self._settings())
        return self

    def _settings(self) -> dict[str, Value]:
        """Of every kind that is there and has any."""
        there = {name for names in self.layer_branches for name in names}
        absent = sorted(self.settings.keys() - there)
        if absent:
            raise ValueError(f"settings of {absent[0]!r}: no layer has such a sublayer; see branches")
        return {
            name: self.settings.get(name) or settings_of(name, {})
            for name in sorted(there)
            if kind_named(name).settings
        }

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    @typed
    def preset(cls, name: str, **changes: Any) -> Architecture:
        """A known architecture by name, with some fields changed (`changes`). See `signalprop.network.presets`.

        A change of d_model without n_heads, d_head or d_ff keeps the head width and the ratio d_ff / d_model.

        Raises:
            InputError: unknown name (the message lists the known ones), or a bad field.
        """
        family, fields = preset(name)
        given = {key: value for key, value in changes.items() if value is not None}
        known = cls(**fields) if family is None else cls.from_hf({"model_type": family}, **fields)
        return known.replace(**given)

    @classmethod
    @typed
    def from_hf(cls, source: Any, **changes: Any) -> Architecture:
        """Read a Hugging Face config.

        Args:
            source: a config object, a model, a config dict, or a directory (or config.json) on disk.
            changes: fields that are to differ from it.

        Raises:
            InputError: the family is not known, the file is not readable, or a value is out of range.
        """
        (read,) = READERS
        return read(source, **changes)

    def replace(self, **changes: Any) -> Architecture:
        """A copy with some fields changed (`changes`), validated again. None stands for a field's default.

        Fields that depend on a changed one are derived again, unless they are given too: from d_model the heads (their
        width stays; a d_model that it does not divide gets one head) and d_ff (the ratio stays); from norm_placement
        final_norm; and where they were equal, from dropout the other two dropouts, from n_layers n_decoder_layers, from
        seq_len target_len, from bias qkv_bias, from n_heads n_kv_heads. Branches that are named layer by layer start
        again after the last where n_layers grows.

        Raises:
            InputError: a bad or unknown field.
        """
        return type(self)(**changed_fields(self, changes))


@runtime_checkable
class Config(Protocol):
    """A configuration of Hugging Face's transformers, which is not needed to read one."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """All its values."""


def _layer_inputs(given: Any) -> Any:
    """Rows as JSON has them, with texts for whole numbers; None where every layer reads what left the one before."""
    rows = tuple({_whole(key): x for key, x in row.items()} if isinstance(row, dict) else row for row in given)
    return None if all(row == {layer: 1.0} for layer, row in enumerate(rows)) else rows


def _whole(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.removeprefix("-").isdecimal() else key


def architecture_of(subject: object) -> Architecture:
    """The architecture that a preset's name or a configuration of Hugging Face means; an Architecture is itself.

    Raises:
        InputError: an unknown preset or family, or something else.
    """
    if isinstance(subject, Architecture):
        return subject
    if isinstance(subject, str) and "/" in subject:
        raise InputError(f"{subject:.200} is a path; give Architecture.from_hf(path), or the loaded model")
    if isinstance(subject, str):
        return Architecture.preset(subject)
    if isinstance(subject, Config):
        return Architecture.from_hf(subject)
    raise InputError(
        f"expected an Architecture, a preset's name or a configuration of Hugging Face; got the "
        f"{type(subject).__name__} {subject!r:.60}"
    )
