"""What users wait for of GPT-2 small."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, comparing, looking, running, with_a_model

TITLE = "What users wait for: GPT-2 small"
ABOUT = f"GPT-2 small, 124M parameters in single precision. {OF_MODELS.strip()}"
READING = """
Since that row `anatomy` ends passes before the head, tries first what the layer before was proved to do, and tests
maps in the type of their weights; a checkpoint in half precision is proved on a random model of its configuration,
and no weights are read; `apply` keeps no copy of a model that it drops if it fails, and draws into the type of the
checkpoint. On a busy machine, in turns with the code of the row: `anatomy` of GPT-2 1.29 times its floor (1.38), of
SmolLM2 1.36 (1.47), of the Llama 1.47 (4.49; 0.9 GB in place of 7.5); `apply` of the Llama 1.34 (1.75; 3.8 GB in
place of 9.9). Of SmolLM2's remaining 2.1 s .5 are imports of signalprop, typer and pydantic. `check` of the Llama
took 1.56 (1.62): mean, standard deviation and kurtosis of 1.2 billion weights in float64 take 2.1 s on one thread,
adding them up in bfloat16 .2 s.
"""
CONFIG: dict[str, object] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying, running, comparing)
