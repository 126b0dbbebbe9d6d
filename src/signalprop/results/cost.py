"""What a network costs: its parameters, exactly, and the FLOPs of training it, by ELECTRA's accounting."""

from __future__ import annotations

from typing import Any, Protocol

from signalprop.errors import InputError
from signalprop.families import find
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import Kind, kind_of, kinds_in
from signalprop.network.layer_inputs import changed
from signalprop.network.layout import STACKS
from signalprop.network.operations import ACTIVATION, ADD, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import PLACEMENTS, Parametrization, layout
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE, NORM_ON_BRANCH
from signalprop.results.text import text_table

# Rows of a table of relative position biases (relative_attention_num_buckets in transformers); one table per stack.
RELATIVE_BUCKETS = 32
_LOSS_TARGET = 2  # operations per output and position
MASKED_SHARE = 0.15625  # ELECTRA's output fraction: 80 of 512 positions carry the loss of masked language modelling


class Cost(Protocol):
    """What a kind's `cost.py` says; `beside` may be left out where it is 0."""

    def beside(self, a: Architecture) -> int:
        """Trainable numbers of one sublayer beside its maps, norms on the stream apart."""

    def flops(self, a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
        """Operations of one forward pass through sublayer i for one sequence, beside its maps and the addition.

        Args:
            p: the table, where multipliers count; None: an architecture alone. queries: tokens of its stream.
        """


def count_parameters(network: Architecture | Parametrization) -> dict[str, int]:
    """Trainable numbers of a network by part: embeddings, attention, feed_forward, norms, head, total.

    Equals `sum(p.numel() for p in model.parameters())` of the transformers model with the architecture's head (masked
    or causal language model, image classifier, T5) exactly. A tied head counts only what it adds to the token table.
    Norms on the embeddings and before the head count as norms. With several streams what reads, writes and mixes them
    is the part `streams`. For a Parametrization there is one part more,
    `multipliers`: what its scheme makes trainable (skips, branch multipliers, value skips and attention gains).
    """
    p, a = (network, network.architecture) if isinstance(network, Parametrization) else (None, network)
    d = a.d_model
    norm = d * (2 if (a.norm == "layernorm" or a.squash) and a.norm_bias else 1) + bool(a.squash)
    rows = layout(a)
    family = find(a.family)

    parts = {"embeddings": _embedding_parameters(a), "attention": 0, "feed_forward": 0}
    for kind in kinds_in(rows):
        part = kind.counted or kind.name
        cost = kind.part("cost")
        one = kind.numbers(a) + (cost.beside(a) if hasattr(cost, "beside") else 0)
        parts[part] = parts.get(part, 0) + int(kind.of(rows).sum()) * one
    n_stacks = 2 if a.kind == "encoder-decoder" else 1
    biased = a.positions == "relative" or (family is not None and family.score_bias)
    parts["attention"] += RELATIVE_BUCKETS * a.n_heads * n_stacks * biased

    n_norms = sum(n_norms_of(PLACEMENTS[code]) for code in rows.placement)
    n_norms -= int(rows.parallel.sum()) * a.shared_norm
    n_norms += n_stacks * a.has_final_norm + a.embedding_norm * n_stacks + a.head_transform

    tied = a.tied_embeddings and a.has_token_table
    head = (d * d + d * a.bias) * a.head_transform
    if a.head == "lm":
        head += (0 if tied else a.vocab_size * d) + a.vocab_size * (a.head_transform or a.has_head_bias)
    elif a.head == "classes":
        head += a.n_classes * (d + 1)
    parts |= {"norms": n_norms * norm, "head": head}
    if a.streams is not None:
        parts["streams"] = len(rows.kind) * a.streams.parameters(d)
    if a.layer_inputs is not None:
        parts["streams"] = sum(map(len, changed(a.layer_inputs).values()))
    if p is not None:
        parts["multipliers"] = _trainable_multipliers(p)
    return parts | {"total": sum(parts.values())}


def active_parameters(architecture: Architecture) -> int:
    """Trainable numbers that one token passes: all but those of the experts that it has not chosen."""
    rows = layout(architecture)
    idle = sum(
        int(kind.of(rows).sum()) * (kind.numbers(architecture) - kind.numbers(architecture, per_token=True))
        for kind in kinds_in(rows)
    )
    return count_parameters(architecture)["total"] - int(idle)


def n_norms_of(placement: str) -> int:
    """How many norms a placement gives a sublayer."""
    return sum(placement in where for where in (NORM_BEFORE, NORM_ON_BRANCH, NORM_AFTER))


def _trainable_multipliers(p: Parametrization) -> int:
    sizes = {"fixed": 0, "scalar": 1, "channel": p.architecture.d_model}
    count = p.n_sublayers * sizes[p.branch_trainable]
    count += int((~p.parallel).sum()) * sizes[p.skip_trainable]  # a parallel layer has one skip
    if p.attention_trainable:  # a query of cross-attention has no value
        kinds = [kind_of(p, i) for i in range(p.n_sublayers)]
        count += sum(2 if kind.attends_itself else 1 for kind in kinds if kind.attends)
    return count


def _embedding_parameters(a: Architecture) -> int:
    d = a.d_model
    count = a.vocab_size * d if a.has_token_table else 0
    if a.input == "patches":
        count += a.patch_dim * d + d
    elif a.input == "frames":
        count += sum(outputs * (inputs * kernel + 1) for inputs, outputs, kernel in _convolutions(a))
    count += d * a.n_class_tokens + d * a.n_segments
    two = a.kind == "encoder-decoder"
    lengths = [(a.positions, a.seq_len)] + ([(a.positions_of(decoder=True), a.target_len or a.seq_len)] if two else [])
    family = find(a.family)
    offset = 0 if family is None else family.position_offset
    for positions, length in lengths:  # each stack has a table
        if positions == "learned":
            count += d * (length + offset)
    return count


def _convolutions(a: Architecture) -> list[tuple[int, int, int]]:
    """(inputs, outputs, kernel) of the convolutions that read frames."""
    return [a.convolution(i) for i in range(len(a.conv_kernels))]


def train_flops(
    network: Architecture | Parametrization, batch_size: int, steps: int, output_fraction: float | None = None
) -> dict[str, float]:
    """Floating-point operations of a training run by part: embeddings, attention, feed_forward, head, total.

    ELECTRA's accounting (Clark et al., 2020, released code), which TGS v1 Table 24 uses: a multiply-add is 2
    operations, the backward pass costs as much as the forward pass, an embedding look-up is counted as the dense
    product that it stands for (2 d V per token), softmax and norms are 5 operations per element, an activation 8,
    dropout 4. Like theirs, the norm of the attention sublayer is counted once per token, not once per feature (a
    difference below 0.1 %).

    Extended in the same spirit to what ELECTRA has not: a gate is one more product and one multiplication;
    keys and values cost their width; a causal mask saves nothing (dense kernels compute every score);
    cross-attention projects keys and values of the encoder's tokens; rotations cost 3 per rotated feature,
    relative biases 1 per score; patches are a linear map, frames pass convolutions. Biases and dropout count only
    where the architecture has them. Of a Parametrization also counts what cannot be folded into weights: a trainable
    multiplier is one product per feature, a value skip two products and a sum per feature of the heads; attention with
    a fixed gain of 0 is not computed, nor are its queries and keys.

    Args:
        batch_size: sequences per step. steps: optimiser steps.
        output_fraction: share of positions that go through the head; default 0.15625 for encoders with a
            language-model head, one position for a class head, else 1.
    """
    p, a = (network, network.architecture) if isinstance(network, Parametrization) else (None, network)
    if p is not None and p.skip.ndim != 1:
        raise InputError(f"this parametrization is a sweep of shape {p.skip.shape[:-1]}; give one of its members")
    if batch_size < 1 or steps < 1:
        raise InputError(f"batch_size is {batch_size} and steps is {steps}; both must be at least 1")
    if output_fraction is not None and not 0 < output_fraction <= 1:
        raise InputError(f"output_fraction is {output_fraction}; expected a number in (0, 1]")
    parts = {"embeddings": 0.0, "attention": 0.0, "feed_forward": 0.0}
    target = a.target_len or a.seq_len
    rows = layout(a)
    for i, (stack, placement) in enumerate(zip(rows.stack, rows.placement, strict=True)):
        in_decoder = a.kind == "encoder-decoder" and STACKS[stack] == "decoder"
        queries = target if in_decoder else a.seq_len
        kind = kind_of(rows, i)
        part = kind.counted or kind.name
        norms = NORM * n_norms_of(PLACEMENTS[placement]) * (1 if kind.attends else a.d_model)
        count = kind.part("cost").flops(a, p, i, queries) + queries * (_map_flops(a, kind) + norms)
        parts[part] = parts.get(part, 0.0) + count
        if a.streams is not None:
            parts["streams"] = parts.get("streams", 0.0) + queries * a.streams.operations(a.d_model)
        if p is not None:
            learned = (p.branch_trainable != "fixed") + (p.skip_trainable != "fixed" and not p.parallel[i])
            parts[part] += queries * a.d_model * learned
    if a.layer_inputs is not None:
        parts["streams"] = 2.0 * a.seq_len * a.d_model * sum(map(len, changed(a.layer_inputs).values()))
    lengths = [a.seq_len] + ([target] if a.kind == "encoder-decoder" else [])
    parts["embeddings"] = float(sum(n * _embedding_flops(a, n, decoder=bool(i)) for i, n in enumerate(lengths)))
    parts["head"] = _head_positions(a, lengths[-1], output_fraction) * _head_flops(a)
    parts["total"] = sum(parts.values())
    forward_and_backward = 2
    return {name: forward_and_backward * batch_size * steps * count for name, count in parts.items()}


def _map_flops(a: Architecture, kind: Kind) -> int:
    """Of one token: the maps that it passes, and the addition to the stream, with dropout."""
    count = (ADD + DROPOUT * (a.dropout > 0)) * a.d_model
    for role in kind.roles:
        if role.exists(a):
            inputs, outputs = role.fan(a)
            count += role.held(a)[1] * (2 * inputs * outputs + outputs * role.biased(a))
    return count


def _embedding_flops(a: Architecture, length: int, *, decoder: bool = False) -> float:
    d = a.d_model
    if a.input == "frames" and not decoder:
        count, stride = 0.0, 1
        for (inputs, outputs, kernel), step in zip(reversed(_convolutions(a)), reversed(a.conv_strides), strict=True):
            count += stride * outputs * (2 * inputs * kernel + 1 + ACTIVATION)  # positions per token of the stream
            stride *= step
    else:
        count = 2 * d * (a.patch_dim if a.input == "patches" else a.vocab_size)
    learned = a.positions_of(decoder=decoder) == "learned"
    count += 2 * d * ((length if learned else 0) + a.n_segments)
    count += ADD * d * (a.n_embedding_tables - 1) + NORM * d * a.embedding_norm
    return float(count + DROPOUT * d * ((a.embedding_dropout or 0) > 0))


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
    transform = 2 * d * d + d * a.bias + ACTIVATION * d + NORM * d
    return float(transform * a.head_transform + 2 * d * outputs + (SOFTMAX + _LOSS_TARGET) * outputs)


COST_SCHEMA = "signalprop/cost/1"


def step_cost(a: Architecture, batch_size: int) -> dict[str, Any]:
    """Parameters, exactly, and FLOPs of one training step of so many sequences, by part; JSON-ready."""
    return {
        "schema": COST_SCHEMA, "architecture": a.model_dump(mode="json", exclude_defaults=True),
        "parameters": count_parameters(a), "active_parameters": active_parameters(a),
        "train_flops": train_flops(a, batch_size, 1), "batch_size": batch_size,
    }  # fmt: skip


def cost_table(cost: dict[str, Any]) -> str:
    """What `step_cost` gives, as a table."""
    parameters, flops = cost["parameters"], cost["train_flops"]
    rows = [[part, f"{count:,}", f"{flops[part]:.3e}" if part in flops else "-"] for part, count in parameters.items()]
    if cost["active_parameters"] < parameters["total"]:
        rows.append(["of which a token passes", f"{cost['active_parameters']:,}", "-"])
    return text_table(["part", "parameters", f"FLOPs of a step of {cost['batch_size']} sequences"], rows)
