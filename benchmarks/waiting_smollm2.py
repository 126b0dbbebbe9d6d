"""What users wait for of SmolLM2-135M's shape."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, diagnosing, looking, with_a_model

TITLE = "What users wait for: SmolLM2-135M's shape"
ABOUT = f"SmolLM2-135M's shape, in single precision. {OF_MODELS.strip()}"
CONFIG: dict[str, object] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying, diagnosing)
