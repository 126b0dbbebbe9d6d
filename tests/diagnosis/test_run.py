"""A whole diagnosis: its sections, its JSON, and its words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.code_bases.series import Frames
from torch import nn

import own_model
from choice import some
from diagnosing import VOCABULARY, diagnosed, mapping_of, text_batch, tiny, transformers
from signalprop.data.batches import Batch
from signalprop.diagnosis import Diagnosis, diagnose
from signalprop.diagnosis.result import (
    SCHEMA,
    Cast,
    Data,
    Estimate,
    LayerSignal,
    Removal,
    Removed,
    Weights,
)
from signalprop.diagnosis.stream import loss
from signalprop.diagnosis.verdict import verdicts
from signalprop.diagnosis.whole_model_values import Ends, Tried
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.report.diagnosis_tables import screen
from signalprop.results.findings import Finding, Findings
from signalprop.results.text import network_in_words


class TestSections:
    @pytest.mark.parametrize("family", some(["gpt2", "t5", "gemma3"], ("t5",)))
    def test_everything(self, family: str) -> None:
        model = tiny(family, 2)
        n = 4 if family in ("t5", "bart") else 2
        before = {name: value.clone() for name, value in model.state_dict().items()}
        steps: list[tuple[str, int, int]] = []
        found = diagnosed(
            model, name="tiny", remove=True, cast=["float8_e5m2", "bfloat16"], cast_of=["both"],
            progress=lambda *step: steps.append(step),
        )  # fmt: skip
        assert (found.model, found.family.removesuffix("_text"), found.schema_) == ("tiny", family, SCHEMA)
        assert found.n_parameters == sum(p.numel() for p in model.parameters())
        assert found.data == Data(source="words", sequences=2, tokens=48, length=24, skip_first=4)
        whole = loss(model, [text_batch(model)])
        assert found.loss is not None and found.loss.value == whole.mean and found.perplexity == whole.perplexity
        assert len(found.signal) == len(found.weights) == n
        assert [s.layer for s in found.signal] == [w.layer for w in found.weights] == list(range(n))
        assert [s.stack for s in found.signal] == [w.stack for w in found.weights]
        assert found.identity is not None and len(found.identity.jacobian) == n
        assert found.removal is not None and len(found.removal.single) == n - (2 if family == "t5" else 0)
        assert [(c.format, c.scaled) for c in found.casts] == [
            ("float8_e5m2", False), ("float8_e5m2", True), ("bfloat16", False)
        ]  # fmt: skip
        assert list(dict.fromkeys(section for section, _, _ in steps)) == [
            "signal",
            "loss",
            "identity",
            "removal",
            "casts",
        ]
        assert all(done <= total for _, done, total in steps)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert json.loads(json.dumps(found.to_json())) == found.to_json()
        assert Diagnosis.from_json(json.loads(json.dumps(found.to_json()))) == found

    def test_an_own_model(self) -> None:
        """Without Mapping.layers there is the signal alone; with it, everything."""
        own = own_model.own_model()
        ids = own_model.own_ids().numpy()
        batch = Batch(ids, (ids + 1) % own_model.VOCABULARY)
        found = diagnose(own, [batch], cast=["bfloat16"])
        assert found.identity is None and len(found.signal) == 3 and found.casts[0].signal_to_noise == ()
        with pytest.raises(InputError, match=r"give Mapping.layers"):
            diagnose(own, [batch], remove=True)
        named = replace(mapping_of(own), layers=[f"blocks.{i}" for i in range(3)])
        found = diagnose(own, [batch], mapping=named, remove=True, cast=["bfloat16"])
        assert found.removal is not None and len(found.removal.single) == 3
        assert found.identity is not None and len(found.casts[0].signal_to_noise) == 3

    def test_predictions_stand_beside(self) -> None:
        """Fresh weights: what is measured is what theory says of their sizes, but for the few tokens here."""
        model = tiny("gpt2", 4, initializer_range=0.05, n_embd=128)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.fill_(1.0 if float(p.mean()) > 0.5 else 0.0)
        found = diagnosed(model, skip_first=0)
        for signal, weights in zip(found.signal, found.weights, strict=True):
            assert weights.predicted_variance == pytest.approx(signal.variance, rel=0.25)
            assert weights.predicted_gradient == pytest.approx(signal.gradient, rel=0.35)
        near = found.identity.jacobian if found.identity else ()
        for estimate, weights in zip(near, found.weights, strict=True):
            assert weights.identity == pytest.approx(estimate.value, rel=0.35)
        assert found.weights[0].std["up"] == pytest.approx(0.05, rel=0.05)


class TestRefused:
    def test_families(self) -> None:
        with pytest.raises(InputError, match=r"give a mapping.*no residual stream"):
            diagnose(nn.Linear(2, 2), [text_batch(tiny("llama", 1))])

    def test_tensors_in_place_of_batches(self) -> None:
        """One tensor is what the model reads."""
        model, ids = tiny("llama", 1), torch.arange(16).reshape(2, 8)
        options: dict[str, Any] = {"trials": False, "jacobian_sequences": 0}
        assert diagnose(model, ids, **options) == diagnose(model, inputs=ids, **options)

    def test_a_loader_of_batches(self) -> None:
        """What is neither a list nor an iterator gives Batches, too."""
        model = tiny("llama", 1)
        batch = text_batch(model)

        class Loader:
            def __iter__(self) -> Iterator[Batch]:
                yield batch

        options: dict[str, Any] = {"trials": False, "jacobian_sequences": 0}
        assert diagnose(model, Loader(), **options) == diagnose(model, [batch], **options)

    def test_images_are_what_the_theory_is_given(self) -> None:
        """The stream of a fresh ViT on dark images is predicted from these images, not from white patches."""
        config = transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32,
            patch_size=8, num_labels=5,
        )  # fmt: skip
        torch.manual_seed(0)
        model, images = transformers.ViTForImageClassification(config), torch.rand(4, 3, 32, 32) * 0.5
        found = diagnose(model, images, jacobian_sequences=0)
        assert (found.data.sequences, found.data.length, found.data.source) == (4, 16, "inputs")
        for signal, weights in zip(found.signal, found.weights, strict=True):
            assert signal.variance == pytest.approx(weights.predicted_variance, rel=0.3)
        assert diagnose(model, {"pixel_values": images}, jacobian_sequences=0) == found

    def test_a_model_of_which_only_the_stream_is_known(self) -> None:
        """A Conformer: its weights are not identified, and its stream is measured on what it is called with."""
        torch.manual_seed(0)
        frames = torch.randn(3, 15, 20)
        found = diagnose(Frames(), (frames, torch.full((3,), 15)))
        assert (found.data.sequences, found.data.length) == (3, 15)
        assert [signal.variance for signal in found.signal] == pytest.approx([1.0] * 4, abs=1e-3)  # each ends in a norm
        assert found.identity is not None and len(found.identity.jacobian) == 4
        assert "only the stream was looked at" in found.notes[0] and not found.weights
        measured = measure(Frames(), (frames, torch.full((3,), 15)), backward=False)
        assert network_in_words(measured.architecture).endswith("pre-norm, activation not known")

    def test_ids_beyond_the_vocabulary(self) -> None:
        bad = Batch(np.full((1, 8), VOCABULARY), np.zeros((1, 8), np.int64))
        with pytest.raises(InputError, match=r"the vocabulary is 0\.\.96"):
            diagnose(tiny("llama", 1), [bad])


class TestFiles:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": "signalprop/diagnosis/2"}, "expected schema 'signalprop/diagnosis/1'"),
            ({"layers": 3}, "there is no such field"),
            ({"n_parameters": "many"}, "n_parameters"),
        ],
    )
    def test_other_files(self, change: dict[str, Any], message: str) -> None:
        data = diagnosed(tiny("llama", 1), jacobian_sequences=0).to_json() | change
        with pytest.raises(InputError, match=message) as caught:
            Diagnosis.from_json(data)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError, match="a list, expected schema"):
            Diagnosis.from_json([data])

    def test_reading_needs_no_torch(self, tmp_path: Path) -> None:
        diagnosed(tiny("llama", 1)).save(tmp_path / "found.json")
        code = (
            "import sys; from signalprop.diagnosis import Diagnosis; "
            "from signalprop.report.diagnosis_tables import diagnosis_text; "
            f"assert diagnosis_text(Diagnosis.load({str(tmp_path / 'found.json')!r})); "
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


# --- words -------------------------------------------------------------------------------------------------------


def healthy(n: int = 12, **changes: Any) -> Diagnosis:
    """A diagnosis in which nothing stands out; `changes` are fields of every layer's signal, by name."""
    signal = {
        "variance_in": 1.0, "variance": 1.0, "token_correlation": 0.2, "effective_rank": 30.0, "attention_share": 0.1,
        "feed_forward_share": 0.1, "gradient": 1.0, "entropy": (0.6, 0.7), "score_std": (1.0, 1.2),
        "head_share": (0.5, 0.5), "norm_factor": (1.0, 1.0),
    } | changes  # fmt: skip
    rows = tuple(
        LayerSignal(layer=k, stack="decoder", **{name: v(k) if callable(v) else v for name, v in signal.items()})
        for k in range(n)
    )
    weights = tuple(
        Weights(layer=k, stack="decoder", std={"query": 0.02, "value": 0.02, "up": 0.02}, norm_scale=(1.0, 1.0))
        for k in range(n)
    )
    return Diagnosis(
        schema=SCHEMA, model="m", family="llama", n_parameters=1, signal=rows, weights=weights,
        data=Data(source="text", sequences=1, tokens=10, length=10, skip_first=4), loss=Estimate(value=3.0),
    )  # fmt: skip


