"""Hypothesis strategies: valid architectures of every kind, schemes with options, and input statistics."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from signalprop.architecture import Architecture
from signalprop.inputs import InputStatistics
from signalprop.schemes import SCHEMES, Scheme, scheme
from signalprop.theory.activations import ACTIVATIONS

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5", "gpt_neox")
DROPOUTS = st.sampled_from([0.0, 0.1, 0.5, 0.99]) | st.floats(0, 0.99)
PLACEMENTS = st.sampled_from(["pre", "post", "sandwich", "none"])


@st.composite
def architectures(draw: Any, *, deepest: int = 6) -> Architecture:
    """Any valid Architecture of at most `deepest` layers per stack."""
    kind = draw(st.sampled_from(["encoder", "decoder", "encoder-decoder"]))
    n_layers = draw(st.integers(1, deepest))
    total = n_layers
    fields: dict[str, Any] = {"kind": kind, "n_layers": n_layers}
    if kind == "encoder-decoder":
        fields["n_decoder_layers"] = draw(st.integers(1, deepest))
        fields["target_len"] = draw(st.sampled_from([1, 2, 5, 64]))
        total += fields["n_decoder_layers"]
    fields["n_kv_heads"] = draw(st.integers(1, 3))
    fields["n_heads"] = fields["n_kv_heads"] * draw(st.integers(1, 3))
    d_head = draw(st.sampled_from([1, 2, 8, 64, None]))
    fields["d_head"] = d_head
    fields["d_model"] = draw(st.integers(1, 300)) if d_head else fields["n_heads"] * draw(st.integers(1, 80))
    fields["d_ff"] = draw(st.none() | st.integers(1, 1000))
    fields["parallel"] = kind != "encoder-decoder" and draw(st.booleans())
    places = st.sampled_from(["pre", "none"]) if fields["parallel"] else PLACEMENTS
    fields["norm_placement"] = draw(places | st.lists(places, min_size=total, max_size=total).map(tuple))
    patches = kind == "encoder" and draw(st.booleans())
    fields["input"] = "patches" if patches else "tokens"
    fields["class_token"] = patches and draw(st.booleans())
    for name in ("gated", "qk_norm", "embedding_norm", "bias", "norm_bias", "tied_embeddings", "head_transform"):
        fields[name] = draw(st.booleans())
    for name in ("final_norm", "qkv_bias"):
        fields[name] = draw(st.sampled_from([None, True, False]))
    fields["activation"] = draw(st.sampled_from(sorted(ACTIVATIONS)))
    fields["norm"] = draw(st.sampled_from(["layernorm", "rmsnorm"]))
    fields["norm_eps"] = draw(st.sampled_from([0.0, 1e-12, 1e-5]))
    fields["positions"] = draw(st.sampled_from(["learned", "sinusoidal", "rotary", "relative", "none"]))
    fields["rotary_fraction"] = draw(st.sampled_from([0.25, 1.0]))
    fields["attention_scale"] = draw(st.sampled_from([None, 1.0, 1e-3]))
    fields["n_segments"] = draw(st.integers(0, 2))
    fields["embedding_scale"] = draw(st.sampled_from([1.0, 22.6]))
    fields["vocab_size"] = draw(st.sampled_from([2, 100, 32_000]))
    fields["seq_len"] = draw(st.sampled_from([1, 2, 5, 64, 512]))
    fields["dropout"] = draw(DROPOUTS)
    fields["attention_dropout"] = draw(st.none() | DROPOUTS)
    fields["embedding_dropout"] = draw(st.none() | DROPOUTS)
    fields["head"] = draw(st.sampled_from(["lm", "classes", "none"]))
    fields["family"] = draw(st.none() | st.sampled_from(FAMILIES))
    return Architecture(**fields)


SIZES = st.floats(0.01, 100.0) | st.just(1.0)


@st.composite
def schemes(draw: Any) -> Scheme:
    """Any registered scheme, with random options."""
    name = draw(st.sampled_from(sorted(SCHEMES)))
    options = {key: draw(SIZES) for key in ("gain", "qk_gain", "std", "k") if key in SCHEMES[name].__dataclass_fields__}
    if "alpha" in SCHEMES[name].__dataclass_fields__:
        options["alpha"] = draw(st.floats(0, 3))
    return scheme(name, **options)


def statistics(architecture: Architecture) -> SearchStrategy[InputStatistics]:
    """Input statistics that fit an architecture, streams of extreme variance among them."""
    unit = st.floats(0, 1)
    fraction = st.floats(0.001, 1)
    stream = st.builds(
        InputStatistics,
        kind=st.just("stream"),
        variance=st.sampled_from([0.0, 1e-200, 1e-30, 1e30, 1e100]) | st.floats(1e-3, 1e3),
        mean=st.sampled_from([0.0, 1.0, -1e3]),
        token_correlation=st.floats(-1, 1),
        target_correlation=unit,
        loss_fraction=fraction,
    )
    own = st.builds(
        InputStatistics,
        kind=st.just(architecture.input),
        variance=st.floats(0, 10),
        mean=st.floats(-3, 3),
        token_correlation=unit if architecture.input == "tokens" else st.floats(-1, 1),
        segment_correlation=unit,
        target_correlation=unit,
        loss_fraction=fraction,
    )
    return stream | own


def needs_correlation(name: str) -> bool:
    """Whether a scheme refuses input whose tokens are uncorrelated."""
    return name == "deepscalelm"


