"""Step time of the built model over the Hugging Face one of the same shape and weights, beside Hugging Face twice.

    python -m benchmarks.built [--rounds N]

12 layers, width 256, 4 heads, 4 x 128 tokens, forward and backward, one thread; CPU time, paired and interleaved, so
that a busy machine slows all three alike. The ratio is a median over rounds with its standard error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import signalprop as sp

WIDTH, LAYERS, HEADS, TOKENS, BATCH, VOCABULARY = 256, 12, 4, 128, 4, 1000


def hugging_face(family: str) -> Any:
    """A model of the family without dropout, with scaled_dot_product_attention."""
    import transformers as t

    t.logging.set_verbosity_error()
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}  # fmt: skip
    makers = {
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(
            **text, intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**text, intermediate_size=683)),
    }  # fmt: skip
    return makers[family]()


def step(model: Any, name: str, ids: torch.Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        logits = model(**{name: ids}).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        model.zero_grad()

    return run


def ratios(steps: list[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """(median, standard error) of the CPU time of every step over that of the first."""
    times = np.zeros((rounds, len(steps)))
    for run in steps:
        run()
    for i in range(rounds):
        for j in np.random.default_rng(i).permutation(len(steps)):
            began = time.process_time()
            steps[j]()
            times[i, j] = time.process_time() - began
    relative = times / times[:, :1]
    spread = 1.2533 * relative.std(0, ddof=1) / rounds**0.5  # of a median
    return list(zip(np.median(relative, 0).tolist(), spread.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    for family in ("bert", "gpt2", "llama"):
        first, second = hugging_face(family), hugging_face(family)
        architecture = sp.Architecture.from_hf(first)
        built = sp.build(sp.scheme("huggingface")(architecture), seed=0)
        steps = [step(first, "input_ids", ids), step(second, "input_ids", ids), step(built, "inputs", ids)]
        _, control, ratio = ratios(steps, rounds)
        print(
            f"{family:6} built / Hugging Face {ratio[0]:.3f} +- {ratio[1]:.3f}   "
            f"Hugging Face / Hugging Face {control[0]:.3f} +- {control[1]:.3f}"
        )


if __name__ == "__main__":
    main()
