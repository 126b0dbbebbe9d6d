"""Which fields of an Architecture go together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from signalprop.errors import InputError
from signalprop.network.activations import activation
from signalprop.network.architecture_fields import ArchitectureFields, is_one_layer
from signalprop.network.kinds import KINDS, ROLES, kind_named, kinds_where
from signalprop.network.layer_inputs import check
from signalprop.network.residual_streams import Streams


def check_consistent(a: ArchitectureFields) -> None:
    """That the fields of an architecture fit each other."""
    if a.n_heads % a.n_kv_heads:
        raise ValueError(f"n_heads {a.n_heads} is not a multiple of n_kv_heads {a.n_kv_heads}; choose a divisor")
    if isinstance(a.norm_placement, tuple) and len(a.norm_placement) != a.n_layers_total:
        raise ValueError(
            f"norm_placement names {len(a.norm_placement)} layers, the model has {a.n_layers_total};"
            " give one word, or one per layer"
        )
    _check_branches(a)
    if a.squash and (
        not set(a.placements) <= {"pre", "none"}
        or a.embedding_norm or a.head_transform or a.kind == "encoder-decoder"
    ):  # fmt: skip
        raise ValueError(
            f"norm {a.norm!r} stands before branches and before the head of one stack alone; take "
            "norm_placement 'pre' without embedding_norm and head_transform, or norm 'rmsnorm'"
        )
    if a.kind != "encoder-decoder" and (a.n_decoder_layers or a.target_len):
        raise ValueError("n_decoder_layers and target_len belong to kind 'encoder-decoder' only; leave them out")
    if a.decoder_positions and a.kind != "encoder-decoder":
        raise ValueError("decoder_positions belongs to kind 'encoder-decoder' only; leave it out")
    two = {a.positions, a.positions_of(decoder=True)}
    if len(two) > 1 and not two <= {"learned", "sinusoidal", "none"}:
        raise ValueError("positions and decoder_positions may differ only among learned, sinusoidal and none")
    if a.kind == "encoder-decoder" and a.parallel:
        raise ValueError("parallel attention and feed-forward is not defined for kind 'encoder-decoder'")
    odd = [*_missing(a.parallel if isinstance(a.parallel, tuple) else (), a)]
    odd += _missing(a.branch_scale if isinstance(a.branch_scale, dict) else (), a)
    if odd:
        raise ValueError(f"parallel or branch_scale names {odd[0]!r}: no layer has such a sublayer; see branches")
    unknown = sorted(a.role_scale.keys() - set(ROLES))
    if unknown:
        raise ValueError(f"role_scale names {unknown[0]!r}; expected some of {', '.join(ROLES)}")
    if a.parallel and not set(a.placements) <= {"pre", "none"}:
        raise ValueError("parallel attention and feed-forward needs norm_placement 'pre' or 'none'")
    if a.positions == "alibi" and a.kind != "decoder":
        raise ValueError("positions 'alibi' needs kind 'decoder': biases fall with the distance to earlier keys")
    if a.shared_norm and not a.parallel:
        raise ValueError("shared_norm needs parallel: only sublayers that read one stream can read one norm")
    if a.input == "patches" and a.kind != "encoder":
        raise ValueError("input 'patches' needs kind 'encoder'")
    if a.distillation_token and not a.class_token:
        raise ValueError("distillation_token needs class_token, which precedes it")
    if a.input == "patches" and a.seq_len <= a.n_class_tokens:
        raise ValueError(f"seq_len {a.seq_len}: expected more than the {a.n_class_tokens} class token(s)")
    if a.input == "frames":
        _check_convolutions(a)
    _check_streams(a)
    activation(a.activation)  # raises with the list of names


def _missing(names: Iterable[str], a: ArchitectureFields) -> list[str]:
    return sorted(set(names) - {name for layer in a.layer_branches for name in layer})


def _check_branches(a: ArchitectureFields) -> None:
    if a.branches is None:
        return
    if a.kind == "encoder-decoder" and is_one_layer(a.branches):
        raise ValueError("branches of an encoder-decoder: give one tuple of names per layer, the encoder's first")
    if len(a.layer_branches) != a.n_layers_total:
        raise ValueError(
            f"branches names {len(a.layer_branches)} layers, the model has {a.n_layers_total};"
            " give one tuple of names, or one per layer"
        )
    for number, names in enumerate(a.layer_branches):
        unknown = [name for name in names if name not in KINDS]
        if unknown or not names:
            found = f"no kind of sublayer {unknown[0]!r}" if unknown else "no sublayer"
            raise ValueError(f"branches of layer {number}: {found}; expected some of {', '.join(KINDS)}")
        across = [name for name in names if kind_named(name).reads_memory]
        if across and (a.kind != "encoder-decoder" or number < a.n_layers):
            raise ValueError(f"{across[0]} needs the decoder of kind 'encoder-decoder': it reads an encoder")


def _check_streams(a: ArchitectureFields) -> None:
    s = a.streams
    if a.layer_inputs is not None:
        check(a.layer_inputs, a.n_layers)
        if s is not None or a.kind == "encoder-decoder" or "post" in a.placements or a.squash:
            raise ValueError("layer_inputs need one stack and one stream, and norms before branches or on them")
    if s is None:
        return
    if a.kind == "encoder-decoder" or a.parallel or "post" in a.placements or a.squash:
        raise ValueError("streams need one stack, branches one after the other, and norms before them or on them")
    if s.gated and not set(a.placements) <= {"pre", "sandwich"}:
        raise ValueError(f"streams of mixing {s.mixing!r} need norm_placement 'pre' or 'sandwich'")
    if s.mixing == "siamese" and (s.n != 2 or a.tied_embeddings or not set(a.placements) <= {"pre", "sandwich"}):
        raise ValueError(
            "streams of mixing 'siamese' are 2, with norm_placement 'pre' or 'sandwich', not tied_embeddings"
        )


def _check_convolutions(a: ArchitectureFields) -> None:
    if a.kind == "decoder":
        raise ValueError("input 'frames' needs kind 'encoder' or 'encoder-decoder'")
    kernels, strides = a.conv_kernels, a.conv_strides
    if not kernels or len(kernels) != len(strides) or any(kernel % 2 == 0 for kernel in kernels):
        raise ValueError(
            f"conv_kernels {kernels} and conv_strides {strides}: expected one odd kernel and one stride each"
        )
    if a.conv_activation != "glu":
        activation(a.conv_activation)


def settings_of(name: Any, given: Any) -> Any:
    """Settings of the kind `name` from a mapping; anything else is left to the field's check."""
    if not isinstance(given, dict):
        return given
    settings = kind_named(name).settings if name in KINDS else None
    if settings is None:
        having = ", ".join(kind.name for kind in kinds_where(lambda kind: kind.settings is not None)) or "none"
        raise InputError(f"settings of {name!r}: there is no such kind of sublayer with settings; these have: {having}")
    return settings(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def streams_of(given: int | dict[str, Any]) -> Streams:
    """Streams from their number, or from a mapping of fields."""
    fields: dict[str, Any] = {"n": given} if isinstance(given, int) else given
    if fields.get("mixing") == "siamese":
        fields = {"n": 2} | fields
    return Streams(**fields)
