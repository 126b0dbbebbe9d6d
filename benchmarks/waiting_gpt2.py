"""What users wait for of GPT-2 small."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.waiting import OF_MODELS, applying, comparing, looking, running, with_a_model

TITLE = "What users wait for: GPT-2 small"
ABOUT = f"GPT-2 small, 124M parameters in single precision. {OF_MODELS.strip()}"
READING = """
An `anatomy` ends passes before the head, and tries first what the layer before was proved to do. One of a checkpoint in
half precision is proved on a random model of its configuration and reads no weights. `apply` keeps no copy of a model
that it drops if it fails, and draws into the type of the checkpoint. Before 28 November's last changes, in turns on a
busy machine: `anatomy` of GPT-2 1.38 times its floor (1.29 after), of SmolLM2 1.47 (1.36), of the Llama 4.49 (1.47; 0.9
GB in place of 7.5); `apply` of the Llama 1.75 (1.34; 3.8 GB in place of 9.9). What is left: .5 s are imports of
signalprop, typer and pydantic, and for `check` of the Llama mean, standard deviation and kurtosis of 1.2 billion
weights in float64, which take 2.1 s on one thread, where adding them up in bfloat16 takes .2 s.
"""
CONFIG: dict[str, object] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def measured() -> Iterator[str]:
    """The section of the page."""
    return with_a_model(CONFIG, looking, applying, running, comparing)
