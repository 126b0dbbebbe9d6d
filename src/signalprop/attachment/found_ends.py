"""The two ends of a found model: the tables that the stream begins with, and the map to logits, by their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.mapping import EmbeddingMap, HeadMap
from signalprop.families.base import SINUSOIDS
from signalprop.network.activations import activation
from signalprop.streams.parts import Place, Stack
from signalprop.streams.proof import fitted_norm, norm_of
from signalprop.streams.replay import rows_of
from signalprop.streams.roles import LIMIT, Proof, is_map


def embedding_of(
    model: nn.Module, given: Dictionary[str, Any], stacks: list[Stack], proof: Proof
) -> tuple[EmbeddingMap | str, dict[str, Any]]:
    """The model's input and the fields of its architecture; or the one line why it is not known."""
    ends = _Ends(model, proof, stacks[0].width)
    images = next((v for k, v in given.items() if isinstance(v, Tensor) and v.ndim == 4), None)
    starts = [stack.branches[0].stream_in for stack in stacks]
    if any(start not in proof.tensors for start in starts):
        return "no module sees what the stream begins with", {}
    if images is not None and len(stacks) == 1:
        found = ends.patches(rows_of(proof.tensors[starts[0]]))  # type: ignore[index]
        if not isinstance(found[0], str) or "input_ids" not in given:
            return found
    seen = (ends, _Ends(model, replace(proof, tensors=proof.decoder), stacks[-1].width))
    rows = [one.tables(rows_of(proof.tensors[start])) for one, start in zip(seen, starts, strict=False)]  # type: ignore[index]
    first, last = rows[0], rows[-1]
    if isinstance(first, str) or isinstance(last, str):
        return (first if isinstance(first, str) else str(last)), {}
    alike = (first["scale"], first["token"]) == (last["scale"], last["token"])
    if not alike or (last is not first and "segment" in last):
        return "encoder and decoder begin in different ways", {}
    table: Any = model.get_submodule(first["token"])
    fields: dict[str, Any] = {
        "vocab_size": int(table.weight.shape[0]),
        "embedding_norm": first.get("norm") is not None or "normed" in first,
        "embedding_scale": first["scale"],
        "embedding_dropout": ends.dropout(rows_of(proof.tensors[starts[0]])),  # type: ignore[index]
        "input": "tokens",
        "factor": first.get("factor", 1.0),
    }
    if "segment" in first:
        segments: Any = model.get_submodule(first["segment"])
        fields["n_segments"] = int(segments.weight.shape[0])
    if "position" in first:
        fields["positions"] = _kind(first["position_rows"])
        if getattr(getattr(model, "config", None), "model_type", None) is None:  # else the configuration says it
            fields |= ends.room(first["position"])
    other = {k: last.get(k) if last.get(k) != first.get(k) else None for k in ("position", "norm")}
    embedding = EmbeddingMap(
        token=first["token"],
        position=first.get("position"),
        segment=first.get("segment"),
        norm=first.get("norm"),
        normed="normed" in first,
        scale=first["scale"],
        decoder_position=other["position"],
        decoder_norm=other["norm"],
    )
    return embedding, fields


