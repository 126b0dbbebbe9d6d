"""What users wait for of GPT-2 small."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, looking, running, with_a_model

TITLE = "What users wait for: GPT-2 small"
ABOUT = f"GPT-2 small, 124M parameters in single precision. {OF_MODELS.strip()}"
CONFIG: dict[str, object] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying, running)
