"""What a network costs: its parameters, exactly, and the FLOPs of training it, by ELECTRA's accounting."""

from __future__ import annotations

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.parametrization import KINDS, PLACEMENTS, STACKS, layout

# Rows of T5's table of relative position biases (relative_attention_num_buckets in transformers); one table per stack.
RELATIVE_BUCKETS = 32
# RoBERTa counts positions from 2 on, so that its table has two more rows than the model reads tokens.
_POSITION_OFFSET = {"roberta": 2}

# Operations per element, as ELECTRA counts them.
_NORM, _SOFTMAX, _ACTIVATION, _DROPOUT, _ADD, _LOSS_TARGET = 5, 5, 8, 4, 1, 2
MASKED_SHARE = 0.15625  # ELECTRA's output fraction: 80 of 512 positions carry the loss of masked language modelling


def count_parameters(architecture: Architecture) -> dict[str, int]:
    """Trainable numbers of a network by part: embeddings, attention, feed_forward, norms, head, total.

    Equals `sum(p.numel() for p in model.parameters())` of the transformers model with the architecture's head (masked
    or causal language model, image classifier, T5) exactly. A tied head counts only what it adds to the token table.
    Norms on the embeddings and before the head count as norms. Multipliers of a scheme are not counted.
    """
    a = architecture
    d, q, kv = a.d_model, a.n_heads * a.d_head, a.n_kv_heads * a.d_head
    norm = d * (2 if a.norm == "layernorm" and a.norm_bias else 1)
    rows = layout(a)

    attention = d * (q + 2 * kv) + (q + 2 * kv) * bool(a.qkv_bias) + q * d + d * a.bias
    if a.qk_norm:
        attention += 2 * a.d_head
    maps_in = 2 if a.gated else 1
    feed_forward = (maps_in + 1) * d * a.d_ff + (maps_in * a.d_ff + d) * a.bias
    n_feed_forward = int((rows.kind == KINDS.index("feed_forward")).sum())
    n_attention = len(rows.kind) - n_feed_forward
    n_stacks = 2 if a.kind == "encoder-decoder" else 1
    relative = RELATIVE_BUCKETS * a.n_heads * n_stacks if a.positions == "relative" else 0

    per_sublayer = {"pre": 1, "post": 1, "sandwich": 2, "none": 0}
    n_norms = sum(per_sublayer[PLACEMENTS[code]] for code in rows.placement)
    n_norms += n_stacks * a.has_final_norm + a.embedding_norm * n_stacks + a.head_transform

    tied = a.tied_embeddings and a.input == "tokens"
    head = (d * d + d * a.bias) * a.head_transform
    if a.head == "lm":
        head += (0 if tied else a.vocab_size * d) + a.vocab_size * a.head_transform
    elif a.head == "classes":
        head += a.n_classes * (d + 1)
    parts = {
        "embeddings": _embedding_parameters(a),
        "attention": n_attention * attention + relative,
        "feed_forward": n_feed_forward * feed_forward,
        "norms": n_norms * norm,
        "head": head,
    }
    return parts | {"total": sum(parts.values())}


def _embedding_parameters(a: Architecture) -> int:
    d = a.d_model
    count = a.vocab_size * d if a.input == "tokens" else a.patch_dim * d + d
    count += d * a.class_token + d * a.n_segments
    if a.positions == "learned":
        lengths = a.seq_len + (a.target_len or 0)  # each stack has its own table
        count += d * (lengths + _POSITION_OFFSET.get(a.family or "", 0))
    return count


