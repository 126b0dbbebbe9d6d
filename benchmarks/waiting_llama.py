"""What users wait for of a Llama of 1.2B."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, looking, with_a_model

TITLE = "What users wait for: a Llama of 1.2B"
ABOUT = f"A Llama of 1.2B parameters in bfloat16. {OF_MODELS.strip()}"
CONFIG: dict[str, object] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "tie_word_embeddings": True, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying)
