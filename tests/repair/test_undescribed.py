"""A module that nobody has described, with the outputs of nanoGPT: every verb takes it as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import signalprop as sp
from choice import some
from own_model import LENGTH, VOCABULARY, D, OwnGPT
from signalprop.attachment.found_roles import mapping_with_roles as roles
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


@pytest.mark.parametrize("scheme", some(["layerscale", "deepscalelm"], ("layerscale",)))
def test_it_is_loaded_again(scheme: str, tmp_path: Path) -> None:
    nano = NanoGPT().eval()
    sp.apply(nano, scheme, seed=0)
    sp.save(nano, tmp_path / "saved")
    again = sp.load(tmp_path / "saved", NanoGPT()).eval()
    torch.testing.assert_close(again(IDS, IDS)[0], nano(IDS, IDS)[0])
    assert sp.check(again).ok
    assert sp.measure(again, BATCH).forward["branch"].variance == pytest.approx(
        sp.measure(nano, BATCH).forward["branch"].variance, rel=1e-4
    )


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
        loss.backward()  # type: ignore[no-untyped-call]
        numbers = monitor.step(loss)
    assert numbers is not None and monitor.warnings == []
    assert {"signal/layer_3/score_std", "signal/layer_3/variance", "signal/outside"} <= numbers.keys()


def watched(model: nn.Module, steps: int = 3) -> dict[str, float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    with sp.SignalMonitor(model, every=1, skip_first=0) as monitor:
        for _ in range(steps):
            loss = model(IDS, IDS)[1]
            loss.backward()
            numbers = monitor.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert numbers is not None
    return numbers


class Plain(NanoGPT):
    """Its loss is PyTorch's by default, to which -1 is no target."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, _ = super().forward(idx, idx)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("scheme", ["", "stable-resnet"])
def test_it_is_watched_in_training_whatever_its_loss_leaves_out(
    scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[Any] = []
    monkeypatch.setattr("signalprop.attachment.anatomy.mapping_with_roles", lambda *a: proofs.append(0) or roles(*a))
    nano = Plain()
    if scheme:
        sp.apply(nano, scheme, seed=0)
    proofs.clear()
    numbers = watched(nano)
    assert {"signal/layer_3/score_std", "signal/layer_3/update", "signal/outside"} <= numbers.keys()
    assert not caplog.records
    assert len(proofs) == (not scheme)  # what the weights are is proved once, not at every sample


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """A process has one precision for all its accelerators, the first one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("no_accelerator")
def test_it_is_watched_where_accelerate_casts(caplog: pytest.LogCaptureFixture) -> None:
    prepared: Any = Accelerator(cpu=True, mixed_precision="bf16").prepare(NanoGPT())
    forward = prepared.forward
    assert {"signal/layer_3/score_std", "signal/outside"} <= watched(prepared).keys()
    assert prepared.forward is forward and prepared(IDS, IDS)[0].dtype == torch.float32
    assert not [record for record in caplog.records if record.name.startswith("signalprop")]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_is_watched_inside_its_compiled_graph(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    expected, compiled = watched(NanoGPT()), watched(torch.compile(NanoGPT(), backend=backend))  # type: ignore[arg-type]
    torch.compiler.reset()
    assert compiled == pytest.approx(expected, rel=1e-3)
    assert not [record for record in caplog.records if record.name.startswith("signalprop")]


def test_weights_that_are_not_proved_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nano = NanoGPT().bfloat16()
    numbers = watched(nano)
    assert "signal/layer_3/variance" in numbers and "signal/layer_3/score_std" not in numbers
    assert [record.message[:9] for record in caplog.records] == ["no bands:"]


@pytest.mark.slow
def test_adapters_and_wrappers_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    adapted = get_peft_model(NanoGPT(), LoraConfig(r=2, target_modules=["qkv", "proj"]))  # type: ignore[arg-type]
    for outer in (adapted, torch.compile(NanoGPT()), nn.DataParallel(NanoGPT())):
        assert str(sp.anatomy(outer)).startswith("NanoGPT")
    assert "signal/outside" in watched(adapted)
    assert [record.message[:20] for record in caplog.records] == ["step 1: no gradients"]


def test_two_losses_are_no_loss() -> None:
    class Two(NanoGPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
            logits, loss = super().forward(idx, targets)
            return logits, loss, loss * 2

    with pytest.raises(sp.InputError, match="give loss="):
        sp.measure(Two(), {"idx": IDS[:, :-1], "targets": IDS[:, 1:]})


class Stock(nn.Module):
    """PyTorch's own layers, as its tutorials have them."""

    def __init__(self, n_layers: int = 3, *, norm_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.table, self.places = nn.Embedding(VOCABULARY, D), nn.Parameter(torch.randn(1, LENGTH, D) / 50)
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.table(words) + self.places[:, : words.shape[1]]))

    def drawn_apart(self) -> Stock:
        """Layers that are not copies of the first."""
        for layer in self.layers.layers:
            layer.self_attn._reset_parameters()
            nn.init.normal_(layer.self_attn.in_proj_bias, std=0.3)
            for part in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
                part.reset_parameters()
        return self


