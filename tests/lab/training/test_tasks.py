"""What models read and are asked for in the tasks that are not language models, and in all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score

from preparing import documents_of, example, labels_in, lines, recipe, text_of, validation
from signalprop.data.audio import resampled
from signalprop.data.batches import patches_of
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json
from signalprop_lab.training import examples
from signalprop_lab.training import stream_offset as offset_module
from signalprop_lab.training import tokenized as tokenized_module
from signalprop_lab.training.examples import (
    IGNORED,
    Example,
    Ordered,
    Prepared,
    Streamed,
    accuracy_and_f1,
    as_batch,
    collate,
    token_accuracy,
)
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.speech import log_mel
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.tokenizers import ids_of

BYTES = {"kind": "bytes"}
BPE = {"kind": "bpe", "vocab_size": 300}
ENCODER_DECODER = {"kind": "encoder-decoder"}


# --- images ------------------------------------------------------------------------------------------------


def pictures(n: int, channels: int = 1) -> np.ndarray[Any, Any]:
    shape = (n, 8, 8) if channels == 1 else (n, 8, 8, channels)
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


def write_folders(folder: Path, x: Any, y: Any) -> Path:
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / ("train" if i < 30 else "test") / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:03d}.png")
    return folder


def write_saved(folder: Path, x: Any, y: Any) -> Path:
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = [{"img": Image.fromarray(image), "label": int(label)} for image, label in zip(x, y, strict=True)]
    sets = {n: datasets.Dataset.from_list(r, features=features) for n, r in (("train", rows[:30]), ("test", rows[30:]))}
    datasets.DatasetDict(sets).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [write_folders, write_saved])
def test_images_are_the_same_from_every_kind_of_source(write: Any, tmp_path: Path, cache: Path) -> None:
    x, y = pictures(40), np.arange(40) % 3
    source = write(tmp_path, x, y)
    settings = {"source": source, "validation": "test", "image_size": 8, "patch_size": 4}
    prepared = prepare(recipe("image-classification", cache, **settings))
    assert (len(prepared.train), len(prepared.validation)) == (30, 10)  # type: ignore[arg-type]
    assert prepared.facts["n_classes"] == 3 and prepared.facts["seq_len"] == 4
    standard = (x - x[:30].mean()) / x[:30].std()
    expected = {(int(label), patches_of(image[None], 4).astype(np.float32).round(3).tobytes()) for image, label in
                zip(standard[30:], y[30:], strict=True)}  # fmt: skip
    assert {(int(e["labels"]), e["patches"].round(3).tobytes()) for e in validation(prepared)} == expected


# --- speech ------------------------------------------------------------------------------------------------


def tone(rate: int, hz: float, seconds: float = 0.3) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(round(rate * seconds)) / rate)


def test_resampling_keeps_a_tone() -> None:
    data = Data(sample_rate=16_000)
    found = resampled(tone(22_050, 440), 22_050, data.sample_rate)
    assert found[500:-500] == pytest.approx(tone(16_000, 440)[: found.size][500:-500], abs=2e-3)


SAID = [f"{name} {i}" for i, name in enumerate(["high", "low", "middle", "deep"] * 5)]


def sounds(folder: Path, kind: str, rate: int = 16_000) -> None:
    for i in range(len(SAID)):
        sound = tone(rate, 200 + 50 * i, 0.2 + 0.01 * i)
        soundfile.write(folder / f"s{i}.{kind}", np.stack([sound, sound], 1), rate)


def speech(source: Any, cache: Path, **settings: Any) -> Prepared:
    more = {"tokenizer": BYTES, "frame_dim": 20, "validation": 0.2} | settings
    shape = ENCODER_DECODER | {"conv_kernels": [3, 3], "conv_strides": [2, 2]}
    return prepare(recipe("speech-to-text", cache, shape, source=source, **more))


@pytest.mark.parametrize("table", ["tsv", "header", "jsonl", "saved"])
def test_speech_is_the_same_from_every_kind_of_source(table: str, tmp_path: Path, cache: Path) -> None:
    sounds(tmp_path, "wav")
    names = [f"s{i}.wav" for i in range(len(SAID))]
    source: Path = tmp_path
    if table == "jsonl":
        lines(tmp_path / "a.jsonl", [{"audio": n, "text": t} for n, t in zip(names, SAID, strict=True)])
    elif table == "saved":
        rows = [{"audio": str(tmp_path / n), "sentence": t} for n, t in zip(names, SAID, strict=True)]
        found = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio(decode=False))
        found.save_to_disk(source := tmp_path / "saved")
    else:
        head = "file_name\ttranscription\n" if table == "header" else ""
        body = "".join(f"{n.removesuffix('.wav')}\t{t}\n" for n, t in zip(names, SAID, strict=True))
        (tmp_path / "a.tsv").write_text(head + body)
    prepared = speech(source, cache)
    assert (len(prepared.train), len(prepared.validation)) == (16, 4)  # type: ignore[arg-type]
    longest = max(len(t) for t in SAID)
    assert prepared.facts == {
        "input": "frames",
        "frame_dim": 20,
        "seq_len": 10,
        "vocab_size": 260,
        "target_len": longest + 1,
    }
    for e in [example(prepared, i) for i in range(16)]:
        text = prepared.tokenizer.decode(e["labels"], skip_special_tokens=True)
        i = SAID.index(text)
        assert e["decoder_tokens"].tolist() == [1, *(4 + b for b in text.encode())]
        assert e["labels"].tolist() == [*(4 + b for b in text.encode()), 2]
        expected = log_mel(soundfile.read(tmp_path / names[i])[0][:, 0], Data(frame_dim=20))
        assert e["frames"].shape == (40, 20)
        assert e["frames"][: len(expected)] == pytest.approx(expected, abs=0.05)
        assert not e["frames"][len(expected) :].any()


# --- translation and classification ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "a.tsv"
    rows = [(text_of(i, 4 + i % 5), text_of(i, 4 + i % 5).upper()) for i in range(40)]
    path.write_text("".join(f"{a}\t{b}\n" for a, b in [*rows, ("x " * 99, "x"), ("x", "x " * 99), ("", "y")]), "utf-8")
    return path


def test_translation(translations: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    r = recipe("translation", cache, ENCODER_DECODER, source=translations, tokenizer=BYTES, seq_len=70, validation=0.2)
    prepared = prepare(r)
    assert prepared.facts == {"vocab_size": 260, "seq_len": 70, "target_len": 70}
    n = len(prepared.train)  # type: ignore[arg-type]
    sources = []
    for e in [example(prepared, i) for i in range(n)] + validation(prepared):
        text = prepared.tokenizer.decode(e["tokens"][:-1])
        assert e["tokens"][-1] == 2 and e["keep"].all() and e["keep"].shape == e["tokens"].shape
        target = [4 + b for b in text.upper().encode()]
        assert e["decoder_tokens"].tolist() == [1, *target] and e["labels"].tolist() == [*target, 2]
        sources.append(text)
    assert len(set(sources)) == len(sources) == 40
    said = "signalprop: 3 of 43 examples are empty or longer than 70 and 70 tokens, and left out\n"
    assert said in capsys.readouterr().err
    batch = collate([example(prepared, i) for i in range(5)], prepared.pads)
    assert torch_equal(batch["labels"] == IGNORED, ~_first(batch["labels"]))
    assert (batch["tokens"][~batch["keep"]] == 0).all()


def _first(labels: Any) -> Any:
    """True up to and with the end token."""
    import torch

    ends = (labels == 2).int().argmax(1)
    return torch.arange(labels.shape[1]) <= ends[:, None]


def torch_equal(a: Any, b: Any) -> bool:
    return bool((a == b).all())


def reviews(folder: Path, n: int = 40) -> Path:
    rows = [
        {"sentence": f"{'good' if i % 3 else 'bad'} {text_of(i, 3 + i % 9)}", "label": ["no", "yes"][i % 3 > 0]}
        for i in range(n)
    ]
    return lines(folder / "a.jsonl", rows)


def test_sequence_classification(tmp_path: Path, cache: Path) -> None:
    prepared = prepare(
        recipe("sequence-classification", cache, source=reviews(tmp_path), tokenizer=BYTES, seq_len=24, validation=0.2)
    )
    assert prepared.facts == {"vocab_size": 260, "seq_len": 24, "n_classes": 2, "head": "classes"}
    for e in [example(prepared, i) for i in range(30)]:
        assert e["tokens"][0] == 1 and e["tokens"][-1] == 2 and len(e["tokens"]) <= 24
        assert int(e["labels"]) == (prepared.tokenizer.decode(e["tokens"][1:5]) == "good")
    train_share = np.mean([int(example(prepared, i)["labels"]) for i in range(len(prepared.train))])  # type: ignore[arg-type]
    share = np.mean([int(e["labels"]) for e in validation(prepared)])
    n = len(prepared.train)  # type: ignore[arg-type]
    p = (n * train_share + 0.5) / (n + 1)
    assert prepared.chance(labels_in(validation(prepared))) == pytest.approx(
        -share * math.log(p) - (1 - share) * math.log(1 - p)
    )


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("runs/llama-small/folded", "train llama-small"),
        ("sweeps/pretrained/runs/Pre-LN/lr=0.01/seed=0/folded", "sweep sweep-pretrained"),
    ],
)
def test_what_was_not_trained_before_is_asked_for(path: str, command: str, cache: Path) -> None:
    asked = recipe("causal-lm", cache, tokenizer={"kind": "pretrained", "path": path})
    with pytest.raises(InputError, match=f"goes on from {path}; first run signalprop {command}$"):
        prepare(asked)


@pytest.mark.parametrize("task", ["translation", "sequence-classification", "image-classification"])
def test_streams_of_examples(task: str, tmp_path: Path, translations: Path, cache: Path) -> None:
    source = {
        "translation": translations,
        "sequence-classification": reviews(tmp_path),
        "image-classification": write_saved(tmp_path, pictures(40), np.arange(40) % 3),
    }[task]
    shape = ENCODER_DECODER if task == "translation" else None
    settings = {"source": source, "tokenizer": BYTES, "validation": 0.3, "seq_len": 70, "image_size": 8}
    prepared = prepare(recipe(task, cache, shape, streaming=True, **settings))
    name = "patches" if task == "image-classification" else "tokens"

    def content(examples: Any) -> list[bytes]:
        return [e[name].tobytes() for e in examples]

    once = sum(1 for _ in prepared.train.items(0, StreamOffset()))  # type: ignore[union-attr]
    first, second = (content(Streamed(prepared.train, once, seed)) for seed in (0, 1))  # type: ignore[arg-type]
    assert first != second and sorted(first) == sorted(second)
    held = content(validation(prepared))
    assert held and not set(held) & set(first)
    assert len(first) + len(held) == (30 if name == "patches" else 40)


def test_scores_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        predictions, labels = rng.integers(0, 4, (2, 30))
        found = accuracy_and_f1(predictions, labels)
        assert found["accuracy"] == pytest.approx(accuracy_score(labels, predictions))
        assert found["f1"] == pytest.approx(f1_score(labels, predictions, average="macro"))
    assert token_accuracy(np.array([[1, 2, 3]]), np.array([[1, 5, IGNORED]])) == {"accuracy": 0.5}


# --- streams ------------------------------------------------------------------------------------------------

STREAMS = [
    ("a.jsonl", "masked-lm"), ("texts", "causal-lm"), ("saved", "image-classification"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("a.tsv", "causal-lm"), ("pairs.tsv", "translation"), ("a.jsonl", "sequence-classification"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("source", "task"), STREAMS)
def test_a_stream_goes_on_where_it_was(
    source: str, task: str, cache: Path, tmp_path: Path, translations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "BLOCK", 6)
    monkeypatch.setattr(offset_module, "TOGETHER", 3)
    texts = documents_of(40)
    lines(tmp_path / "a.jsonl", [{"text": text, "label": i % 2} for i, text in enumerate(texts)])
    write_saved(tmp_path, pictures(40), np.arange(40) % 3)
    (tmp_path / "pairs.tsv").write_bytes(translations.read_bytes())
    (tmp_path / "a.tsv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(text)
    settings = {"source": tmp_path / source, "tokenizer": BYTES, "seq_len": 70, "validation": 0.2, "limit": 35}
    shape = ENCODER_DECODER if task == "translation" else None
    prepared = prepare(recipe(task, cache, shape, streaming=True, image_size=8, **settings))
    once = sum(1 for _ in prepared.train.items(0, StreamOffset()))  # type: ignore[union-attr]
    n = 2 * once
    whole = Streamed(prepared.train, n, 0, every=1)  # type: ignore[arg-type]
    expected, kept = [], {}
    for i, one in enumerate(whole, 1):
        expected.append(content(one))
        kept[i] = whole.offset(i)
    assert whole.offset(1) is None  # long ago
    tokenized: list[int] = []
    monkeypatch.setattr(tokenized_module, "ids_of", lambda *given: tokenized.append(1) or ids_of(*given))
    for at in (3, once - 3, once, once + 3):  # in the middle, twice at a pass's end, in the next pass
        there = kept[at]
        again = Streamed(prepared.train, n, 0)  # type: ignore[arg-type]
        write_json(tmp_path / "stream.json", there.to_json())
        offset = StreamOffset(**read_json(tmp_path / "stream.json"))
        again.begin(offset.given, offset)
        tokenized.clear()
        began = again._read()
        assert content(next(began)[0]) == expected[at]
        assert at == once or len(tokenized) <= 12  # the documents before its block are not tokenized again
        assert [content(one) for one, _, _ in began] == expected[at + 1 :]


def content(one: Example) -> list[Any]:
    return [(name, one[name].tolist()) for name in sorted(one)]


# --- all together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    ["causal-lm", "masked-lm", "image-classification", "speech-to-text", "translation", "sequence-classification"],
)
def test_networks_read_what_is_prepared(
    task: str, corpus: Path, translations: Path, tmp_path: Path, cache: Path
) -> None:
    """The facts make an architecture, a batch goes through it, and the untrained loss is about a uniform guess's."""
    source: dict[str, Any] = {
        "image-classification": "digits",
        "speech-to-text": "synthetic-speech",
        "translation": translations,
        "sequence-classification": reviews(tmp_path),
    }
    kind = {"causal-lm": "decoder", "speech-to-text": "encoder-decoder", "translation": "encoder-decoder"}
    r = recipe(
        task, cache, {"kind": kind.get(task, "encoder"), "class_token": task == "image-classification"},
        source=source.get(task, corpus), tokenizer=BPE, seq_len=40, image_size=32, limit=60, frame_dim=20,
    )  # fmt: skip
    prepared = prepare(r)
    network = network_of(r, prepared)
    read = Ordered(prepared.train, 4, 0)  # type: ignore[arg-type]
    tensors = collate([read[i] for i in range(4)], prepared.pads)
    arguments = network.arguments(tensors)
    labels = arguments.pop("labels")
    output = network.module(**arguments)
    classes = prepared.facts.get("n_classes") or prepared.facts["vocab_size"]
    assert output.logits.shape == (*labels.shape, classes)
    batch = as_batch(tensors)
    loss = -output.logits.log_softmax(-1).flatten(0, -2)[
        np.arange(batch.targets.size), np.maximum(batch.targets, 0).ravel()
    ]
    asked = batch.targets.ravel() >= 0
    assert abs(float(loss.detach().numpy()[asked].mean()) - math.log(classes)) < 1.5
