"""Small models of Hugging Face families that the benchmarks and some tests look at."""

from __future__ import annotations

from typing import Any


def hugging_face(
    family: str,
    n_layers: int,
    *,
    width: int = 256,
    heads: int = 4,
    vocab_size: int = 1000,
    tokens: int = 128,
    dropout: float = 0.0,
    **changes: Any,
) -> Any:
    """A model of a family with transformers' own weights. Half of T5's layers are in its encoder.

    Args:
        changes: further keys of the family's configuration.
    """
    import transformers as t

    t.logging.set_verbosity_error()
    wide = {"hidden_size": width, "num_hidden_layers": n_layers, "num_attention_heads": heads}
    text = {"vocab_size": vocab_size, "max_position_embeddings": tokens}
    four = {"intermediate_size": 4 * width}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "bert": (t.BertForMaskedLM, t.BertConfig, {**text, **wide, **four, **drop}),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, {
            "vocab_size": vocab_size, "n_positions": tokens, "n_embd": width, "n_layer": n_layers, "n_head": heads,
            "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout, "bos_token_id": 1,
            "eos_token_id": 2}),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, {**text, **wide, "intermediate_size": round(8 * width / 3)}),
        "vit": (t.ViTForImageClassification, t.ViTConfig, {
            **wide, **four, **drop, "image_size": 24, "patch_size": 3, "num_channels": 1, "num_labels": 10}),
        "t5": (t.T5ForConditionalGeneration, t.T5Config, {
            "vocab_size": vocab_size, "d_model": width, "d_kv": width // heads, "d_ff": 4 * width,
            "num_layers": n_layers // 2, "num_heads": heads, "dropout_rate": dropout, "n_positions": tokens}),
    }  # fmt: skip
    model_class, config_class, options = families[family]
    return model_class(config_class(**options | changes))
