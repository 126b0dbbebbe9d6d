"""A GGUF file of a tiny model, for the tests that read one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor


def write_gguf(path: Path, llama: Any, bpe: Any) -> None:
    """A model of transformers as llama.cpp would keep it: pairs of rotary features side by side."""
    gguf = pytest.importorskip("gguf")
    c = llama.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(c.vocab_size)
    described = json.loads(bpe.to_str())["model"]
    vocabulary = sorted(described["vocab"], key=described["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in described["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)

    def rotated(weight: Tensor, heads: int) -> Tensor:
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    tensors = {
        "token_embd": llama.model.embed_tokens.weight, "output_norm": llama.model.norm.weight,
        "output": llama.lm_head.weight,
    }  # fmt: skip
    for i, layer in enumerate(llama.model.layers):
        for theirs, ours in names.items():
            weight = layer.get_submodule(theirs).weight
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(ours)
            tensors[f"blk.{i}.{ours}"] = weight if heads is None else rotated(weight, heads)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