@pytest.fixture
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def test_weights_of_pytorchs_own_attention_are_proved() -> None:
    model = Stock().drawn_apart()
    table, weights = sp.read_parametrization(model), model.layers.layers[1].self_attn
    a = table.architecture
    assert (a.n_heads, a.n_layers, a.qkv_bias, a.causal) == (4, 3, True, False)
    expected = weights.in_proj_weight[D : 2 * D].square().mean().sqrt().item()
    assert table.weights["key"][2] == pytest.approx(expected, rel=1e-5)
    assert table.biases["value"][2] == pytest.approx(weights.in_proj_bias[2 * D :].square().mean().sqrt().item(), 1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_pytorchs_own_layers_are_repaired_and_folded(no_fast_path: None, norm_first: bool) -> None:
    scheme = "lns" if norm_first else "deepscalelm"
    model = Stock(norm_first=norm_first).eval()
    sp.apply(model, scheme, seed=0)
    assert sp.check(model, scheme).ok
    with torch.no_grad():
        before = model(IDS)
        torch.testing.assert_close(sp.fold(model)(IDS), before, rtol=1e-4, atol=1e-5)


class StockViT(nn.Module):
    """Patches by a convolution, a class token, PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.token = nn.Conv2d(3, D, 8, 8), nn.Parameter(torch.randn(1, 1, D) / 50)
        self.places = nn.Parameter(torch.randn(1, 65, D) / 50)
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
        self.head = nn.Linear(D, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.layers(x)[:, 0])


def test_images_are_read_too() -> None:
    found = sp.compare(StockViT().eval(), seeds=1)
    assert (found.predicted.architecture.input, found.predicted.architecture.seq_len) == ("patches", 65)
    assert abs(np.log(found.predicted.forward["branch"].variance / found.measured.forward["branch"].variance)).max() < 1


def test_layers_that_are_copies_have_a_note() -> None:
    copied, apart = sp.predict(Stock().eval()), sp.predict(Stock().drawn_apart().eval())
    assert any("hold equal weights" in note for note in copied.notes)
    assert not any("hold equal weights" in note for note in apart.notes)


class Handwritten(nn.Module):
    """An RMSNorm with a gain alone, or a LayerNorm with gain and shift, under names of its own."""

    def __init__(self, gain: str, shift: str = "") -> None:
        super().__init__()
        self.of_gain, self.of_shift, self.eps = gain, shift, 1e-6
        self.register_parameter(gain, nn.Parameter(1 + 0.3 * torch.randn(D)))
        if shift:
            self.register_parameter(shift, nn.Parameter(0.1 * torch.randn(D)))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.of_shift else x
        x = getattr(self, self.of_gain) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x + getattr(self, self.of_shift) if self.of_shift else x

    def stock(self) -> nn.Module:
        """PyTorch's norm of the same numbers."""
        norm: Any = nn.LayerNorm(D, self.eps) if self.of_shift else nn.RMSNorm(D, self.eps)
        norm.weight = nn.Parameter(getattr(self, self.of_gain).detach().clone())
        if self.of_shift:
            norm.bias = nn.Parameter(getattr(self, self.of_shift).detach().clone())
        return norm


@pytest.mark.parametrize(
    "names",
    [
        ("scale", "shift"),
        *(pytest.param(names, marks=pytest.mark.slow) for names in (("g",), ("gamma",), ("gain", "b"))),
    ],
)
def test_norms_may_call_gain_and_bias_as_they_like(names: tuple[str, ...]) -> None:
    nano = NanoGPT().eval()
    nano.head.weight = nano.wte.weight  # type: ignore[union-attr]
    for home in (*nano.blocks, nano):  # type: ignore[misc]
        for name in [name for name, m in home.named_children() if isinstance(m, nn.LayerNorm)]:
            setattr(home, name, Handwritten(*names))
    usual = copy.deepcopy(nano)
    for home in (*usual.blocks, usual):  # type: ignore[misc]
        for name, norm in [*home.named_children()]:
            if isinstance(norm, Handwritten):
                setattr(home, name, norm.stock())
    table, expected = sp.read_parametrization(nano), sp.read_parametrization(usual)
    np.testing.assert_allclose(table.norm_gain, expected.norm_gain)
    np.testing.assert_allclose(table.norm_bias, expected.norm_bias)
    with torch.no_grad():
        before = nano(IDS, IDS)[0]
        sp.apply(nano, "stable-resnet", initialize=False, change_function=True)
        sp.fold(nano)
        sp.apply(nano, "deepscalelm", seed=0, redraw=True)
        sp.apply(usual, "deepscalelm", seed=0, redraw=True)
        assert sp.check(nano, "deepscalelm").ok
        drawn = usual(IDS, IDS)[0]
        torch.testing.assert_close(nano(IDS, IDS)[0], drawn, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sp.fold(nano)(IDS, IDS)[0], drawn, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, drawn)
