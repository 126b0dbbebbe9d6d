"""Branches that mix tokens by short convolutions and recurrences, computed again in float64 from their weights.

Five are known: a gated convolution (LFM2), Mamba, Mamba-2 (Dao and Gu 2024, section 7), RG-LRU (RecurrentGemma), and
the gated delta rule (Yang, Kautz and Hatamizadeh 2024, equation 10), in the ways in which models store their maps.
Others are not proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from signalprop.network.activations import ACTIVATIONS
from signalprop.streams.replay import Map, Replayed, Rows, split_features

Places = dict[str, tuple[str, Rows]]
_EPSILONS = (1e-6, 1e-5, 1e-12, 0.0)


@dataclass(frozen=True)
class Given:
    """What a replay reads.

    Attributes:
        maps: that read what enters the branch. target: what its last map reads, (tokens, features).
        blind: recurrences do not look back, and filters see the token itself alone.
        taps: path and weight of a convolution over tokens, (channels, 1, width), with its bias (channels) or None.
        tensors: parameters by path. numbers: of the configuration, by name. inner: maps that read something else.
    """

    maps: Sequence[Map]
    target: Tensor
    taps: Sequence[tuple[str, Tensor, Tensor | None]]
    tensors: Dictionary[str, Tensor]
    numbers: Dictionary[str, float]
    inner: Sequence[Map] = ()
    blind: bool = False

    def sized(self, shape: int | tuple[int, ...], words: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors of that shape, so many as words, those first whose names hold the words."""
        whole = (shape,) if isinstance(shape, int) else shape
        some = permutations([(path, t) for path, t in self.tensors.items() if t.shape == whole], len(words))
        yield from sorted(map(list, some), key=lambda row: -sum(w in p for w, (p, _) in zip(words, row, strict=True)))

    def convolved(self, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """A causal filter per channel over (tokens, channels)."""
        seen = taps * (torch.arange(taps.shape[-1]) == taps.shape[-1] - 1) if self.blind else taps
        padded = F.pad(x.mT[None], (taps.shape[-1] - 1, 0))
        return F.conv1d(padded, seen, bias, groups=len(taps))[0].mT

    def heads(self, words: Sequence[str]) -> list[int]:
        """Numbers of the configuration whose names hold a word."""
        return sorted(
            {int(v) for n, v in self.numbers.items() if any(w in n for w in words) and v >= 1 and v == int(v)}
        )


def recurrence(given: Given, last: Map, limit: float) -> Replayed | float:
    """The roles of a branch's weights, where one of the known ways to mix tokens gives what its last map reads.

    Returns:
        The smallest error where none does.
    """
    best, size = math.inf, float(given.target.abs().max()) or 1.0
    for name, way in _WAYS.items():
        for places, output in way(given):
            error = float((output - given.target).abs().max()) / size
            if error <= limit and bool(given.target.any()):
                blind = next(out for where, out in way(replace(given, blind=True)) if where == places)
                if float((blind - given.target).abs().max()) / size > 64 * error:  # else any recurrence would fit
                    out = "conv_out" if "conv_filter" in places else "output"
                    return Replayed({**places, out: (last.path, None)}, error, mixer=name)
            best = min(best, error)
    return best


def gated_convolution(given: Given) -> Iterator[tuple[Places, Tensor]]:
    """after * convolution(before * value); before and value are alike, so their order is as it is stored."""
    width = given.target.shape[-1]
    for m, (path, taps, bias) in product(given.maps, given.taps):
        if m.gave.shape[-1] != 3 * width or len(taps) != width:
            continue
        parts = torch.split(m.gave, width, -1)
        for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
            before, after, value = order
            rows = {f"conv_{name}": i for name, i in zip(("before", "after", "value"), order, strict=True)}
            places: Places = {role: (m.path, slice(i * width, (i + 1) * width)) for role, i in rows.items()}
            out = parts[after] * given.convolved(parts[before] * parts[value], taps, bias)
            yield {**places, "conv_filter": (path, None)}, out


def mamba2(given: Given) -> Iterator[tuple[Places, Tensor]]:
    """h = exp(dt A) h + dt B x; y = C h + D x, gated and normed."""
    inner = given.target.shape[-1]
    for m, (path, taps, bias) in product(given.maps, given.taps):
        channels = len(taps)
        n_heads = m.gave.shape[-1] - inner - channels
        if n_heads <= 0 or inner % n_heads or channels <= inner:
            continue
        z, xbc, dt = torch.split(m.gave, [inner, channels, n_heads], -1)
        half = (channels - inner) // 2
        x, b, c = torch.split(F.silu(given.convolved(xbc, taps, bias)), [inner, half, half], -1)
        groups = [g for g in {1, *given.heads(("group",))} if n_heads % g == 0 and b.shape[-1] % g == 0]
        for n_groups, vectors in product(groups, given.sized(n_heads, ("A_log", "dt_bias", "D"))):
            (a_path, a_log), (dt_path, dt_bias), (d_path, skip) = vectors
            step = F.softplus(dt + dt_bias)
            keys, queries = (_grouped(part, n_groups, n_heads) for part in (b, c))
            wide, decay = split_features(x, n_heads), (-a_log.exp() * step).exp()
            writes = (step[..., None] * wide)[..., None] * keys[:, :, None]
            y = _scanned(decay[..., None, None], writes, queries[:, :, None] * (not given.blind))
            y = (y + skip[:, None] * wide).flatten(-2)
            places: Places = {"mixer_input": (m.path, None), "mixer_taps": (path, None), "mixer_decay": (a_path, None)}
            places |= {"mixer_step_bias": (dt_path, None), "mixer_skip": (d_path, None)}
            for norm, out in _normed(given, y, z, inner // n_groups):
                yield {**places, **norm}, out


def mamba1(given: Given) -> Iterator[tuple[Places, Tensor]]:
    """h = exp(dt A) h + dt B x; y = (C h + D x) silu(z), A of every feature and state (Gu and Dao 2023, section 3)."""
    inner = given.target.shape[-1]
    for m, narrow, (path, taps, bias) in product(given.maps, given.inner, given.taps):
        if m.gave.shape[-1] != 2 * inner or len(taps) != inner or narrow.read.shape[-1] != inner:
            continue
        for halves in ((0, 1), (1, 0)):
            x, z = (m.gave[:, i * inner : (i + 1) * inner] for i in halves)
            x = F.silu(given.convolved(x, taps, bias))
            for a_path, a_log in ((p, t) for p, t in given.tensors.items() if t.ndim == 2 and len(t) == inner):
                states = a_log.shape[1]
                rank = narrow.gave.shape[-1] - 2 * states
                steps = product(given.sized((inner, rank), ("dt",)), given.sized(inner, ("dt", "D")))
                for ((dt_path, dt),), ((_, dt_bias), (d_path, skip)) in steps if rank > 0 else ():
                    places: Places = {"mixer_input": (m.path, None), "mixer_taps": (path, None)}
                    places |= {"mixer_narrow": (narrow.path, None), "mixer_decay": (a_path, None)}
                    places |= {"mixer_step": (dt_path.removesuffix(".weight"), None), "mixer_skip": (d_path, None)}
                    for more, (low, keys, queries) in _narrow(given, narrow.gave, rank, states):
                        step = F.softplus(low @ dt.mT + dt_bias)
                        decay, writes = (-a_log.exp() * step[..., None]).exp(), (x * step)[..., None] * keys[:, None]
                        y = _scanned(decay, writes, queries[:, None] * (not given.blind))
                        yield {**places, **more}, (y + skip * x) * F.silu(z)


def _narrow(given: Given, low: Tensor, rank: int, states: int) -> Iterator[tuple[Places, Sequence[Tensor]]]:
    """Step, keys and queries as they are; or each normed (Falcon-Mamba), with a gain (Jamba)."""
    parts = torch.split(low, [rank, states, states], -1)
    yield {}, parts
    gains = [[*one, *two] for one, two in product(given.sized(rank, ("dt",)), given.sized(states, ("b_", "c_")))]
    for eps, row in product(_EPSILONS, gains or [[("", torch.ones(()))] * 3]):
        roles = ("mixer_step_norm", "mixer_key_norm", "mixer_query_norm")
        places: Places = {role: (path, None) for role, (path, _) in zip(roles, row, strict=True) if path}
        normed = [x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() for x in parts]
        yield places, [x * gain for x, (_, gain) in zip(normed, row, strict=True)]


def rg_lru(given: Given) -> Iterator[tuple[Places, Tensor]]:
    """h = a h + sqrt(1 - a^2) (gate x), a = exp(-8 gate softplus(L)), times f(y) (De et al. 2024, section 2.4)."""
    inner = given.target.shape[-1]
    wide = [m for m in given.maps if m.gave.shape[-1] == inner]
    three = {t.shape for t in given.tensors.values() if t.ndim == 3}
    blocks = [shape for shape in three if shape[0] * shape[1] == inner == shape[0] * shape[2]]
    for (y, x_), (path, taps, bias), shape in product(permutations(wide, 2), given.taps, blocks):
        if len(taps) != inner:
            continue
        x = given.convolved(x_.gave, taps, bias)
        words = ("input", "recurrent")
        maps, biases = given.sized(tuple(shape), words), given.sized(tuple(shape[:2]), words)
        for two, offsets, ((decay_path, decay),) in product(maps, biases, given.sized(inner, ("param",))):
            cut = split_features(x, shape[0])
            gates = [
                (torch.einsum("thi,hio->tho", cut, w) + b).sigmoid().flatten(-2)
                for (_, w), (_, b) in zip(two, offsets, strict=True)
            ]
            log_a = -8 * gates[1] * F.softplus(decay)
            size = (-torch.expm1(2 * log_a)).sqrt()
            size[0] = 1.0
            a, writes = log_a.exp() * (not given.blind), size * gates[0] * x
            h = _scanned(a[..., None], writes[..., None], torch.ones_like(a)[..., None])
            places: Places = {"mixer_gate": (y.path, None), "mixer_input": (x_.path, None), "mixer_taps": (path, None)}
            places |= {"mixer_input_gate": (two[0][0], None), "mixer_decay_gate": (two[1][0], None)}
            for function in ACTIVATIONS.values():
                bent = torch.from_numpy(np.asarray(function.function(y.gave.numpy())))
                yield {**places, "mixer_decay": (decay_path, None)}, h * bent


def gated_delta(given: Given) -> Iterator[tuple[Places, Tensor]]:
    """S = exp(g) S + beta k (v - k^T exp(g) S), y = q^T S, normed over a head and gated."""
    values = given.target.shape[-1]
    for path, taps, bias in given.taps:
        keys = (len(taps) - values) // 2
        for n_values, n_keys in product(given.heads(("value_head", "v_head")), given.heads(("key_head", "k_head"))):
            if keys <= 0 or values % n_values or keys % n_keys or n_values % n_keys:
                continue
            for places, qkv, z, b, a in _delta_inputs(given, keys, values, n_keys, n_values):
                mixed = F.silu(given.convolved(qkv, taps, bias))
                q, k, v = (split_features(part, n) for part, n in zip(
                    torch.split(mixed, [keys, keys, values], -1), (n_keys, n_keys, n_values), strict=True))  # fmt: skip
                q, k = (_unit(part).repeat_interleave(n_values // n_keys, 1) for part in (q, k))
                for (a_path, a_log), (dt_path, dt_bias) in given.sized(n_values, ("A_log", "dt_bias")):
                    decay = (-a_log.exp() * F.softplus(a + dt_bias)).exp()
                    more: Places = {"mixer_taps": (path, None), "mixer_decay": (a_path, None)}
                    more |= {"mixer_step_bias": (dt_path, None)}
                    for rate in (1, 2):  # 2: eigenvalues may be negative
                        y = _delta(
                            q * (not given.blind) * q.shape[-1] ** -0.5, k, v, decay, rate * b.sigmoid()
                        ).flatten(-2)
                        for norm, out in _normed(given, y, z, values // n_values, first=True):
                            yield {**places, **more, **norm}, out


def _delta_inputs(
    given: Given, keys: int, values: int, n_keys: int, n_values: int
) -> Iterator[tuple[Places, Tensor, Tensor, Tensor, Tensor]]:
    """(places; query, key and value side by side; gate; beta; step), as one map per kind or by heads of keys in two."""
    sized = {width: [m for m in given.maps if m.gave.shape[-1] == width] for width in
             (2 * keys + values, keys, values, n_values, 2 * keys + 2 * values, 2 * n_values)}  # fmt: skip
    for (q, k), (v, z), (b, a) in product(*(permutations(sized[width], 2) for width in (keys, values, n_values))):
        if len({m.path for m in (q, k, v, z, b, a)}) == 6:
            names = ("query", "key", "value", "gate", "rate", "step")
            one: Places = {f"mixer_{n}": (m.path, None) for n, m in zip(names, (q, k, v, z, b, a), strict=True)}
            yield one, torch.cat([q.gave, k.gave, v.gave], -1), z.gave, b.gave, a.gave
    for qkv, z in product(sized[2 * keys + values], sized[values]):
        for b, a in permutations(sized[n_values], 2):
            if len({qkv.path, z.path, b.path, a.path}) == 4:
                places: Places = {"mixer_input": (qkv.path, None), "mixer_gate": (z.path, None)}
                places |= {"mixer_rate": (b.path, None), "mixer_step": (a.path, None)}
                yield places, qkv.gave, z.gave, b.gave, a.gave
    for fused, two in product(sized[2 * keys + 2 * values], sized[2 * n_values]):
        each = [keys // n_keys, keys // n_keys, values // n_keys, values // n_keys]
        parts = [part.flatten(-2) for part in torch.split(split_features(fused.gave, n_keys), each, -1)]
        halves = torch.split(split_features(two.gave, n_keys), n_values // n_keys, -1)
        rate, step = (part.flatten(-2) for part in halves)
        two_places: Places = {"mixer_input": (fused.path, None), "mixer_step": (two.path, None)}
        yield two_places, torch.cat(parts[:3], -1), parts[3], rate, step


_WAYS = {
    "gated convolution": gated_convolution,
    "Mamba": mamba1,
    "Mamba-2": mamba2,
    "RG-LRU": rg_lru,
    "gated delta rule": gated_delta,
}


def _grouped(x: Tensor, n_groups: int, n_heads: int) -> Tensor:
    """(tokens, groups * features) -> (tokens, heads, features)."""
    return split_features(x, n_groups).repeat_interleave(n_heads // n_groups, 1)


def _scanned(decay: Tensor, writes: Tensor, queries: Tensor) -> Tensor:
    """What a linear state gives, (tokens, ...), of what is written to it, (tokens, ..., states), token by token."""
    state, out = torch.zeros_like(writes[0]), []
    for t in range(len(writes)):
        state = decay[t] * state + writes[t]
        out.append((state * queries[t]).sum(-1))
    return torch.stack(out)


def _delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, (tokens, heads, features)."""
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    out = []
    for t in range(len(q)):
        state = decay[t, :, None, None] * state
        held = (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * (beta[t, :, None] * (v[t] - held))[:, None]
        out.append((state * q[t][..., None]).sum(1))
    return torch.stack(out)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _normed(given: Given, y: Tensor, z: Tensor, size: int, first: bool = False) -> Iterator[tuple[Places, Tensor]]:
    """Gated, with an RMS norm over groups or over all before or after the gate, or none."""
    gate = F.silu(z)
    if not first:
        yield {}, y * gate
    sizes = dict.fromkeys((size, y.shape[-1]))
    for (path, weight), width, eps in product(given.tensors.items(), sizes, _EPSILONS):
        if weight.ndim != 1 or len(weight) not in (width, y.shape[-1]) or y.shape[-1] % width:
            continue
        whole = weight if len(weight) == y.shape[-1] else weight.repeat(y.shape[-1] // width)
        for before in (True, False):
            inside = split_features(y if before else y * gate, y.shape[-1] // width)
            out = (inside * (inside.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * whole
            yield {"mixer_norm": (path, None)}, out * gate if before else out
