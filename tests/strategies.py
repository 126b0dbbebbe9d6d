"""Hypothesis strategies: valid architectures of every kind, schemes with options, and input statistics."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.schemes import SCHEMES, Scheme, scheme

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5", "gpt_neox")
LARGEST_DROPOUT = math.nextafter(1.0, 0.0)
DROPOUTS = st.sampled_from([0.0, 0.1, 0.5, 0.99, LARGEST_DROPOUT]) | st.floats(0, 0.99)
PLACEMENTS = st.sampled_from(["pre", "post", "sandwich", "none", "res-post"])
SIZES = st.floats(0.01, 100.0) | st.just(1.0)
FLAGS = ("gated", "embedding_norm", "bias", "norm_bias", "tied_embeddings", "head_transform")
CHOICES: dict[str, SearchStrategy[Any]] = {
    **{name: st.booleans() for name in FLAGS},
    **{name: st.sampled_from([None, True, False]) for name in ("final_norm", "qkv_bias")},
    "qk_norm": st.sampled_from([False, True, "whole"]),
    "head_bias": st.sampled_from([None, True, False]),
    "d_ff": st.none() | st.integers(1, 1000),
    "activation": st.sampled_from(sorted(ACTIVATIONS)),
    "norm": st.sampled_from(["layernorm", "rmsnorm"]),
    "norm_eps": st.sampled_from([0.0, 1e-12, 1e-5]),
    "positions": st.sampled_from(["learned", "sinusoidal", "rotary", "relative", "none"]),
    "rotary_fraction": st.sampled_from([0.25, 1.0]),
    "attention_scale": st.sampled_from([None, 1.0, 1e-3]),
    "n_segments": st.integers(0, 2),
    "embedding_scale": st.sampled_from([1.0, 22.6]),
    "vocab_size": st.sampled_from([2, 100, 32_000]),
    "seq_len": st.sampled_from([1, 2, 5, 64, 512]),
    "dropout": DROPOUTS,
    "attention_dropout": st.none() | DROPOUTS,
    "embedding_dropout": st.none() | DROPOUTS,
    "head": st.sampled_from(["lm", "classes", "none"]),
    "family": st.none() | st.sampled_from(FAMILIES),
}


@st.composite
def architectures(draw: Any, *, deepest: int = 6) -> Architecture:
    """Any valid Architecture of at most `deepest` layers per stack."""
    fields = {name: draw(choice) for name, choice in CHOICES.items()}
    kind = draw(st.sampled_from(["encoder", "decoder", "encoder-decoder"]))
    total = n_layers = draw(st.integers(1, deepest))
    fields |= {"kind": kind, "n_layers": n_layers}
    if kind == "encoder-decoder":
        n_decoder_layers = draw(st.integers(1, deepest))
        total += n_decoder_layers
        fields |= {"n_decoder_layers": n_decoder_layers, "target_len": draw(st.sampled_from([1, 2, 5, 64]))}
    else:
        fields["parallel"] = draw(st.booleans())
        fields["shared_norm"] = fields["parallel"] and draw(st.booleans())
    places = st.sampled_from(["pre", "none"]) if fields.get("parallel") else PLACEMENTS
    fields["norm_placement"] = draw(places | st.lists(places, min_size=total, max_size=total).map(tuple))
    n_kv_heads, d_head = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8, 64, None]))
    n_heads = n_kv_heads * draw(st.integers(1, 3))
    d_model = draw(st.integers(1, 300)) if d_head else n_heads * draw(st.integers(1, 80))
    fields |= {"n_kv_heads": n_kv_heads, "n_heads": n_heads, "d_head": d_head, "d_model": d_model}
    if kind == "encoder" and draw(st.booleans()):
        fields |= {"input": "patches", "class_token": draw(st.booleans())}
        fields["distillation_token"] = fields["class_token"] and draw(st.booleans())
        fields["seq_len"] = max(fields["seq_len"], 1 + fields["class_token"] + fields["distillation_token"])
    elif kind != "decoder" and draw(st.booleans()):
        n = draw(st.integers(1, 3))
        fields |= {"input": "frames", "frame_dim": draw(st.integers(1, 9)), "conv_channels": draw(st.integers(1, 9))}
        fields["conv_kernels"] = tuple(draw(st.sampled_from([1, 3, 5])) for _ in range(n))
        fields["conv_strides"] = tuple(draw(st.integers(1, 3)) for _ in range(n))
        fields["conv_activation"] = draw(st.sampled_from(["glu", "gelu", "relu"]))
    if kind == "encoder-decoder" and fields["positions"] in ("learned", "sinusoidal", "none"):
        fields["decoder_positions"] = draw(st.sampled_from([None, "learned", "sinusoidal", "none"]))
    return Architecture(**fields)


@st.composite
def schemes(draw: Any) -> Scheme:
    """Any registered scheme, with random options."""
    name = draw(st.sampled_from(sorted(SCHEMES)))
    known = SCHEMES[name].__dataclass_fields__
    options = {key: draw(SIZES) for key in ("gain", "qk_gain", "std", "k") if key in known}
    if "alpha" in known:
        options["alpha"] = draw(SIZES if name in ("ds-init", "keel") else st.floats(0, 3))
    return scheme(name, **options)


def statistics(architecture: Architecture) -> SearchStrategy[InputStatistics]:
    """Input statistics that fit an architecture, among them streams of enormous and of no variance."""
    lowest = -1 / max(architecture.seq_len - 1, 1)  # what so many tokens can have among each other
    unit, correlation, share = st.floats(0, 1), st.floats(lowest, 1), st.floats(0.001, 1)
    stream = st.builds(
        InputStatistics,
        kind=st.just("stream"),
        variance=st.sampled_from([0.0, 1e-200, 1e-30, 1e30, 1e100]) | st.floats(1e-3, 1e3),
        mean=st.sampled_from([0.0, 1.0, -1e3]),
        token_correlation=correlation,
        target_correlation=unit,
        loss_fraction=share,
    )
    own = st.builds(
        InputStatistics,
        kind=st.just(architecture.input),
        variance=st.floats(0, 10),
        mean=st.floats(-3, 3),
        token_correlation=unit if architecture.input == "tokens" else correlation,
        segment_correlation=unit,
        target_correlation=unit,
        loss_fraction=share,
        decoder=st.builds(InputStatistics, token_correlation=unit, target_correlation=unit, loss_fraction=share)
        if architecture.input == "frames" and architecture.kind == "encoder-decoder"
        else st.none(),
    )
    return stream | own


def table_or_none(made_by: Scheme, architecture: Architecture, inputs: InputStatistics) -> Parametrization | None:
    """The table of a scheme; None where it refuses (a family it does not know, or uncorrelated tokens)."""
    try:
        return made_by(architecture, inputs)
    except InputError:
        return None
