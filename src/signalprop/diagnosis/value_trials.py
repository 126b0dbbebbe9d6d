"""Trials of numbers and of how they are read: gains, rotary frequencies, scores, ends, positions, adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import Held
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import lean
from signalprop.diagnosis.temporary_changes import (
    Trial,
    other_attributes,
    other_outputs,
    other_values,
    plain,
)
from signalprop.hooks import loss_and_logits
from signalprop.measurement.measuring import arguments_of
from signalprop.streams.proof import gain_and_bias

BASES = (1e4, 5e4, 1e5, 5e5, 1e6, 1e7)  # of rotary positions, in released configurations
_FACTORS = (2.0, 4.0, 8.0)  # of stretched rotary positions
_SHIFTS = (-2, -1, 1, 2)  # rows of a position table: RoBERTa's and OPT's begin with 2 that no token reads
_ROWS = (-3, -2, -1, 1, 2, 3)  # of a token table: tokenizers that count special tokens in, or not
_POWERS = tuple(2.0 ** (k / 2) for k in range(-12, 13))  # factors on logits
_WRONG = 3.0  # a larger factor on logits is more than calibration
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
_ALIKE = 0.05  # between two activations, for numbers from -3 to 3: both kinds of gelu differ by less


def value_trials(attached: Anatomy, short: Batch, *, guessing: bool) -> Iterator[Trial]:
    """All that fit a model; short, guessing: as of `trials`."""
    yield from _gains(attached)
    yield from _rotary_bases(attached.model)
    yield from _scores(attached)
    yield from _ends(attached)
    yield from _logits(attached, short)
    if guessing:
        yield from _rows(attached)
    yield from _positions(attached)
    yield from _activations(attached)
    yield from _adapters(attached.model)


def _gains(attached: Anatomy) -> Iterator[Trial]:
    norms = {id(m): m for row in attached.rows for m in (row.norm, row.post_norm, row.query_norm, row.key_norm) if m}
    norms |= {id(m): m for m in attached.ends.final_norms}
    gains = [w for m in norms.values() if isinstance(w := gain_and_bias(m)[0], Tensor) and not w.is_meta]
    if not gains:
        return
    for shift, word in ((-1.0, "above"), (1.0, "below")):
        yield Trial(
            "gains", f"norm gains are 1 {word} what this model reads", f"gains {'-' if shift < 0 else '+'} 1",
            lambda shift=shift: other_values([(w, w.data + shift) for w in gains]),  # type: ignore[misc]
        )  # fmt: skip


def _rotary_bases(model: nn.Module) -> Iterator[Trial]:
    """Frequencies of the usual kind, a geometric sequence, by another base or times a factor."""
    held = [(n, b) for n, b in model.named_buffers() if n.rpartition(".")[2] == "inv_freq" and b.numel() > 1]
    if not held or any(b.is_meta or b.ndim != 1 for _, b in held):
        return
    first = held[0][1]
    own, start = _base(first)
    for base in BASES:
        if own is not None and abs(math.log(base / own)) < 0.05:
            continue
        said = "is not finite or not a base" if own is None else f"is {own:.6g}"
        yield Trial(
            "rotary base", f"the rotary base {said}; these weights were trained with about {base:g}",
            f"rope_theta = {base:g}",
            lambda base=base: other_values([(b, start * _frequencies(b, base)) for _, b in held]),  # type: ignore[misc]
        )  # fmt: skip
    for factor in (x for f in _FACTORS for x in (f, 1 / f)):
        word = f"divided by {factor:g}" if factor > 1 else f"multiplied by {1 / factor:g}"
        yield Trial(
            "rotary factor", f"rotary positions are to be {word}, as rope_scaling of these weights had it",
            f"positions {word}",
            lambda factor=factor: other_values([(b, b / factor) for _, b in held]),  # type: ignore[misc]
        )  # fmt: skip


def _base(frequencies: Tensor) -> tuple[float | None, float]:
    """The base and the factor of frequencies factor * base^(-2i/d); (None, 1) where they are not such a sequence."""
    f = frequencies.double()
    if not bool(torch.isfinite(f).all()) or bool((f <= 0).any()):
        return None, 1.0
    start = float(f[0])
    base = (float(f[1]) / start) ** -len(f)
    fits = base > 1 and torch.allclose(f, start * _frequencies(f, base), rtol=1e-3)
    return (base, start) if fits else (None, 1.0)


def _frequencies(like: Tensor, base: float) -> Tensor:
    n = like.numel()
    return (base ** -(torch.arange(n, dtype=torch.float64, device=like.device) / n)).to(like.dtype)


def _scores(attached: Anatomy) -> Iterator[Trial]:
    a = attached.mapping.architecture
    places = [row.scaling for row in attached.rows if row.scaling is not None and row.kind.attends_itself]
    numbers = [(owner, name, getattr(owner, name)) for owner, name in places]
    if not numbers or not all(isinstance(value, (int, float)) and value > 0 for *_, value in numbers):
        return
    own, usual = float(numbers[0][2]), a.d_head**-0.5
    for factor in dict.fromkeys((usual, 1.0, 1 / a.d_head, a.d_model**-0.5)):
        if abs(math.log(factor / own)) > 0.01:
            yield Trial(
                "score scale", f"scores are multiplied by {own:.4g}; these weights were trained with {factor:.4g}",
                f"a factor of {factor:.4g} on scores",
                lambda factor=factor: other_attributes([(o, n, factor) for o, n, _ in numbers]),  # type: ignore[misc]
            )  # fmt: skip


def _ends(attached: Anatomy) -> Iterator[Trial]:
    ends, d = attached.ends, attached.mapping.architecture.d_model
    token, head = ends.token, ends.head
    if token is None or token.problem:
        return
    if isinstance(token.holder, nn.Module):
        for factor, word in ((math.sqrt(d), "times"), (1 / math.sqrt(d), "over")):
            yield Trial(
                "embedding scale", f"embeddings are to be read {word} sqrt(d_model)",
                f"embeddings {word} {math.sqrt(d):.4g}",
                lambda factor=factor: other_outputs([token.holder], lambda _, out: out * factor),  # type: ignore[misc]
            )  # fmt: skip
    own_head = plain(head) and plain(token) and head is not None and head.weight is not token.weight
    if own_head and head is not None and head.weight.shape == token.weight.shape:
        yield Trial(
            "head", "the head is not the token table, as it is in the model that was trained",
            "the head tied to the token table (tie_word_embeddings)",
            lambda: other_values([(head.weight, token.weight.data)]),
        )  # fmt: skip


def _logits(attached: Anatomy, short: Batch) -> Iterator[Trial]:
    """The factor on the logits of a pass that lowers its loss most, if it is far from 1."""
    head, mapping = attached.ends.head, attached.mapping
    holder = None if head is None or head.problem else head.holder
    if not isinstance(holder, nn.Module) or mapping.arguments is None:
        return
    with torch.inference_mode():
        logits = loss_and_logits(lean(attached.model, arguments_of(attached, short)))[1]
    targets = torch.as_tensor(short.targets)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
        return
    asked = targets >= 0
    x, y = logits.float()[asked.to(logits.device)], targets[asked].to(logits.device)
    factor = min(_POWERS, key=lambda f: float(F.cross_entropy(f * x, y)))
    if max(factor, 1 / factor) >= _WRONG:
        much = f"{1 / factor:.2g} times as large as" if factor < 1 else f"{1 / factor:.2g} of"
        yield Trial(
            "logits", f"logits are about {much} those that these weights were trained with",
            f"logits times {factor:.3g}", lambda: other_outputs([holder], lambda _, out: out * factor),
        )  # fmt: skip


def _rows(attached: Anatomy) -> Iterator[Trial]:
    """A vocabulary whose ids count from another number: rows of the table, of the head, of both are some places off."""
    table, head = attached.ends.token, attached.ends.head
    if table is None or not plain(table):
        return
    own = [table.weight]
    if head is not None and plain(head) and head.weight is not table.weight:
        own.append(head.weight)
    both = [*own, None]
    for shift in _ROWS:
        rows = f"{abs(shift)} row{'s' if abs(shift) > 1 else ''} {'behind' if shift > 0 else 'before'}"
        for words, chosen in (("token table", both[0]), ("head", both[1])) if len(own) > 1 and abs(shift) == 1 else ():
            if chosen is not None:
                yield _moved(words, [chosen], shift, rows)
        yield _moved("token table" if len(own) == 1 else "token table and of the head", own, shift, rows)


def _moved(words: str, weights: list[Tensor], shift: int, rows: str) -> Trial:
    return Trial(
        "token rows", f"rows of the {words} are stored {rows} the place where they are read",
        f"rows of the {words} moved by {-shift:+d}",
        lambda: other_values([(w, w.data.roll(-shift, 0)) for w in weights]),
    )  # fmt: skip


def _positions(attached: Anatomy) -> Iterator[Trial]:
    """A table that is read some rows too high or too low."""
    held = attached.ends.position
    if not isinstance(held, Held) or not plain(held):
        return
    for shift in _SHIFTS:
        rows = f"{abs(shift)} row{'s' if abs(shift) > 1 else ''} {'behind' if shift < 0 else 'before'}"
        yield Trial(
            "position rows", f"the rows of the position table are stored {rows} the place where the model reads them",
            f"rows of the position table moved by {shift:+d}",
            lambda shift=shift: other_values([(held.weight, held.weight.data.roll(shift, 0))]),  # type: ignore[misc]
        )  # fmt: skip


def _activations(attached: Anatomy) -> Iterator[Trial]:
    found = [row.activation.found for row in attached.rows if row.activation and not row.activation.problem]
    modules = list({id(m): m for m in found if isinstance(m, nn.Module)}.values())
    x = torch.linspace(-3, 3, 61)
    try:
        now = modules[0](x) if modules else None
    except Exception:  # one that is not a function of each number by itself
        return
    if now is None or not isinstance(now, Tensor) or now.shape != x.shape:
        return
    for name, other in _ACTIVATIONS.items():
        if float((other(x) - now.detach()).abs().max()) > _ALIKE:
            yield Trial(
                "activation", f"these weights were trained with the activation {name}",
                f"the activation {name}",
                lambda other=other: other_outputs(modules, lambda args, _: other(args[0])),  # type: ignore[misc]
            )  # fmt: skip


def _adapters(model: nn.Module) -> Iterator[Trial]:
    """Low-rank adapters of PEFT, whose second matrix carries any factor: theirs is lora_alpha / r."""
    held: list[tuple[Tensor, float]] = []
    for module in model.modules():
        scaling, second = getattr(module, "scaling", None), getattr(module, "lora_B", None)
        if isinstance(scaling, dict) and isinstance(second, nn.ModuleDict):
            weights = [(b.weight, float(scaling.get(name, 0.0))) for name, b in second.items()]
            held += [(w, s) for w, s in weights if isinstance(w, Tensor) and s > 0 and bool(w.any())]
    if not held:
        return
    own = held[0][1]
    for factor in dict.fromkeys((0.0, 1 / own, 0.25, 0.5, 2.0, 4.0)):
        if factor == 1:
            continue
        said = "take the model's loss away" if not factor else f"were trained with the factor {own * factor:.3g}"
        yield Trial(
            "adapters", f"the adapters' factor (lora_alpha / r) is {own:.3g}, and they {said}",
            f"a factor of {own * factor:.3g} on them" if factor else "the adapters left out",
            lambda factor=factor: other_values([(w, w.data * factor) for w, _ in held]),  # type: ignore[misc]
        )  # fmt: skip