def said(found: Diagnosis, **fields: Any) -> tuple[Finding, ...]:
    return verdicts(found.model_copy(update=fields))


class TestWords:
    def test_nothing_to_say(self) -> None:
        assert verdicts(healthy()) == Findings()

    @pytest.mark.parametrize("n", [1, 12, 100])
    def test_a_screen_begins_with_the_finding_and_fits(self, n: int) -> None:
        found = healthy(n, head_share=lambda k: (1.0, 0.0), entropy=lambda k: (0.01, 0.02), outlier=lambda k: 30.0)
        found = found.model_copy(update={"findings": verdicts(found)})
        lines = screen(found).splitlines()
        assert (lines[0].startswith("FAULT") and lines[-1].split()[0] in ("also:", "--all")) or "--all" in lines[-2]
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert all(finding.name in "\n".join(lines) for finding in found.findings)
        assert screen(healthy(n)).splitlines()[0] == "no fault, no warning, no note"

    @pytest.mark.parametrize(
        ("severity", "kind", "changes", "words"),
        [
            (
                "warning",
                "one-hot attention",
                {"entropy": lambda k: (0.01, 0.02) if k > 9 else (0.5,)},
                "layers 10-11",
            ),
            (
                "note",
                "outlier features",
                {"effective_rank": lambda k: 1.2 if k == 5 else 20.0, "outlier": lambda k: 30.0},
                "layer 5: a few features",
            ),
            ("warning", "rank collapse", {"token_correlation": lambda k: 0.99 if k == 5 else 0.2}, "layer 5: tokens"),
            ("warning", "exploding gradients", {"gradient": lambda k: 10.0 ** (11 - k)}, "a factor 1e+11"),
            ("warning", "vanishing gradients", {"gradient": lambda k: 10.0 ** (k - 11)}, "a factor 1e+11"),
            ("note", "variance growth", {"variance": lambda k: (k + 1.0) ** 2}, "from 1 to 144; as layer^2.00"),
            ("note", "massive activations", {"first_variance": lambda k: 500.0 if k > 3 else 1.0}, "the first 4 pos"),
            ("fault", "dead heads", {"head_share": lambda k: (1.0, 0.0) if k == 2 else (0.5, 0.5)}, "2: head 1 of 2"),
            (
                "fault",
                "silent layers",
                dict.fromkeys(("attention_share", "feed_forward_share"), lambda k: float(k != 7)),
                "layer 7: exactly nothing",
            ),
        ],
    )
    def test_signals(self, severity: str, kind: str, changes: dict[str, Any], words: str) -> None:
        (verdict,) = verdicts(healthy(**changes))
        assert (verdict.name, verdict.severity) == (kind, severity)
        assert words in verdict.text and (verdict.cause or verdict.remedy)

    def test_idle_layers_by_removal(self) -> None:
        costs = [Estimate(value=0.005 if k > 7 else 0.4, standard_error=0.001) for k in range(12)]
        removal = Removal(
            single=tuple(Removed(layers=(k,), loss=Estimate(value=3.0), increase=cost) for k, cost in enumerate(costs))
        )
        (verdict,) = said(healthy(), removal=removal)
        assert (verdict.name, verdict.severity, verdict.layers) == ("idle layers", "warning", (8, 9, 10, 11))
        assert "layers 8-11: removing any one changes the loss by +0.005 to +0.005 nats" in verdict.text
        assert "lns" not in verdict.remedy and "--task" in verdict.remedy  # an initialisation comes too late
        unsure = removal.model_copy(
            update={
                "single": tuple(
                    item.model_copy(update={"increase": Estimate(value=0.005, standard_error=0.05)})
                    for item in removal.single
                )
            }
        )
        assert [(v.name, v.severity) for v in said(healthy(), removal=unsure)] == [("few tokens", "note")]
        few = removal.model_copy(update={"single": removal.single[:9]})
        (note,) = said(healthy(), removal=few)
        assert note.severity == "note" and "layer 8: removing it changes the loss by +0.005 nats" in note.text

    def test_casts_in_one_verdict_per_format(self) -> None:
        def row(form: str, of: Any, scaled: bool, increase: float | None) -> Cast:
            return Cast(
                format=form, of=of, scaled=scaled, loss=Estimate(value=3.0), increase=Estimate(value=increase),
                signal_to_noise=(30.0, 12.0, 20.0),
            )  # fmt: skip

        casts = (
            row("float8_e4m3fn", "weights", False, 0.2), row("float8_e4m3fn", "both", False, None),
            row("float8_e4m3fn", "weights", True, 0.001), row("bfloat16", "both", False, 0.001),
            row("int8", "weights", False, 5.0), row("int8", "weights", True, 0.002),
        )  # fmt: skip
        verdict, note = said(healthy(), casts=casts)
        assert verdict.name == "low precision" and verdict.layers == (1,)
        assert "weights +0.2, both not finite; least signal over noise after layer 1 (12 dB)" in verdict.text
        assert verdict.remedy == "a scale per tensor fixes it"
        assert (note.severity, note.name) == ("note", "no scale")
        assert "int8 without a scale" in note.text and note.text.endswith(": weights +5")
        assert "weights below one half become 0" in note.cause
        (verdict, _) = said(healthy(), casts=(*casts[4:5], row("int8", "weights", True, 0.3)))
        assert verdict.severity == "warning" and verdict.text.startswith("int8: ")
        assert "weights with a scale per tensor +0.3;" in verdict.text and "finer scales" in verdict.remedy

    @pytest.mark.parametrize(
        ("others", "value", "says"),
        [
            ((0.1, 9.0), 10.1, "says the word itself: its loss is 0.10 there, and 10.10 for the next word"),
            ((9.0, 2.4), 3.3, "says the word after the next (2 ahead): its loss is 2.40 there, and 3.30 for the next"),
        ],
    )
    def test_labels_shifted(self, others: tuple[float, ...], value: float, says: str) -> None:
        """One word early or late, said well; said no better than the next word, it is no finding."""
        found = healthy().model_copy(update={"loss": Estimate(value=value)})
        (first, *_) = said(found, ends=ends(other_losses=others))
        assert (first.severity, first.name) == ("fault", "labels shifted") and says in first.text
        assert first.cause.startswith("tested") and "shift labels by one, once" in first.remedy
        assert not said(healthy(), ends=ends(other_losses=(3.2, 2.9)))
        assert "labels shifted" not in {f.name for f in said(found, ends=ends(other_losses=others, learnt=""))}

    def test_several_conventions(self) -> None:
        """A change that helps, where another helps further, is a warning with both; alone it is the repair."""
        one = Tried(name="gains", fault="norm gains are 1 above what this model reads", repair="gains - 1", loss=2.5,
                    before=4.0, standard_error=0.01, further="layers moved by +1")  # fmt: skip
        (first, *_) = said(healthy(), ends=ends(), trials=(one,))
        assert (first.severity, first.name) == ("warning", "several conventions")
        assert first.text == (
            "with gains - 1 the loss of a short text falls from 4.00 to 2.50, and further with layers moved by +1"
        )
        assert (
            first.cause.startswith("possible, not tested") and first.remedy == "diagnose again after the first change"
        )
        (repair,) = said(healthy(), ends=ends(), trials=(one.model_copy(update={"further": ""}),))
        assert repair.name == "weights of another convention" and repair.severity == "fault"


def ends(**changes: Any) -> Ends:
    """Of a trained model of 260 words."""
    values = {
        "log_vocab": 5.56, "logits_variance": 5.0, "stream_variance": 1.0, "read_rms": 1.0, "table_rms": 0.02,
        "head_rms": 0.02, "tied": False, "final_gain": 1.1, "final_gain_constant": None, "layer_gains_constant": False,
        "head_drawn": False, "learnt": "its rows differ in size",
    }  # fmt: skip
    return Ends(**values | changes)
