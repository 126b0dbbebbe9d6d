"""BART, and what it shares with all that has fairseq's names.

Dropout is a function call there, which no hook sees: in training mode branches are seen before it.
"""

from signalprop.errors import InputError
from signalprop.families.base import (
    BY_HAND,
    Config,
    Family,
    Fields,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    normal,
    separate,
)


def encoder_decoder(c: Config) -> Fields:
    """Fields of an Architecture that follow from fairseq's keys; pre-norm."""
    for name in ("attention_heads", "ffn_dim"):
        if c[f"encoder_{name}"] != c[f"decoder_{name}"]:
            raise InputError(
                f"encoder_{name} is {c[f'encoder_{name}']} and decoder_{name} {c[f'decoder_{name}']}; an Architecture "
                f"has one number for both stacks; {BY_HAND}"
            )
    return {
        "kind": "encoder-decoder", "n_layers": c["encoder_layers"], "n_decoder_layers": c["decoder_layers"],
        "d_model": c["d_model"], "n_heads": c["encoder_attention_heads"], "d_ff": c["encoder_ffn_dim"],
        "activation": activation_name(c["activation_function"]), "norm_placement": "pre", "norm_eps": 1e-5,
        "vocab_size": c["vocab_size"], "dropout": c["dropout"], "attention_dropout": c["attention_dropout"],
        "bias": True, "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def fields(c: Config) -> Fields:
    if c["scale_embedding"]:
        raise InputError(
            f"BART with scale_embedding multiplies tokens and not positions, which an Architecture cannot say; "
            f"{BY_HAND}"
        )
    return encoder_decoder(c) | {
        "norm_placement": "post", "final_norm": False, "positions": "learned", "embedding_norm": True,
        "seq_len": c["max_position_embeddings"], "target_len": c["max_position_embeddings"],
    }  # fmt: skip


def _attention(norm: str, place: str) -> SublayerPaths:
    weights = separate(f"{place}.", "q_proj k_proj v_proj", f"{place}.out_proj")
    return SublayerPaths(norm, place, weights, scaling=f"{place}.scaling", dropout="dropout")


def stack(name: str, *, final_norm: bool, cross: bool = False) -> StackPaths:
    """The stack of that name, with cross-attention or not."""
    sublayers = [_attention("self_attn_layer_norm", "self_attn")]
    if cross:
        sublayers.append(_attention("encoder_attn_layer_norm", "encoder_attn"))
    names = {"up": "fc1", "down": "fc2"}
    sublayers.append(SublayerPaths("final_layer_norm", "fc2", names, dropout="dropout", activation="activation_fn"))
    return StackPaths(f"{name}.layers", tuple(sublayers), f"{name}.layer_norm" if final_norm else None)


PATHS = ModelPaths(
    stacks=(stack("encoder", final_norm=False), stack("decoder", final_norm=False, cross=True)),
    token="shared",
    position="encoder.embed_positions",
    embedding_norm="encoder.layernorm_embedding",
    decoder_position="decoder.embed_positions",
    decoder_norm="decoder.layernorm_embedding",
    classifiers=("classification_head.out_proj",),
    inputs={"tokens": "input_ids", "keep": "attention_mask", "decoder_tokens": "decoder_input_ids"},
)
FAMILY = Family(
    model_type="bart",
    defaults={
        "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "activation_function": "gelu",
        "max_position_embeddings": 1024, "dropout": 0.1, "attention_dropout": 0.0, "scale_embedding": False,
        "tie_word_embeddings": True,
    },
    fields=fields,
    paths=(PATHS,),
    initialisation=normal(setting="init_std"),
    position_offset=2,
)  # fmt: skip
