"""Which profiles of a page are shown together, and how each is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from signalprop.network.architecture import Architecture
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile

SOURCE_WORDS = {"theory": "predicted", "measured": "measured", "simulated": "simulated"}


@dataclass(frozen=True, eq=False)
class Curve:
    """A profile in the report.

    Attributes:
        group: what it describes, one colour each. source: how it was found, one kind of line each.
    """

    group: str
    source: str
    profile: Profile


def curves_of(items: Mapping[str, Profile | Comparison]) -> list[Curve]:
    """Profiles with their groups and sources.

    The two of a Comparison share a group, and so do profiles of one scheme and shape that were found in different ways.
    """
    parts: list[tuple[str, str, Profile]] = []  # name of the item, key of its group, profile
    for name, item in items.items():
        profiles = [item.predicted, item.measured] if isinstance(item, Comparison) else [item]
        key = _key(profiles[0])
        sources = {(p.source, p.fidelity) for p in profiles}
        taken = {(p.source, p.fidelity) for _, other, p in parts if other == key}
        parts += [(name, f"{key} {name}" if taken & sources else key, p) for p in profiles]
    labels = _labels({key: (name, p) for name, key, p in reversed(parts)})
    fidelities = {p.fidelity for *_, p in parts if p.source == "theory"}
    return [
        Curve(
            labels[key],
            SOURCE_WORDS[p.source] + (f" ({p.fidelity})" if p.source == "theory" and len(fidelities) > 1 else ""),
            p,
        )
        for _, key, p in parts
    ]


def _key(p: Profile) -> str:
    return "|".join([p.scheme, *details_of(p.architecture).values()])


def details_of(a: Architecture) -> dict[str, str]:
    """What tells two architectures apart, in words."""
    placement = a.norm_placement if isinstance(a.norm_placement, str) else "mixed"
    layers = f"{a.n_layers}+{a.n_decoder_layers}" if a.n_decoder_layers else str(a.n_layers)
    return {
        "kind": " ".join(word for word in (a.family or "", a.kind) if word),
        "layers": f"{layers} layers",
        "width": f"width {a.d_model}",
        "norm": "no norm" if placement == "none" else f"{placement}-norm",
        "activation": a.activation,
        "tokens": f"{a.seq_len} tokens",
        "dropout": f"dropout {a.dropout:g}",
    }


def _labels(firsts: Mapping[str, tuple[str, Profile]]) -> dict[str, str]:
    """A label per group: its scheme, and what tells it from others of that scheme: of its architecture, or its name."""
    out: dict[str, str] = {}
    for key, (name, p) in reversed(list(firsts.items())):
        rivals = [details_of(other.architecture) for _, other in firsts.values() if other.scheme == p.scheme]
        label = ", ".join([p.scheme, *_telling(details_of(p.architecture), rivals)])
        label = f"{label} ({name})" if label in out.values() else label
        out[key] = next(text for k in count(1) if (text := label if k == 1 else f"{label} #{k}") not in out.values())
    return out


def _telling(own: Mapping[str, str], all_of: Sequence[Mapping[str, str]]) -> list[str]:
    """As few details as tell one architecture from the others, in the order in which they are named."""
    words, left = [], [other for other in all_of if other != own]
    for name, text in own.items():
        fewer = [other for other in left if other[name] == text]
        if len(fewer) < len(left):
            words.append(text)
            left = fewer
    return words


def title_of(curves: Sequence[Curve]) -> str:
    """What all profiles have in common, in words."""
    details = [details_of(curve.profile.architecture) for curve in curves]
    common = [text for name, text in details[0].items() if all(other[name] == text for other in details[1:])]
    return ", ".join(common)