def head_of(
    model: nn.Module, stacks: list[Stack], proof: Proof, embedding: EmbeddingMap, known: Dictionary[str, Any]
) -> tuple[HeadMap, dict[str, Any], tuple[str, ...]]:
    """The map to logits, the fields of the architecture, and what to note where it is not known."""
    ends = _Ends(model, proof, stacks[0].width)
    none: dict[str, Any] = {"head": "none", "tied_embeddings": False}
    final = stacks[-1].final_norm
    place = Place(final, "output") if final is not None else stacks[-1].branches[-1].stream_out
    place = place if stacks[-1].final_reads is None else Place(stacks[-1].final_reads, "input")
    end = rows_of(proof.tensors[place]) if place in proof.tensors else None  # type: ignore[index]
    logits = proof.output
    out = None if logits is None or not logits.is_floating_point() or not logits.ndim else rows_of(logits)
    if end is None or out is None or (out.shape == end.shape and torch.equal(out, end)):
        return HeadMap(), none, ()
    token: Any = None if embedding.token is None else model.get_submodule(str(embedding.token))
    for path in ends.maps():
        x, y = ends.at(path, "input"), ends.at(path, "output")
        if x is None or y is None or y.shape != out.shape or float(y.abs().max()) == 0:
            continue
        scale = float((y * out).sum() / (y * y).sum())
        if not _near(scale * y, out):
            continue
        module: Any = model.get_submodule(path)
        tied = token is not None and module.weight is getattr(token, "weight", 0)
        fields = {"head": "lm", "tied_embeddings": tied, "head_transform": False}
        fields["head_bias"] = isinstance(getattr(module, "bias", None), Tensor)
        pooled = end[:1] if known.get("class_token") else end.mean(0, keepdim=True)
        if known["input"] == "patches" and _multiple(x, pooled) is not None and len(x) == 1:
            fields = {"head": "classes", "n_classes": y.shape[-1], "tied_embeddings": False}
            return HeadMap(weight=path), fields, ()
        if _multiple(x, end) is not None:
            return HeadMap(weight=path, scale=_plain(scale * float(_multiple(x, end) or 1))), fields, ()
        if (transform := ends.transform(end, x, known["activation"])) is not None and abs(scale - 1) < LIMIT:
            return HeadMap(weight=path, transform=transform), {**fields, "head_transform": True}, ()
    return HeadMap(), none, ("its head is not a known one: predicted and drawn without",)


