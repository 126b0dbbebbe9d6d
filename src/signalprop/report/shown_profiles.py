"""Which profiles of a report are shown together, how each is called, and in which colour and line it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from signalprop.network.architecture import Architecture
from signalprop.report.sections import LINES, Line
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile

SOURCES = {"theory": "predicted", "measured": "measured", "simulated": "simulated"}


@dataclass(frozen=True, eq=False)
class Shown:
    """A profile as it is drawn.

    Attributes:
        group: what it describes. source: how it was found. label: in legends. colour, line, frame: as of a `Curve`.
    """

    profile: Profile
    group: str
    source: str = ""
    label: str = ""
    colour: int = 0
    line: Line = "solid"
    frame: str | None = None


def shown(items: Mapping[str, Profile | Comparison]) -> list[Shown]:
    """Profiles with their labels, colours and kinds of line.

    The two of a Comparison are one group, and also profiles of one scheme and shape that were found in different
    ways. Groups of one scheme have its colour. One group alone has a colour for every source.
    """
    found: list[tuple[str, str, Profile]] = []  # name of the item, key of its group, profile
    for name, item in items.items():
        profiles = [item.predicted, item.measured] if isinstance(item, Comparison) else [item]
        key = _key(profiles[0])
        sources = {(p.source, p.fidelity) for p in profiles}
        taken = {(p.source, p.fidelity) for _, other, p in found if other == key}
        found += [(name, f"{key} {name}" if taken & sources else key, p) for p in profiles]
    groups = _labels({key: (name, p) for name, key, p in reversed(found)})
    fidelities = {p.fidelity for *_, p in found if p.source == "theory"}
    schemes = list(dict.fromkeys(p.scheme for *_, p in found))
    sources_of = [_source(p, several=len(fidelities) > 1) for *_, p in found]
    distinct = sorted(dict.fromkeys(sources_of), key=lambda word: (not word.startswith("predicted"), word))
    out = []
    for (_, key, p), source in zip(found, sources_of, strict=True):
        group, alone = groups[key], len(set(groups.values())) == 1
        peers = list(dict.fromkeys(groups[k] for _, k, other in found if other.scheme == p.scheme))
        rank = peers.index(group) if len(peers) > 1 else distinct.index(source)
        line: Line = "points" if source == "measured" else LINES[rank % len(LINES)]
        label = source if alone and len(distinct) > 1 else group + (f", {source}" if len(distinct) > 1 else "")
        colour = distinct.index(source) if alone else schemes.index(p.scheme)
        out.append(Shown(p, group, source, label, colour, line))
    return out


def _source(p: Profile, *, several: bool) -> str:
    return SOURCES[p.source] + (f" ({p.fidelity})" if p.source == "theory" and several else "")


def _key(p: Profile) -> str:
    return "|".join([p.scheme, *details_of(p.architecture).values()])


def details_of(a: Architecture) -> dict[str, str]:
    """The difference between two architectures, in words."""
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
    """A label per group: its scheme, and how it differs from others of it: of its architecture, or its name."""
    out: dict[str, str] = {}
    for key, (name, p) in reversed(list(firsts.items())):
        rivals = [details_of(other.architecture) for _, other in firsts.values() if other.scheme == p.scheme]
        label = ", ".join([p.scheme, *_telling(details_of(p.architecture), rivals)])
        label = f"{label} ({name})" if label in out.values() else label
        out[key] = next(text for k in count(1) if (text := label if k == 1 else f"{label} #{k}") not in out.values())
    return out


def _telling(own: Mapping[str, str], all_of: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest details that distinguish one architecture from the others, in the order in which they are named."""
    words, left = [], [other for other in all_of if other != own]
    for name, text in own.items():
        fewer = [other for other in left if other[name] == text]
        if len(fewer) < len(left):
            words.append(text)
            left = fewer
    return words
