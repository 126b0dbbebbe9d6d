"""Nearness to the identity against Jacobians that are written out, and distances against their definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import own_model
from diagnosing import mapping_of, text_batch, tiny
from diagnosis.test_removal import silent
from diagnosis.test_signal import counted, padded, streams
from signalprop.attachment.anatomy import attach
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.result import Identity
from signalprop.errors import InputError

SKIP = 2


def found_of(model: nn.Module, **options: Any) -> Identity:
    batch = options.pop("batch", None) or text_batch(model, 1, 8)
    return identity(attach(model, mapping_of(model)), [batch], **{"skip_first": SKIP, **options})


def distance(model: Any, layer: int) -> float:
    """|J - I|_F over the root of the number of rows, of a layer's whole Jacobian, without the first positions' rows."""
    batch = text_batch(model, 1, 8)
    module = model.get_submodule(mapping_of(model).layers[layer])
    kept: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: kept.append((args, kwargs)), with_kwargs=True)
    streams(model, batch)
    handle.remove()
    args, kwargs = kept[0]

    def through(x: Tensor) -> Tensor:
        out = module(x, *args[1:], **kwargs)
        return out if isinstance(out, Tensor) else out[0]

    x = args[0].detach()
    n = x.numel()
    jacobian = torch.func.jacrev(through)(x).reshape(n, n).detach().double()
    rows = (jacobian - torch.eye(n))[SKIP * x.shape[-1] :]
    return float((rows.square().sum() / len(rows)).sqrt())


class TestJacobian:
    @pytest.mark.parametrize(
        "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3", "llama", "bert"))]
    )
    def test_within_its_error(self, family: str) -> None:
        model = tiny(family, 2, attn_implementation="eager")  # jacrev warns of other kernels
        found = found_of(model, probes=200)
        for layer, estimate in enumerate(found.jacobian):
            assert estimate.value is not None and estimate.standard_error is not None
            wanted = distance(model, layer)
            assert abs(estimate.value - wanted) < 4 * estimate.standard_error
            assert estimate.standard_error < 0.03 * wanted

    def test_errors_are_what_they_say(self) -> None:
        """Over seeds, estimates spread as much as each of them says."""
        model = tiny("gpt2", 1, attn_implementation="eager")
        wanted = distance(model, 0)
        found = [found_of(model, probes=6, seed=seed).jacobian[0] for seed in range(40)]
        scores = [(e.value - wanted) / e.standard_error for e in found if e.value and e.standard_error]
        assert len(scores) == 40
        assert 0.8 < float(np.std(scores)) < 1.6  # of six probes the error itself is uncertain

    def test_identity_layers_give_0(self) -> None:
        model = tiny("llama", 3)
        silent(model, [1])
        found = found_of(model)
        assert found.jacobian[1].value == 0.0 and found.jacobian[1].standard_error == 0.0
        assert found.cosine[1] == pytest.approx(1.0)
        assert found.angular[0][1] == pytest.approx(0.0, abs=3e-4)  # arccos of a rounded 1
        assert found.jacobian[0].value and found.jacobian[2].value

    def test_padding_is_left_out(self) -> None:
        """Rows and tokens of padding change nothing."""
        model = tiny("llama", 1)
        batch = padded(model)
        one = replace(batch, tokens=batch.tokens[2:], targets=batch.targets[2:], keep=batch.keep[2:])  # type: ignore[index]
        short = replace(one, tokens=one.tokens[:, :9], targets=one.targets[:, :9], keep=None)  # type: ignore[index]
        long, wanted = found_of(model, batch=one, probes=150), found_of(model, batch=short, probes=150)
        assert long.cosine == pytest.approx(wanted.cosine, abs=1e-5)
        for a, b in zip(long.jacobian, wanted.jacobian, strict=True):
            assert a.value is not None and b.value is not None
            assert abs(a.value - b.value) < 4 * math.hypot(a.standard_error or 0, b.standard_error or 0)


class TestAngles:
    @pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
    def test_by_definition(self, family: str) -> None:
        model = tiny(family, 3)
        batch = padded(model)
        seen, keep = streams(model, batch), counted(batch, SKIP)
        found = found_of(model, batch=batch, probes=0, limit=3)
        for span in range(1, 4):
            row = found.angular[span - 1]
            assert row[4 - span :] == (None,) * (span - 1)
            for k in range(4 - span):
                # the mean is over sequences, each with the mean of its own tokens
                cosine = F.cosine_similarity(seen[k], seen[k + span], -1).clamp(-1, 1)
                angle = torch.arccos(cosine) / math.pi
                wanted = np.mean([float(angle[b][keep[b]].mean()) for b in range(3)])
                assert row[k] == pytest.approx(wanted, abs=1e-4)
                if span == 1:
                    wanted = np.mean([float(cosine[b][keep[b]].mean()) for b in range(3)])
                    assert found.cosine[k] == pytest.approx(wanted, abs=1e-5)

    @pytest.mark.parametrize("family", ["t5", "bart"])
    def test_stretches_stay_within_a_stack(self, family: str) -> None:
        model = tiny(family, 2)
        batch = text_batch(model, 1, 10)
        batch = replace(batch, decoder_tokens=batch.decoder_tokens[:, :7], targets=batch.targets[:, :7])  # type: ignore[index]
        found = found_of(model, batch=batch)
        assert [v is None for v in found.angular[0]] == [False] * 4
        assert [v is None for v in found.angular[1]] == [False, True, False, True]
        assert found.angular[2:] == ((None,) * 4,) * 2
        assert all(e.value for e in found.jacobian)


def test_refused() -> None:
    own = own_model.own_model()
    mapping = mapping_of(own)
    with pytest.raises(InputError, match=r"does not name one module per layer; give Mapping.layers"):
        identity(attach(own, mapping), [])
    with pytest.raises(InputError, match="no data to run"):
        identity(attach(tiny("llama", 1), mapping_of(tiny("llama", 1))), [])
    ids = own_model.own_ids().numpy()
    from signalprop.data.batches import Batch

    wrong = replace(mapping, layers=["blocks.0.attn.qkv", "blocks.1", "blocks.2"])
    with pytest.raises(InputError, match="layer 0: its module does not map a stream to a stream"):
        identity(attach(own, wrong), [Batch(ids, ids)])
