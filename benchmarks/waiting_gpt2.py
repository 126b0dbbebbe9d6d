"""What users wait for of GPT-2 small."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, looking, running, with_a_model

TITLE = "What users wait for: GPT-2 small"
ABOUT = f"GPT-2 small, 124M parameters in single precision. {OF_MODELS.strip()}"
READING = """
Where the CPU time of `anatomy` goes (8.4 s, sampled every 5 ms): 6.4 to imports, of which the floor has all but
signalprop's and pydantic's (.6), .9 to the streams (small passes, three of them for the axis of tokens, .5), .9 to
weights (a pass, and every product again in float64). `--device meta` saves none of it here: 10.2 s, with a random model
of two layers in the weights' place, beside 10.4.
"""
CONFIG: dict[str, object] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying, running)
