"""What is not a layer: tensors that are not finite, the token table, the final norm, the head, and the logits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import Held
from signalprop.data.batches import Batch
from signalprop.diagnosis.bounds import LARGE_ROW, OUTLYING_ROW, REPAIRED
from signalprop.diagnosis.layers import lean
from signalprop.diagnosis.result import number
from signalprop.diagnosis.whole_model_values import BadTensor, Ends, OutlyingRow
from signalprop.hooks import Hooks, loss_and_logits
from signalprop.measurement.measuring import arguments_of
from signalprop.repair.freshness import learnt, unlike_draws
from signalprop.streams.proof import gain_and_bias

_LAYER = re.compile(r"\.(\d+)\.")


def bad_tensors(model: nn.Module) -> tuple[BadTensor, ...]:
    """Every parameter and buffer that holds NaN or infinite numbers, in the order of the model."""
    found = []
    named: list[tuple[str, str, Tensor]] = [("parameter", n, p) for n, p in model.named_parameters()]
    named += [("buffer", n, b) for n, b in model.named_buffers()]
    for kind, name, tensor in named:
        if tensor.is_meta or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor.detach())
        if kind == "buffer" and bool((tensor == -math.inf).any()) and not bool(torch.isnan(tensor).any()):
            continue  # a mask
        if bool(bad.any()):
            nan = int(torch.isnan(tensor).sum())
            layer = _LAYER.search(name)
            first = tuple(int(i) for i in torch.nonzero(bad)[0])
            found.append(
                BadTensor(
                    name=name, kind=kind, layer=int(layer[1]) if layer else None, first=first, nan=nan,
                    infinite=int(bad.sum()) - nan, n=tensor.numel(),
                )
            )  # fmt: skip
    return tuple(found)


def ends_of(attached: Anatomy, batch: Batch, text: Sequence[Batch] = ()) -> Ends | None:
    """The ends of a language model on a short text, and what its weights show; None for other models.

    Args:
        text: of which the frequencies of words are counted; default: the short one.
    """
    model, mapping, ends = attached.model, attached.mapping, attached.ends
    a = mapping.architecture
    if a.head != "lm" or mapping.arguments is None:
        return None
    arguments = arguments_of(attached, batch)
    seen: dict[str, Tensor | None] = {}
    norm = ends.final_norm
    hooks = Hooks()
    if norm is not None:
        hooks.reads(norm, lambda x: seen.update(stream=x))
    if ends.head is not None and not ends.head.problem and isinstance(ends.head.holder, nn.Module):
        hooks.reads(ends.head.holder, lambda x: seen.update(read=x))
    with torch.inference_mode(), hooks:
        logits = loss_and_logits(lean(model, arguments))[1]
    table, head = matrix_of(ends.token), matrix_of(ends.head)
    weight = getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None)
    if head is None and isinstance(weight, Tensor) and not weight.is_meta:
        # the mapping has the table for the head
        head = weight.detach()
    gain = gain_of(norm, mapping.gain_offset)
    return Ends(
        log_vocab=math.log(a.vocab_size),
        logits_variance=_spread(logits),
        stream_variance=_spread(seen.get("stream")),
        read_rms=_rms(seen.get("read")),
        table_rms=_rms(table),
        head_rms=_rms(head),
        tied=head is None or (table is not None and head.data_ptr() == table.data_ptr()),
        final_gain=_rms(gain),
        final_gain_constant=_constant(gain),
        layer_gains_constant=_layer_gains(attached),
        head_drawn=head is not None and not unlike_draws(head),
        outlying=tuple(_outlying(attached, logits, batch)),
        learnt=learnt(attached),
        drawn_layers=tuple(_drawn_layers(attached)),
        frequencies=_frequencies(text or [batch]),
        head_copies_table=_copies(head, table),
        other_losses=_other_losses(logits, batch),
    )


def _copies(head: Tensor | None, table: Tensor | None) -> bool:
    if head is None or table is None or head.data_ptr() == table.data_ptr():
        return False
    return torch.equal(head, table)


def _other_losses(logits: Any, batch: Batch) -> tuple[float, ...]:
    """Cross-entropy of the word itself and of the one after the next; () where the next one is not asked for."""
    if not isinstance(logits, Tensor) or not asks_for_the_next(batch) or logits.shape[:2] != batch.inputs.shape:
        return ()
    ids, x = torch.as_tensor(batch.inputs).to(logits.device), logits.float()
    pairs = ((x, ids), (x[:, :-2], ids[:, 2:]))
    return tuple(float(F.cross_entropy(one.flatten(0, 1), asked.flatten())) for one, asked in pairs)


def asks_for_the_next(batch: Batch) -> bool:
    """Whether a batch asks for the next token everywhere, so that no later one may be read."""
    tokens, targets = batch.tokens, batch.targets
    if tokens is None or targets.shape != tokens.shape or tokens.shape[1] < 3:
        return False
    asked = targets[:, :-1]
    return bool((asked >= 0).mean() > 0.5 and (asked == tokens[:, 1:])[asked >= 0].all())


def matrix_of(held: Held | None) -> Tensor | None:
    """A table or map, (rows, features); None where it is not known or not here."""
    if held is None or held.problem or not isinstance(held.weight, Tensor) or held.weight.is_meta:
        return None
    weight = held.weight.detach()
    return weight.t() if held.transposed and weight.ndim == 2 else weight


def gain_of(norm: nn.Module | None, offset: float) -> Tensor | None:
    """The gains of a norm, with what is added to them; None if it has none, or they are not here."""
    weight = gain_and_bias(norm)[0]
    return weight.detach() + offset if isinstance(weight, Tensor) and not weight.is_meta else None


def _constant(gain: Tensor | None) -> float | None:
    """The number that all gains are, if they are one."""
    return float(gain[0]) if gain is not None and gain.numel() > 1 and bool((gain == gain[0]).all()) else None


def _layer_gains(attached: Anatomy) -> bool | None:
    """Whether the gains of every layer's norms are constant; None if there are none."""
    gains = [g for row in attached.rows if (g := gain_of(row.norm, 0.0)) is not None]
    return all(_constant(g) is not None for g in gains) if gains else None


