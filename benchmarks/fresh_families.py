"""Predicted against measured signals of models that transformers initialises: writes records/fresh-families.md.

    python -m benchmarks.fresh_families                                  # only predict anew and write the page
    python -m benchmarks.fresh_families --minutes 60 [--layers 12,32] [NAME ...]
    python -m benchmarks.fresh_families --minutes 60 --again NAME ...    # measured anew, as after new transformers

A prediction reads the configuration alone (scheme `huggingface`); the models are built by transformers, which draws
their weights by its own `_init_weights`. What was measured is kept in records/fresh-families.json, family by family.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import signalprop as sp
from benchmarks.accuracy_rows import Errors, errors_of
from benchmarks.measured import Measured, read_store, standard_errors, write_store
from benchmarks.small_models import model_classes
from benchmarks.timing import compact
from signalprop.data.batches import Batch, default_batch
from signalprop.errors import InputError
from signalprop.families import find, names
from signalprop.files.storage import write_text
from signalprop.results.profile import Profile

STORE, PAGE = Path("records/fresh-families.json"), Path("records/fresh-families.md")
LAYERS, DEEP, WIDTH, TOKENS, VOCABULARY = 12, 32, 256, 128, 2000
# how many are averaged, by their layers; more where the standard error of fewer is above half of a bound, and most
# where a prediction is beyond one: families of one shape have the same seeds' draws, and so their chance
MODELS = {LAYERS: (32, 128, 512), DEEP: (16,)}
IN_DEPTH = (
    "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe", "gemma2", "lfm2", "modernbert", "qwen3_next",
    "falcon_h1", "mamba2", "olmo2", "gemma4_text", "deepseek_v4",
)  # fmt: skip
WINDOW = TOKENS // 4  # of layers that have one
OWN = {
    "mamba2": {"num_heads": 2 * WIDTH // 64},  # of twice the width
    "bamba": {"mamba_n_heads": 2 * WIDTH // 64, "mamba_d_state": 64, "attn_layer_indices": [5, 11]},
    "granitemoehybrid": {
        "mamba_n_heads": 2 * WIDTH // 64,
        "mamba_d_state": 64,
        "shared_intermediate_size": WIDTH,
        "intermediate_size": WIDTH,
        "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 5 + ["attention"],
    },
    "gemma4_text": {  # as the released dense model: keys of the layers that see all tokens are their values
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * (LAYERS // 3)},
    "granitemoeshared": {"shared_intermediate_size": WIDTH, "intermediate_size": WIDTH},
    "nemotron_h": {
        "mamba_num_heads": 2 * WIDTH // 64,
        "ssm_state_size": 64,
        "moe_shared_expert_intermediate_size": WIDTH,
        "layers_block_type": ["mamba", "mlp", "mamba", "moe", "attention", "mlp"] * (LAYERS // 6),
    },
    "deepseek_v4": {
        "q_lora_rank": WIDTH // 2,
        "o_groups": 2,
        "o_lora_rank": WIDTH // 2,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    },
    "falcon_h1": {  # a factor on every map that has one
        "mamba_n_heads": 8,
        "mamba_d_ssm": 2 * WIDTH,
        "mamba_d_state": 64,
        "embedding_multiplier": 5.7,
        "lm_head_multiplier": 0.02,
        "key_multiplier": 0.4,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.24,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
        "mlp_multipliers": [0.9, 0.4],
    },
}
SIZES = (
    ("hidden_size d_model n_embd", WIDTH),
    ("num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads", 4),
    ("num_key_value_heads", 2),
    ("head_dim d_kv query_pre_attn_scalar", 64),
    ("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size word_embed_proj_dim", 3 * WIDTH),
    ("max_position_embeddings n_positions", TOKENS + 2),
    ("vocab_size", VOCABULARY),
    ("sliding_window local_attention", WINDOW),
    ("use_sliding_window", True),
    ("num_experts num_local_experts n_routed_experts", 16),
    ("kv_lora_rank q_lora_rank", WIDTH // 2),
    ("moe_intermediate_size", WIDTH),
    ("n_shared_experts first_k_dense_replace", 1),
    ("shared_expert_intermediate_size", 2 * WIDTH),
    ("state_size linear_key_head_dim linear_value_head_dim", 64),
    ("linear_num_key_heads", 4),
    ("linear_num_value_heads", 8),
    ("n_groups", 1),
    ("embedding_multiplier", 12.0),  # this and the next three: of Granite 3
    ("residual_multiplier", 0.22),
    ("attention_multiplier", 1 / 64),
    ("logits_scaling", 8.0),
)
DEPTHS = "num_hidden_layers n_layer encoder_layers decoder_layers num_layers num_decoder_layers"
# the columns: quantity, heading, largest median error
BOUNDS = (
    ("forward variance", "stream variance", 0.05),
    ("token correlation", "token correlation", 0.03),
    ("gradient variance", "gradient variance", 0.10),
)


@dataclass(frozen=True, order=True)
class Cell:
    """Fresh models of one family."""

    n_layers: int
    family: str


def configuration(family: str, layers: int = LAYERS) -> Any:
    """transformers' configuration of a family, small and without dropout."""
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(family)
    by_depth = ((DEPTHS, layers), ("max_window_layers", layers // 2), ("full_attn_idxs", [*range(2, layers, 3)]))
    values: dict[str, Any] = {
        name: value for listed, value in (*SIZES, *by_depth) for name in listed.split() if name in vars(config)
    }
    if "word_embed_proj_dim" in values:
        values["word_embed_proj_dim"] = WIDTH
    if "kv_lora_rank" in values:  # every head has keys of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= {name: 0.0 for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    values |= {"num_experts_per_tok": 4} if getattr(config, "num_experts_per_tok", 0) is None else {}
    small = {
        name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if hasattr(config, name)
    }
    values |= OWN.get(family, {})
    made: Any = type(config)
    return made(**values, **small, decoder_start_token_id=2)


def without_padding(batch: Batch) -> Batch:
    """The batch with its word 0, the most frequent, renamed: the padding id's row, 0, is zero in transformers."""
    renamed = {}
    for name in ("tokens", "targets", "decoder_tokens"):
        ids = getattr(batch, name)
        if ids is not None:
            assert ids.max() < VOCABULARY - 1
            renamed[name] = np.where(ids == 0, VOCABULARY - 1, ids)
    return replace(batch, **renamed)


def prepared(cell: Cell) -> tuple[Any, Any, Batch, Profile]:
    """Class and configuration of the models, what they read, and what is predicted of them.

    Raises:
        InputError: the prediction is refused.
    """
    config = configuration(cell.family, cell.n_layers)
    model_class = model_classes(cell.family, config)[0]
    with torch.device("meta"):
        architecture = sp.Architecture.from_hf(model_class(config)).replace(seq_len=TOKENS)
    if architecture.kind == "encoder-decoder":
        architecture = architecture.replace(target_len=TOKENS)
    batch = without_padding(default_batch(architecture, batch_size=2))
    predicted = sp.predict(sp.scheme("huggingface")(architecture), batch.statistics(architecture))
    return model_class, config, batch, predicted


def measure(cell: Cell) -> Measured:
    """Means over models of one family, of more where their standard errors are large or an error is beyond a bound."""
    began = time.process_time()
    model_class, config, batch, predicted = prepared(cell)
    profiles: list[Profile] = []
    for models in MODELS[cell.n_layers]:
        for seed in range(len(profiles), models):
            torch.manual_seed(seed)
            profiles.append(sp.measure(model_class(config).eval(), batch))
        found = Measured.of(sp.average(profiles), time.process_time() - began)
        errors, uncertain = errors_of(predicted, found), standard_errors(found)
        tells = models > MODELS[cell.n_layers][0] or all(uncertain.get(name, 0.0) <= x / 2 for name, _, x in BOUNDS)
        if tells and all(name not in errors or errors[name].median <= bound for name, _, bound in BOUNDS):
            break
    return found


def _cell_text(e: Errors) -> str:
    z = "–" if e.z_of_seeds is None else f"{e.z_of_seeds:.1f}*" if e.z is None else f"{e.z:.1f}"
    return f"{100 * e.median:.1f} ({100 * e.signed:+.1f}; {z})"


def table(store: dict[Cell, Measured], layers: int) -> tuple[str, int, int]:
    """A table, how many families are within the bounds, and of how many."""
    rows, within = [], 0
    for cell, found in sorted(store.items()):
        if cell.n_layers != layers:
            continue
        try:
            predicted = prepared(cell)[3]
        except InputError as refusal:
            rows.append([cell.family, *"–––", str(refusal)])
            continue
        errors, over = errors_of(predicted, found), []
        for name, heading, bound in BOUNDS:
            e = errors.get(name)
            if e is not None and e.median > bound:
                scatter = (e.z or 2) < 2 or e.median < 2 * e.se
                over.append(heading + " (as far as seeds scatter)" * scatter)
        many = f"{found.networks} models" if found.networks > MODELS[layers][0] else ""
        remark = "; ".join(filter(None, (many, f"beyond: {', '.join(over)}" if over else "")))
        cells = (_cell_text(errors[n]) if n in errors else "–" for n, _, _ in BOUNDS)
        rows.append([cell.family, *cells, remark])
        within += not over
    return compact(["family", *(heading for _, heading, _ in BOUNDS), ""], rows), within, len(rows)


def page(store: dict[Cell, Measured]) -> str:
    """The page; predictions are made anew."""
    (rows, within, n), (deep, within_deep, n_deep) = table(store, LAYERS), table(store, DEEP)
    return "\n".join([
        "# Fresh models of transformers", "",
        "Written by `python -m benchmarks.fresh_families`: do not edit. What was measured is stored in",
        "`records/fresh-families.json`; predictions are made anew.", "",
        f"Predictions from a configuration alone (scheme `huggingface`) against {MODELS[LAYERS][0]} models that",
        f"transformers built and initialised: {LAYERS} layers (of each stack), width {WIDTH},",
        f"{TOKENS} tokens of real text, two sequences, no dropout; layers with a window see {WINDOW}.",
        f"Where their standard error is above half of a bound, {MODELS[LAYERS][1]} are measured; where an error is",
        f"beyond one, {MODELS[LAYERS][2]}: families of one shape share what is drawn by a seed, and so their chance.",
        "No token has the padding id, whose row many families set to zero.",
        "Median error over the sublayers in percent (signed",
        "mean; z, the root mean square of the differences over the predicted scatter of the mean; with a star, where",
        "that is not derived, over its standard errors, which are themselves of so many seeds).",
        "Token correlations: difference over max(|r|, 0.1).",
        "Variances: logarithms. What is beyond 5 % (stream variance), 3 % (token correlation) or 10 % (gradient) is",
        f"named: {within} of {n} families are within all three; as far as seeds scatter: z is below 2, or the",
        "error is below two standard errors of the average over seeds.", "",
        rows, "",
        f"## {DEEP} layers", "",
        f"The same with {DEEP} layers, {MODELS[DEEP][0]} models: {within_deep} of {n_deep} within all three.", "",
        deep, "",
    ])  # fmt: skip


def wanted(layers: str, families: list[str]) -> Iterator[Cell]:
    """The cells to be measured: of named families, or of all that read and write text (some of them in depth)."""
    text = [name for name in names() if (found := find(name)) and not found.hears and found.head == "lm"]
    for depth in map(int, layers.split(",")):
        yield from (Cell(depth, family) for family in families or (IN_DEPTH if depth == DEEP else text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--minutes", type=float, default=0.0, help="time to measure families that are not stored")
    parser.add_argument("--layers", default=f"{LAYERS},{DEEP}")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")
    given = parser.parse_args()
    store, end = read_store(STORE, Cell), time.monotonic() + 60 * given.minutes
    for cell in wanted(given.layers, given.families):
        if time.monotonic() > end:
            break
        if given.again or cell not in store:
            try:
                store[cell] = measure(cell)
            except InputError as refusal:
                print(cell, f"refused: {refusal}", flush=True)
                continue
            write_store(STORE, "signalprop/fresh-families/1", dict(sorted(store.items())))
            print(cell, f"{store[cell].networks} models, {store[cell].seconds:.0f} s", flush=True)
    write_text(PAGE, page(store))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
