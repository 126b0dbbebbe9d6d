"""The signal of every layer against `measure`, against transformers' own attention weights, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp
from choice import some
from diagnosing import LENGTH, logits_of, mapping_of, text_batch, tiny, with_weights
from measurement.conftest import models
from models.test_families import NAMES, theirs
from signalprop.attachment.anatomy import attach
from signalprop.data.batches import Batch, default_statistics
from signalprop.diagnosis.heads import HeadSums, _products
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.result import LayerSignal
from signalprop.diagnosis.signal import observe
from signalprop.errors import InputError
from signalprop.models.synthetic import synthetic_batch
from signalprop.network.layout import layout

SKIP = 3


def observed(model: nn.Module, batch: Batch | None = None, **options: Any) -> tuple[LayerSignal, ...]:
    batch = batch or text_batch(model)
    return observe(attach(model, mapping_of(model)), [batch], **{"skip_first": SKIP, **options})[0]


def padded(model: nn.Module) -> Batch:
    """Three sequences, two of which end early."""
    batch = text_batch(model, 3)
    keep = np.ones((3, LENGTH), np.bool_)
    keep[1, 15:] = keep[2, 9:] = False
    return replace(batch, keep=keep, targets=np.where(keep, batch.targets, -1))


def streams(model: Any, batch: Batch) -> list[Tensor]:
    """The stream before and behind every layer."""
    seen: list[Tensor] = []
    handles = [model.get_submodule(path).register_forward_hook(
        lambda _, args, kwargs, out: seen.extend(
            ([args[0]] if not seen else []) + [out if isinstance(out, Tensor) else out[0]]
        ), with_kwargs=True,
    ) for path in mapping_of(model).layers]  # fmt: skip
    logits_of(model, batch)
    for handle in handles:
        handle.remove()
    return [x.double() for x in seen]


def counted(batch: Batch, skip: int = SKIP) -> Tensor:
    """Positions that count."""
    keep = torch.ones(batch.tokens.shape, dtype=torch.bool)
    if batch.keep is not None:
        keep &= torch.as_tensor(batch.keep)
    return keep & (torch.arange(keep.shape[1]) >= skip)


class TestStreams:
    @pytest.mark.parametrize("family", ["gpt2", "bert", "gemma3"])
    def test_by_hand(self, family: str) -> None:
        model = tiny(family, 3)
        batch = padded(model)
        keep, real = counted(batch), counted(batch, 0)
        seen = streams(model, batch)
        for k, found in enumerate(observed(model, batch)):
            before, x = seen[k], seen[k + 1]
            variance = x.var(-1, correction=0)
            assert found.variance == pytest.approx(float(variance[keep].mean()), rel=1e-5)
            assert found.variance_in == pytest.approx(float(before.var(-1, correction=0)[keep].mean()), rel=1e-5)
            assert found.first_variance == pytest.approx(float(variance[real & ~keep].mean()), rel=1e-5)
            rms = float(x[keep].square().mean().sqrt())
            assert found.outlier == pytest.approx(float(x[keep].abs().max()) / rms, rel=1e-5)
            assert found.first_outlier == pytest.approx(float(x[real & ~keep].abs().max()) / rms, rel=1e-5)
            cosine = F.cosine_similarity((x - before)[keep], before[keep], -1).mean()
            assert found.alignment == pytest.approx(float(cosine), abs=1e-5)
            kernel = F.normalize(x[0][keep[0]], dim=-1)
            values = torch.linalg.eigvalsh(kernel @ kernel.T).clamp(min=1e-30) / len(kernel)
            assert found.effective_rank == pytest.approx(float((-(values * values.log()).sum()).exp()), rel=1e-4)

    @pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
    def test_as_measured(self, family: str) -> None:
        """Without first positions to leave out: token correlation and gradient are those of `measure`."""
        model = tiny(family, 3)
        batch = text_batch(model, 1)
        profile = sp.measure(model, batch)
        ends = [group[-1] for group in groups(layout(profile.architecture))]
        for row, found in zip(ends, observed(model, batch, skip_first=0), strict=True):
            stream = profile.forward["stream_out"]
            assert found.token_correlation == pytest.approx(stream.token_correlation[row], abs=1e-6)
            assert found.gradient == pytest.approx(profile.gradient["stream_out"].variance[row], rel=1e-4)

    def test_gradients_of_tokens_that_count(self) -> None:
        model = tiny("llama", 3)
        batch = padded(model)
        found = observed(model, batch, gradient_sequences=3)
        grads: list[list[float]] = []
        for b in range(3):
            n = int(batch.keep[b].sum())  # type: ignore[index]
            ids = torch.as_tensor(batch.tokens[b : b + 1, :n])  # type: ignore[index]
            outs: list[Tensor] = []

            def keeps(_: nn.Module, __: Any, out: Any, outs: list[Tensor] = outs) -> None:
                outs.append(out)
                outs[-1].retain_grad()

            handles = [layer.register_forward_hook(keeps) for layer in model.model.layers]
            targets = torch.as_tensor(batch.targets[b, :n])
            F.cross_entropy(model(ids).logits[0], targets).backward()
            for handle in handles:
                handle.remove()
            grads.append([float(x.grad[0, SKIP:].double().var(correction=0)) for x in outs])  # type: ignore[union-attr]
        mean = np.mean(grads, 0)
        np.testing.assert_allclose([s.gradient for s in found], mean / mean[-1], rtol=1e-4)

    def test_batches_are_averaged_token_by_token(self) -> None:
        model = tiny("gpt2", 2)
        batches = [text_batch(model, 2), text_batch(model, 3, start=200)]
        together = Batch(*(np.concatenate([getattr(b, name) for b in batches]) for name in ("tokens", "targets")))
        one, _ = observe(attach(model, mapping_of(model)), batches, skip_first=SKIP, gradient_sequences=0)
        other = observed(model, together, gradient_sequences=0)
        for a, b in zip(one, other, strict=True):
            for name in ("variance", "first_variance", "attention_share", "alignment", "outlier", "entropy"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name

    def test_the_model_is_left_as_it_was(self) -> None:
        model = tiny("llama", 2)
        model.model.norm.weight.requires_grad_(False)
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
        flags = [p.requires_grad for p in model.parameters()]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        observed(model)
        assert [p.requires_grad for p in model.parameters()] == flags
        assert [name for name, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    @pytest.mark.slow
    def test_a_whole_layer_of_multipliers(self) -> None:
        """Shares are of the signal that the scheme's own numbers describe, not of the gauge.

        Single networks scatter by 15 %, so the mean of eight; a share without the multipliers would be 1.5 times that.
        """
        ratios = []
        for seed in range(8):
            model = tiny("bert", 3, seed=seed)
            sp.apply(model, "deepnorm", initialize=False, change_function=True)
            batch = text_batch(model, 1)
            profile = sp.measure(model, batch, backward=False)
            alpha = (2 * profile.architecture.n_layers) ** 0.25  # of decoders and encoders alike
            branch = profile.forward["branch"].variance[1::2]
            expected = branch / (alpha**2 * profile.forward["stream_in"].variance[1::2] + branch)
            shares = [found.feed_forward_share for found in observed(model, batch, skip_first=0)]
            ratios.append(np.array(shares, float) / expected)
        assert np.mean(ratios, 0) == pytest.approx(np.ones(3), abs=0.15)


class TestAttention:
    @pytest.mark.parametrize(
        ("family", "kernel", "masked"),
        some(
            [(family, "sdpa", True) for family in ("gpt2", "llama", "bert", "qwen2", "gemma3", "opt")]
            + [(family, "eager", False) for family in ("gpt2", "gemma3")],
            (("gpt2", "eager", False), ("bert", "sdpa", True), ("qwen2", "sdpa", True), ("gemma3", "sdpa", True)),
        ),
    )
    def test_entropy_and_scores_by_its_own_weights(self, family: str, kernel: str, masked: bool) -> None:
        """Along a row of weights A the scores are log A, up to a number."""
        model = tiny(family, 3, attn_implementation="eager")
        batch = padded(model) if masked else text_batch(model)
        keep = counted(batch)
        make = mapping_of(model).arguments
        assert make is not None
        with torch.no_grad():
            arguments = {k: v for k, v in make(batch).items() if v is not None}
            weights = model(**arguments, output_attentions=True).attentions
        model = with_weights(tiny(family, 3, attn_implementation=kernel), model)
        for k, found in enumerate(observed(model, batch)):
            a = weights[k].double()
            seen = a > 0
            counts = seen.sum(-1)
            logs = torch.where(seen, a.clamp(min=1e-300).log(), 0.0)
            entropy = -(a * logs).sum(-1) / counts.clamp(min=2).log()
            mean = logs.sum(-1) / counts
            variance = torch.where(seen, (logs - mean[..., None]) ** 2, 0.0).sum(-1) / counts
            for values, got in ((entropy, found.entropy), (variance, [s**2 for s in found.score_std])):  # type: ignore[operator]
                wanted = values.transpose(0, 1)[:, keep].mean(-1)
                np.testing.assert_allclose(got, wanted, rtol=2e-4)

    def test_a_mask_of_numbers_hides_keys_and_is_added_to_the_scores(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        q, k, bias = (torch.randn(2, 4, 6, n, generator=drawn) for n in (8, 8, 6))
        hidden = torch.rand(2, 1, 6, 6, generator=drawn) < 0.3
        hidden[..., 0] = False
        for shift in (0.0, bias):
            found, keep = HeadSums(), torch.ones(2, 6, dtype=torch.bool)
            mask = torch.zeros(2, 4, 6, 6).add(shift).masked_fill(hidden, torch.finfo(torch.float32).min)
            _products(found, keep, q, k, q, attn_mask=mask)
            weights = (q @ k.mT / 8**0.5 + mask).softmax(-1).double()
            counts = (~hidden).sum(-1)
            entropy = -torch.special.xlogy(weights, weights).sum(-1) / counts.clamp(min=2).log()
            wanted = (entropy * (counts > 1)).sum((0, 2)) / float((counts > 1).sum())
            np.testing.assert_allclose(found.told()["entropy"], wanted, rtol=1e-5)

    @pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
    def test_shares_of_heads_by_ablation(self, family: str) -> None:
        """What a head adds is what the output map makes of the head alone."""
        model = tiny(family, 2)
        batch = text_batch(model)
        found = observed(model, batch, gradient_sequences=0)
        output: Any = model.get_submodule(str(mapping_of(model).sublayers[0].weights["output"])).requires_grad_(False)
        given: list[Tensor] = []
        handle = output.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
        logits_of(model, batch)
        handle.remove()
        x = given[0].reshape(2, LENGTH, -1)[:, SKIP:]
        bias = output(torch.zeros_like(x))
        parts = []
        for h in range(4):
            alone = torch.zeros_like(x)
            alone[..., 8 * h : 8 * h + 8] = x[..., 8 * h : 8 * h + 8]
            parts.append(float((output(alone) - bias).double().square().sum()))
        assert found[0].head_share == pytest.approx(np.array(parts) / sum(parts), rel=1e-4)


class TestNormFactor:
    @pytest.mark.parametrize("name", models(NAMES[::4]))
    def test_1_in_every_fourth_family(self, name: str) -> None:
        """Where branches read norms: the norm of the architecture's kind, by its own weights and epsilon."""
        model = theirs(name).float()
        mapping = mapping_of(model)
        a = mapping.architecture
        found, _ = observe(
            attach(model, mapping), [synthetic_batch(a, default_statistics(a), 2, 0)], gradient_sequences=0
        )
        bare = [item.norm is None for item in mapping.sublayers]  # ModernBERT: after the embedding
        reads = [place in ("pre", "sandwich") and not bare[2 * i] for i, place in enumerate(a.placements)]
        assert [all(v is not None for v in s.norm_factor) for s in found] == reads
        for signal in found:
            assert all(v is None or v == pytest.approx(1.0, abs=2e-5) for v in signal.norm_factor)


class TestEdges:
    def test_nothing_to_run_on(self) -> None:
        model = tiny("llama", 1)
        with pytest.raises(InputError, match="no data to run"):
            observe(attach(model, mapping_of(model)), [])
        with pytest.raises(InputError, match=r"sequences of 4 tokens have none after the first 4.*smaller skip_first"):
            observed(model, text_batch(model, 1, 4), skip_first=4)

    def test_padding_that_is_not_finite_is_nobody_s_concern(self) -> None:
        """A sequence's padding may hold anything."""
        model = tiny("llama", 2)
        batch = padded(model)
        clean = observed(model, batch, gradient_sequences=0)

        def spoil(_: nn.Module, args: Any, out: Any) -> Any:
            return out.masked_fill(~torch.as_tensor(batch.keep)[..., None], math.inf)

        handle = model.model.layers[1].register_forward_hook(spoil)
        found = observed(model, batch, gradient_sequences=0)
        handle.remove()
        assert found == clean and all(s.finite for s in found)