class _Ends:
    """Looks for tables, norms and maps outside of the layers."""

    def __init__(self, model: nn.Module, proof: Proof, width: int) -> None:
        self.model, self.proof, self.width = model, proof, width

    def at(self, path: str, side: Any) -> Tensor | None:
        found = self.proof.tensors.get(Place(path, side))
        return None if found is None or not found.is_floating_point() or not found.ndim else rows_of(found)

    def maps(self) -> Iterator[str]:
        return (path for path, module in self.model.named_modules() if is_map(module))

    def norm_to(self, start: Tensor) -> tuple[str | None, Tensor]:
        """(the norm whose output that is, what it reads); (None, the same) if there is none."""
        for path, module in self.model.named_modules():
            x, y = self.at(path, "input"), self.at(path, "output")
            if x is None or y is None or is_map(module) or isinstance(module, nn.Embedding) or y.shape != start.shape:
                continue
            known = not torch.equal(x, y) and torch.equal(y, start)
            if known and norm_of(self.model, path, self.proof.tensors).kind != "unknown":
                return path, x
        return None, start

    def tables(self, start: Tensor) -> dict[str, Any] | str:
        """Paths of the tables whose sum, times `scale`, the stream begins with."""
        norm, target = self.norm_to(start)
        outs = {
            path: y.expand_as(target)
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and (y := self._looked_up(path, module)) is not None
            and y.shape[-1] == self.width and y.shape[0] in (1, target.shape[0])
        }  # fmt: skip
        for token, n in ((path, n) for n in range(3) for path in outs):
            for others in combinations([path for path in outs if path != token], n):
                total = outs[token] + sum(outs[path] for path in others)
                scale = _multiple(target, total)
                if scale is not None:
                    return self._sorted(token, others, outs, {"norm": norm, "scale": _plain(scale)})
        for token, other in ((one, two) for one in outs for two in outs if one != two):
            columns = torch.stack([outs[token].flatten(), outs[other].flatten()], 1)
            scale, own = torch.linalg.lstsq(columns, target.flatten()[:, None], driver="gelsd").solution[:, 0].tolist()
            read = self._reads_ids(token) > self._reads_ids(other)
            if read and scale and own and _near(scale * outs[token] + own * outs[other], target):
                table: Any = self.model.get_submodule(other)  # which has a factor too: x-transformers
                size = abs(own / scale) * float(table.weight.detach().double().square().mean().sqrt())
                rows = outs[other] * own / scale
                return {"token": token, "norm": norm, "scale": _plain(scale), "position": size, "position_rows": rows}
        for token, n in ((path, n) for n in range(3) for path in outs) if norm is None else ():
            for others in combinations([path for path in outs if path != token], n):
                if factor := self._normed(outs[token] + sum(outs[path] for path in others), target):
                    more = {"norm": None, "scale": 1.0, "normed": True, "factor": factor}
                    return self._sorted(token, others, outs, more)
        for token in outs:
            for scale in (1.0, math.sqrt(self.width)):
                rest = target / scale - outs[token]
                if found := self._rest(rest):
                    return {"token": token, "norm": norm, "scale": scale, "position_rows": rest, "position": found}
        return "the stream does not begin with a sum of tables"

    def _normed(self, read: Tensor, given: Tensor) -> float | None:
        """The factor by which one is the other through a norm without weights, which is a function; None: it is not."""
        size = float(given.square().mean().sqrt())
        for factor in (1.0, float(f"{size:.5g}")) if read.shape == given.shape and size else ():
            if fitted_norm("", read.float(), given.float() / factor).kind != "unknown":
                return factor
        return None

    def _looked_up(self, path: str, table: nn.Embedding) -> Tensor | None:
        """The rows that a table was asked for, before a factor that the module itself multiplies them with."""
        ids, out = self.proof.tensors.get(Place(path, "input")), self.at(path, "output")
        if out is None or ids is None or ids.is_floating_point() or int(ids.max()) >= len(table.weight):
            return out
        rows = table.weight.detach()[ids.flatten()].double().cpu()
        return rows if _multiple(out, rows) is not None else out

    def dropout(self, start: Tensor) -> float:
        """Of an nn.Dropout that outputs what the stream begins with."""
        for path, module in self.model.named_modules():
            y = self.at(path, "output") if isinstance(module, nn.Dropout) else None
            if y is not None and y.shape == start.shape and torch.equal(y, start):
                return float(module.p)  # type: ignore[arg-type,unused-ignore]
        return 0.0

    def _sorted(
        self, token: str, others: tuple[str, ...], outs: dict[str, Tensor], found: dict[str, Any]
    ) -> dict[str, Any] | str:
        """Which of the tables is of tokens, positions and segments: a segment's rows are all one."""
        every = sorted((token, *others), key=lambda path: self._reads_ids(path), reverse=True)
        found["token"], rest = every[0], every[1:]
        for path in rest:
            alike = bool((outs[path] == outs[path][:1]).all())
            role = "segment" if alike else "position"
            if role in found:
                return f"{path} and {found[role]} are both added, and both could be the {role} table"
            found[role] = path
            if role == "position":
                found["position_rows"] = outs[path]
        return found

    def _reads_ids(self, path: str) -> tuple[bool, bool, int]:
        """Whether a table reads tokens, not a counter; where both count, as ids may, what the model calls its table.

        Last the larger one.
        """
        ids = self.proof.tensors.get(Place(path, "input"))
        flat = torch.zeros(1) if ids is None else ids.flatten()
        counter = flat.numel() < 2 or flat.is_floating_point() or len(set((flat[1:] - flat[:-1]).tolist())) == 1
        table: Any = self.model.get_submodule(path)
        return not counter, table is self._own_table(), int(table.weight.shape[0])

    def _own_table(self) -> nn.Module | None:
        """What a model of transformers says its table of tokens is."""
        with suppress(AttributeError, NotImplementedError, TypeError):
            return cast(nn.Module, self.model.get_input_embeddings())  # type: ignore[operator]
        return None

    def room(self, position: str | float) -> dict[str, int]:
        """How many tokens a table of positions has rows for, from the first one that is read; of a formula nothing."""
        if not isinstance(position, str):
            return {}
        if position in dict(self.model.named_parameters()):
            return {"seq_len": self.model.get_parameter(position).shape[-2]}
        table: Any = self.model.get_submodule(position)
        ids = self.proof.tensors.get(Place(position, "input"))
        first = 0 if ids is None or ids.is_floating_point() else int(ids.min())
        return {"seq_len": table.weight.shape[0] - first}

    def _rest(self, rest: Tensor) -> str | float | None:
        """A parameter whose first rows these are; or what sines and cosines are in the mean square."""
        for name, p in self.model.named_parameters():
            fits = p.shape[-1:] == rest.shape[-1:] and p.numel() >= rest.numel()
            if fits and _near(rows_of(p.detach())[: len(rest)], rest):
                return name
        return SINUSOIDS if _kind(rest) == "sinusoidal" else None

    def patches(self, start: Tensor) -> tuple[EmbeddingMap | str, dict[str, Any]]:
        """The map of patches, the positions and the class tokens."""
        norm, target = self.norm_to(start)
        for path, module in self.model.named_modules():
            out = self.proof.tensors.get(Place(path, "output"))
            if not isinstance(module, nn.Conv2d) or out is None or out.ndim != 4 or out.shape[1] != self.width:
                continue
            cells = out[0].flatten(1).mT.double().cpu()
            n = len(target) - len(cells)
            if not 0 <= n <= 2 or module.kernel_size != module.stride:
                continue
            for name, p in [*self.model.named_parameters(), ("", torch.zeros(len(target), self.width))]:
                table = rows_of(p.detach()) if p.ndim and p.shape[-1] == self.width else None
                if table is None or table.shape != target.shape or not _near(cells + table[n:], target[n:]):
                    continue
                size = float(target.abs().max())
                tokens = [self._parameter(row, size) for row in (target - table)[:n]]
                if None in tokens:
                    return "the vectors in front of the patches are not parameters", {}
                fields = {
                    "input": "patches",
                    "patch_dim": int(module.weight[0].numel()),
                    "seq_len": len(target),
                    "class_token": n > 0,
                    "distillation_token": n > 1,
                    "embedding_norm": norm is not None,
                    "embedding_dropout": self.dropout(target),
                    "positions": "learned" if name else "none",
                }
                mapped = EmbeddingMap(
                    token=path, position=name or None, norm=norm, class_tokens=[t for t in tokens if t is not None]
                )
                return mapped, fields
        return "the stream does not begin with a map of patches and a table of positions", {}

    def _parameter(self, row: Tensor, size: float) -> str | None:
        """Path of the parameter that this row is, to the rounding of a sum of that size; vectors of one axis last."""
        for name, p in sorted(self.model.named_parameters(), key=lambda named: -named[1].ndim):
            if p.numel() == row.numel():
                held = p.detach().double().flatten().cpu()
                if float((held - row).abs().max()) <= LIMIT * size:
                    return name
        return None

    def transform(self, end: Tensor, x: Tensor, act: str) -> str | None:
        """The map that reads the stream's end, whose activation a norm brings to the head."""
        for path in self.maps():
            read, gave = self.at(path, "input"), self.at(path, "output")
            if read is None or gave is None or read.shape != end.shape or not torch.equal(read, end):
                continue
            bent = torch.from_numpy(np.asarray(activation(act).function(gave.numpy())))
            norm, inside = self.norm_to(x)
            if norm is not None and _near(bent, inside):
                return path
        return None


def _kind(rows: Tensor) -> str:
    """`sinusoidal` where all rows have the mean square of sines and cosines."""
    return "sinusoidal" if bool((rows.square().mean(-1) - 0.5).abs().max() < 1e-4) else "learned"


def _multiple(one: Tensor, other: Tensor) -> float | None:
    """The factor with which the other is the one; None where it is not a multiple."""
    if one.shape != other.shape:
        return None
    factor = float((one * other).sum() / (other * other).sum().clamp_min(1e-300))
    return factor if factor and _near(factor * other, one) else None


def _near(one: Tensor, other: Tensor) -> bool:
    fits = one.shape == other.shape
    return fits and float((one - other).abs().max()) <= LIMIT * (float(other.abs().max()) or 1.0)


def _plain(factor: float) -> float:
    """1 where it is 1 to rounding."""
    return 1.0 if abs(factor - 1) < LIMIT else factor
