"""A module that nobody has described, with the outputs of nanoGPT: every verb takes it as it is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import signalprop as sp
from own_model import LENGTH, VOCABULARY, OwnGPT
from signalprop.data.batches import Batch

IDS = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
BATCH = Batch(tokens=IDS[:, :-1].numpy(), targets=IDS[:, 1:].numpy())


class NanoGPT(nn.Module):
    """(logits, loss) where there are targets; without, the last position's logits, and None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = OwnGPT(4)
        self.wte, self.wpe, self.blocks, self.ln_f, self.head = (m for _, m in inner.named_children())

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_it_is_measured_as_the_same_module_with_a_mapping() -> None:
    own, nano = OwnGPT(4), NanoGPT()
    own.load_state_dict(nano.state_dict())
    expected = sp.measure(own, BATCH)
    as_arguments = sp.measure(nano, {"idx": IDS[:, :-1], "targets": IDS[:, 1:]})
    for found in (as_arguments, sp.measure(nano, BATCH)):
        assert found.gradient is not None and expected.gradient is not None
        for point in ("stream_out", "branch"):
            np.testing.assert_allclose(found.forward[point].variance, expected.forward[point].variance, rtol=1e-6)
            np.testing.assert_allclose(found.gradient[point].variance, expected.gradient[point].variance, rtol=1e-5)
    assert sp.measure(nano).forward["stream_out"].variance[-1] > 0  # text, of as many tokens as it has positions for


def test_it_is_predicted_as_the_same_module_with_a_mapping() -> None:
    own, nano = OwnGPT(4).eval(), NanoGPT().eval()
    own.load_state_dict(nano.state_dict())
    found, expected = sp.predict(nano), sp.predict(sp.read_parametrization(own))
    assert (found.architecture.seq_len, found.architecture.vocab_size) == (LENGTH, VOCABULARY)
    np.testing.assert_allclose(found.forward["branch"].variance, expected.forward["branch"].variance, rtol=1e-6)
    assert sp.compare(nano, batches=[BATCH]).predicted.gradient_ratio == pytest.approx(expected.gradient_ratio, rel=0.2)


def test_it_is_repaired_and_folded_without_anything_given() -> None:
    nano = NanoGPT().eval()
    sp.apply(nano, "deepscalelm", seed=0)
    assert sp.check(nano, "deepscalelm").ok
    with torch.no_grad():
        before = nano(IDS, IDS)[0]
        after = sp.fold(copy.deepcopy(nano))(IDS, IDS)[0]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_it_is_diagnosed() -> None:
    nano = NanoGPT()
    found = sp.diagnose(nano, [BATCH], skip_first=0)
    with torch.no_grad():
        expected = nano(torch.as_tensor(BATCH.tokens), torch.as_tensor(BATCH.targets))[1]
    assert found.loss is not None and expected is not None and found.loss.value == pytest.approx(float(expected), 1e-5)


def test_it_is_watched_with_its_scores() -> None:
    nano = NanoGPT()
    with sp.SignalMonitor(nano, every=1, batch=BATCH, skip_first=0) as monitor:
        loss = nano(IDS[:, :-1], IDS[:, 1:])[1]
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        numbers = monitor.step(loss)
    assert numbers is not None and monitor.warnings == []
    assert {"signal/layer_3/score_std", "signal/layer_3/variance", "signal/outside"} <= numbers.keys()


def test_two_losses_are_no_loss() -> None:
    class Two(NanoGPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
            logits, loss = super().forward(idx, targets)
            assert loss is not None
            return logits, loss, loss * 2

    with pytest.raises(sp.InputError, match="give loss="):
        sp.measure(Two(), {"idx": IDS[:, :-1], "targets": IDS[:, 1:]})