def train_flops(
    architecture: Architecture, batch_size: int, steps: int, output_fraction: float | None = None
) -> dict[str, float]:
    """Floating-point operations of a training run by part: embeddings, attention, feed_forward, head, total.

    ELECTRA's accounting (Clark et al., 2020, released code), which TGS v1 Table 24 uses: a multiply-add is 2
    operations, the backward pass costs as much as the forward pass, an embedding look-up is counted as the dense
    product that it stands for (2 d V per token), softmax and norms are 5 operations per element, an activation 8,
    dropout 4. Like theirs, the norm of the attention sublayer is counted once per token, not once per feature (a
    difference below 0.1 %).

    Extended in the same spirit to what ELECTRA has not: a gate is one more product and one multiplication;
    keys and values cost their own width; a causal mask saves nothing (dense kernels compute every score);
    cross-attention projects keys and values of the encoder's tokens; rotations cost 3 per rotated feature,
    relative biases 1 per score; patches are a linear map. Biases and dropout count only where the architecture has
    them.

    Args:
        batch_size: sequences per step. steps: optimiser steps.
        output_fraction: share of positions that go through the head; default 0.15625 for encoders with a
            language-model head, one position for a class head, else 1.

    Raises:
        InputError: batch_size or steps below 1, output_fraction outside (0, 1].
    """
    a = architecture
    if batch_size < 1 or steps < 1:
        raise InputError(f"batch_size is {batch_size} and steps is {steps}; both must be at least 1")
    if output_fraction is not None and not 0 < output_fraction <= 1:
        raise InputError(f"output_fraction is {output_fraction}; expected a number in (0, 1]")
    parts = {"embeddings": 0.0, "attention": 0.0, "feed_forward": 0.0}
    target = a.target_len or a.seq_len
    rows = layout(a)
    for kind, stack, placement in zip(rows.kind, rows.stack, rows.placement, strict=True):
        in_decoder = a.kind == "encoder-decoder" and STACKS[stack] == "decoder"
        queries = target if in_decoder else a.seq_len
        n_norms = {"pre": 1, "post": 1, "sandwich": 2, "none": 0}[PLACEMENTS[placement]]
        if KINDS[kind] == "feed_forward":
            parts["feed_forward"] += queries * _feed_forward_flops(a, n_norms)
        else:
            keys = a.seq_len if KINDS[kind] == "cross_attention" else queries
            parts["attention"] += _attention_flops(a, queries, keys, n_norms)
    lengths = [a.seq_len] + ([target] if a.kind == "encoder-decoder" else [])
    parts["embeddings"] = float(sum(length * _embedding_flops(a, length) for length in lengths))
    parts["head"] = _head_positions(a, lengths[-1], output_fraction) * _head_flops(a)
    parts["total"] = sum(parts.values())
    forward_and_backward = 2
    return {name: forward_and_backward * batch_size * steps * count for name, count in parts.items()}


def _attention_flops(a: Architecture, queries: int, keys: int, n_norms: int) -> float:
    d, q, kv, heads = a.d_model, a.n_heads * a.d_head, a.n_kv_heads * a.d_head, a.n_heads
    per_query: float = 2 * d * q + q * bool(a.qkv_bias)  # query
    per_query += 2 * q * d + d * a.bias + _ADD * d + _NORM * n_norms  # output, residual addition, norm
    per_query += _DROPOUT * d * (a.dropout > 0)
    per_key: float = 2 * (2 * d * kv + kv * bool(a.qkv_bias))
    per_score = 2 * q + 2 * q + heads * (1 + _SOFTMAX + _DROPOUT * ((a.attention_dropout or 0) > 0))
    per_score += heads * (a.positions == "relative")
    if a.positions == "rotary":
        per_query += 3 * q * a.rotary_fraction
        per_key += 3 * kv * a.rotary_fraction
    if a.qk_norm:
        per_query += _NORM * q
        per_key += _NORM * kv
    return float(queries * per_query + keys * per_key + queries * keys * per_score)


def _feed_forward_flops(a: Architecture, n_norms: int) -> float:
    d, hidden, maps_in = a.d_model, a.d_ff, 2 if a.gated else 1
    count = maps_in * (2 * d * hidden + hidden * a.bias) + _ACTIVATION * hidden + hidden * a.gated
    count += 2 * hidden * d + d * a.bias + _ADD * d + _NORM * d * n_norms
    return float(count + _DROPOUT * d * (a.dropout > 0))


def _embedding_flops(a: Architecture, length: int) -> float:
    d = a.d_model
    count = 2 * d * (a.vocab_size if a.input == "tokens" else a.patch_dim)
    count += 2 * d * ((length if a.positions == "learned" else 0) + a.n_segments)
    count += _ADD * d * (a.n_embedding_tables - 1) + _NORM * d * a.embedding_norm
    return float(count + _DROPOUT * d * ((a.embedding_dropout or 0) > 0))


def _head_positions(a: Architecture, length: int, output_fraction: float | None) -> float:
    if output_fraction is not None:
        return output_fraction * length
    if a.head == "classes":
        return 1.0
    return (MASKED_SHARE if a.kind == "encoder" else 1.0) * length


def _head_flops(a: Architecture) -> float:
    d = a.d_model
    if a.head == "none":
        return 0.0
    outputs = a.vocab_size if a.head == "lm" else a.n_classes
    transform = 2 * d * d + d * a.bias + _ACTIVATION * d + _NORM * d
    return float(transform * a.head_transform + 2 * d * outputs + (_SOFTMAX + _LOSS_TARGET) * outputs)