def _rms(x: Tensor | None) -> float | None:
    return None if x is None else number(float(x.float().square().mean().sqrt()))


def _spread(x: Tensor | None) -> float | None:
    """Variance over the last axis, mean over all others."""
    return None if x is None else number(float(x.float().var(-1, correction=0).mean()))


def _outlying(attached: Anatomy, logits: Any, batch: Batch) -> Iterator[OutlyingRow]:
    """Rows of the token table and of the head that are far larger than the others, or larger and all that is said."""
    tables = {"token table": matrix_of(attached.ends.token), "head": matrix_of(attached.ends.head)}
    for name, table in {id(t): (n, t) for n, t in tables.items() if t is not None}.values():
        sizes = torch.linalg.vector_norm(table.float(), dim=-1)
        middle = float(sizes.median())
        if not (math.isfinite(middle) and middle > 0):
            continue
        ratio, row = (float(x) for x in (sizes / middle).max(0))
        for bound in (OUTLYING_ROW, LARGE_ROW):
            rows = torch.nonzero(sizes / middle > bound).flatten()
            losses = None if bound == OUTLYING_ROW else _without(logits, batch, rows)
            if len(rows) and math.isfinite(ratio) and (bound == OUTLYING_ROW or losses is not None):
                yield OutlyingRow(table=name, row=int(row), ratio=ratio, count=len(rows), bound=bound,
                                  losses=losses or ())  # fmt: skip
                break


def _without(logits: Any, batch: Batch, rows: Tensor) -> tuple[float, float] | None:
    """The loss of a text with and without some words among the answers; None where that changes little."""
    targets = torch.as_tensor(batch.targets)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape or not 0 < len(rows) < logits.shape[-1] / 4:
        return None
    asked = (targets >= 0) & ~torch.isin(targets, rows.cpu())
    x, y = logits.float()[asked.to(logits.device)], targets[asked].to(logits.device)
    if not len(y):
        return None
    before, after = (float(F.cross_entropy(z, y)) for z in (x, x.index_fill(-1, rows.to(x.device), -math.inf)))
    return (before, after) if before - after > REPAIRED else None


def _drawn_layers(attached: Anatomy) -> Iterator[int]:
    """Layers whose gains are constant and whose matrices look like independent draws: nothing was learnt in them."""
    for layer in dict.fromkeys(row.layer for row in attached.rows):
        rows = [row for row in attached.rows if row.layer == layer]
        gains = [g for row in rows if (g := gain_of(row.norm, 0.0)) is not None]
        if not gains or any(_constant(g) is None for g in gains):
            continue
        held = [weight for row in rows for weight in row.tensors]
        if held and all(not unlike_draws(x.detach().flatten(0, -2)) for x in held if x.ndim > 1):
            yield layer


def _frequencies(batches: Sequence[Batch]) -> float | None:
    """Entropy of the words that are asked for, by how often each is; None of fewer than 8 times the different ones."""
    asked = np.concatenate([batch.targets[batch.targets >= 0] for batch in batches])
    counts = np.unique_counts(asked).counts if asked.size else np.zeros(0)
    if not asked.size or asked.size < 8 * counts.size:
        return None
    share = counts / asked.size
    return float(-(share * np.log(share)).sum())
