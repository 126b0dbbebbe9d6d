"""Gradients in float16 at a loss scale, against torch's own cast of the gradients of a plain backward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diagnosing import diagnosed, text_batch, tiny
from signalprop.attachment.anatomy import attach
from signalprop.diagnosis import Diagnosis
from signalprop.diagnosis.loss_scale import GradientExponents
from signalprop.diagnosis.result import ScaledGradients
from signalprop.diagnosis.signal import observe
from signalprop.diagnosis.verdict import verdicts
from signalprop.errors import InputError
from signalprop.report.diagnosis_tables import screen
from signalprop.results.findings import Finding


def by_hand(model: Any, scale: float) -> dict[str, list[Tensor]]:
    """By name, the scaled gradients of every sequence, in float32."""
    out: dict[str, list[Tensor]] = {}
    batch = text_batch(model)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):  # type: ignore[arg-type]
        model.zero_grad()
        held: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, y, held=held: (y.retain_grad(), held.append(y))[0])
            for layer in model.model.layers
        ]
        F.cross_entropy(model(torch.as_tensor(tokens)[None]).logits[0], torch.as_tensor(targets)).backward()
        for hook in hooks:
            hook.remove()
        for name, p in model.named_parameters():
            if p.ndim > 1:
                out.setdefault(name, []).append(p.grad * scale)
        for k, y in enumerate(held):
            assert y.grad is not None
            out.setdefault(f"stream after layer {k}", []).append(y.grad * scale)
    model.zero_grad()
    return out


def counted(model: Any, scale: float) -> ScaledGradients:
    attached = attach(model)
    exponents = GradientExponents(attached, scale)
    observe(attached, [text_batch(model)], exponents=exponents)
    found = exponents.found()
    assert found is not None
    return found


@pytest.mark.parametrize("scale", [1e-3, 3.0, 1e8])
def test_as_torch_casts_them(scale: float) -> None:
    """At a scale that loses much, one that loses little and one that overflows."""
    model = tiny("llama", 2)
    found, wanted = counted(model, scale), by_hand(model, scale)
    assert {t.name for t in found.tensors} == set(wanted)
    assert {t.layer for t in found.tensors} == {None, 0, 1}
    for one in found.tensors:
        x = torch.cat([g.flatten() for g in wanted[one.name]])
        x, half = x[x != 0], x[x != 0].half()
        n = len(x)
        assert one.n == n and one.largest == pytest.approx(float(x.abs().max()), rel=1e-3)
        assert one.zero == pytest.approx(float((half == 0).sum()) / n, abs=2 / n)
        small = (half != 0) & (x.abs() < 2.0**-14)
        assert one.subnormal == pytest.approx(float(small.sum()) / n, abs=4 / n)
        assert one.infinite == pytest.approx(float(half.isinf().sum()) / n, abs=2 / n)


def test_the_scale_that_fits() -> None:
    """At it the largest entry lies 4 to 8 times below the end of the format, wherever one starts from."""
    model = tiny("llama", 2)
    first = counted(model, 1e-3)
    fitting = counted(model, first.fitting)
    largest = max(t.largest or 0.0 for t in fitting.tensors)
    assert 65520 / 8 < largest <= 65520 / 4 and fitting.fitting == first.fitting == 2.0 ** round(
        math.log2(first.fitting)
    )
    assert max(t.zero for t in fitting.tensors) == pytest.approx(first.lost, abs=1e-4) == fitting.lost


def test_it_is_said_with_the_scale_that_would_fit() -> None:
    model = tiny("llama", 2)
    found = diagnosed(model, loss_scale=1e-4, trials=False, jacobian_sequences=0)
    (one,) = [f for f in found.findings if f.name == "loss scale"]
    assert one.severity == "warning" and "become 0" in one.text and one.layers
    assert found.gradients is not None and one.remedy.startswith(f"a loss scale of {found.gradients.fitting:,.0f}:")
    assert Diagnosis.from_json(found.to_json()) == found and "stream to 0" in str(found)
    assert "gradients in float16, loss x 0.0001: of a tensor" in screen(found)
    (large,) = findings_at(found, counted(model, 1e8))
    assert "overflow" in large.text and large.remedy == one.remedy
    assert not findings_at(found, counted(model, found.gradients.fitting))


def findings_at(found: Diagnosis, gradients: ScaledGradients) -> list[Finding]:
    other = found.model_copy(update={"gradients": gradients})
    return [f for f in verdicts(other) if f.name == "loss scale"]


def test_nothing_else_changes_and_nothing_is_left() -> None:
    """The signal and its gradient are the same with and without; parameters have no gradient afterwards."""
    model = tiny("gpt2", 2)
    attached, batch = attach(model), text_batch(model)
    plain, counting = (observe(attached, [batch], exponents=e)[0] for e in (None, GradientExponents(attached, 64.0)))
    assert [s.gradient for s in counting] == pytest.approx([s.gradient for s in plain], rel=1e-6)
    assert [s.variance for s in counting] == [s.variance for s in plain]
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_a_scale_below_0_is_refused() -> None:
    with pytest.raises(InputError, match="loss_scale is -1; expected a number above 0"):
        diagnosed(tiny("llama", 1), loss_scale=-1.0)
