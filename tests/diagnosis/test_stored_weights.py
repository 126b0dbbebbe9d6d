"""Weights read from files in pieces: against NumPy and PyTorch on whole tensors, planted faults, crafted files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from diagnosing import tiny
from signalprop.diagnosis.run import diagnose
from signalprop.diagnosis.stored_values import StoredWeights
from signalprop.diagnosis.stored_weights import read_weights
from signalprop.diagnosis.tensor_statistics import statistics, values_of
from signalprop.errors import InputError
from signalprop.files import tensor_files
from signalprop.files.tensor_files import stored_tensors
from signalprop.report.weight_tables import weights_text

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


def written(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def heavy(n: int = 70_001, dtype: torch.dtype = torch.float32, tail: float = 30) -> torch.Tensor:
    """Weights with a mean, a tail, and some zeros."""
    x = 0.02 * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.003
    x[::97] *= tail
    x[::50] = 0
    return x.to(dtype)


class TestAgainstNumPy:
    """Pieces of 8,192 numbers, so that every tensor has several, the last one short."""

    @pytest.fixture(autouse=True)
    def pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensor_files.StoredTensor.pieces, "__defaults__", (8192,))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_counts_and_moments(self, tmp_path: Path, dtype: str) -> None:
        whole = heavy(dtype=DTYPES[dtype])
        (tensor,) = stored_tensors(written(tmp_path, x=whole))
        (found, _), x = statistics(tensor), whole.double().numpy()
        assert tensor.dtype == dtype
        assert (found.n, found.zeros, found.nan, found.infinite) == (x.size, int((x == 0).sum()), 0, 0)
        assert (found.least, found.most) == (x.min(), x.max())
        assert found.mean == pytest.approx(x.mean(), rel=1e-12, abs=1e-12 * x.std())
        assert found.std == pytest.approx(x.std(), rel=1e-12)
        assert found.rms == pytest.approx(math.sqrt((x * x).mean()), rel=1e-12)

    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in ("F64", "F32")])
    def test_every_word(self, dtype: str) -> None:
        bits = torch.arange(256 if "8" in dtype else 65536).to(torch.uint8 if "8" in dtype else torch.uint16)
        expected = bits.view(DTYPES[dtype]).float().numpy()
        np.testing.assert_array_equal(values_of(bits.numpy(), dtype), expected)

    @pytest.mark.parametrize("dtype", ["BF16", "F32"])
    def test_what_is_not_finite(self, tmp_path: Path, dtype: str) -> None:
        """In the second piece and in a later one."""
        bad = heavy(70_000, DTYPES[dtype])
        bad[[8200, 9000]], bad[60_000] = math.nan, -math.inf
        path = written(tmp_path, bad=bad)
        found = {tensor.name: statistics(tensor)[0] for tensor in stored_tensors(path)}
        assert (found["bad"].nan, found["bad"].infinite, found["bad"].first_bad) == (2, 1, (8200,))
        good = bad[torch.isfinite(bad)].double().numpy()
        assert found["bad"].std == pytest.approx(good.std(), rel=1e-12)
        assert found["bad"].least == good.min()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fresh Llama in bfloat16, in shards."""
    path = tmp_path_factory.mktemp("llama")
    tiny("llama", 3, 0, vocab_size=300, initializer_range=0.02).bfloat16().save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The checkpoint in one file, changed."""
    from safetensors.torch import load_file

    tensors = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def rows_of(found: StoredWeights) -> dict[str, Any]:
    return {row.name: row for row in found.tensors}


def test_roles_and_layers(llama: Path) -> None:
    megabytes: list[tuple[int, int]] = []
    found = read_weights(llama, progress=lambda *step: megabytes.append(step))
    roles = {role.role: role for role in found.roles}
    assert roles["self_attn.q_proj"].layers == roles["mlp.down_proj"].layers == (0, 1, 2)
    assert roles["model.embed_tokens"].layers == (None,)
    assert rows_of(found)["model.layers.1.self_attn.o_proj.weight"].role == "self_attn.o_proj"


def test_stacks(tmp_path: Path) -> None:
    """Each by itself, with the layers that the configuration gives it, whatever the head is called."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "vocab_size": 97}
    config = transformers.T5Config(**sizes, num_layers=2, num_decoder_layers=3)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    found = read_weights(tmp_path)
    assert not found.findings
    assert {row.stack for row in found.tensors} == {None, "encoder.block", "decoder.block"}
    assert "decoder.block layer.*.EncDecAttention.q" in weights_text(found)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"num_layers": 3, "num_decoder_layers": 2}))
    names = {one.name: one.layers for one in read_weights(tmp_path).findings}
    assert names == {"layers left out": (2,), "layers missing": (2,)}


def test_changes_from_another_checkpoint(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = 1.5 * tensors[name]
        tensors["extra"] = torch.ones(3)
        tensors["steps"] = torch.ones(3, dtype=torch.int64)

    found = read_weights(copied(llama, tmp_path / "other", changed), llama)
    assert rows_of(found)[name].change == pytest.approx(0.5, rel=1e-2)  # of a product rounded to bfloat16
    assert [row.name for row in found.tensors if row.equal is False] == [name]
    assert (found.only_here, found.only_there, found.left_out) == (("steps", "extra"), (), {"steps": "I64"})
    up = next(role for role in found.roles if role.role == "mlp.up_proj")
    assert (up.equal, up.tensors) == (2, 3)
    assert 0.2 < (up.change or 0) < 0.4
    assert f"{len(found.tensors) - 2} of {len(found.tensors) - 1} tensors are equal" in weights_text(found)
    assert "unchanged: 0-1 of 3 layers; changed in part: 2" in weights_text(found)
    copied(llama, tmp_path / "wider", lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(InputError, match=r"has shape \[2, 2\]"):
        read_weights(tmp_path / "wider", llama)


def test_the_worst_come_first(tmp_path: Path) -> None:
    """By names alone, since there is no config.json."""
    x = heavy(64 * 64).reshape(64, 64)
    bad = x.clone()
    bad[1, 1] = math.nan
    names = {f"layers.{k}.experts.{e}.up.weight": x.clone() for k in range(2) for e in range(3)}
    odd = {"layers.1.flat.weight": torch.full((64, 64), 0.5), "z.weight": bad}
    path = tmp_path / "model.safetensors"
    save_file(names | odd | {"layers.0.norm.weight": torch.ones(64)}, path)
    found = read_weights(path)
    assert {role.role: role.tensors for role in found.roles}["experts.*.up"] == 6
    assert [line.strip() for line in weights_text(found).splitlines() if line.startswith("  ")] == [
        "z.weight: 1 NaN", "layers.1.flat.weight: all numbers are 0.5"
    ]  # fmt: skip


def test_the_words_of_a_diagnosis(tmp_path: Path) -> None:
    """The same faults in a model and in its file are said in the same words."""
    model = tiny("llama", 3, 0, vocab_size=300, initializer_range=0.02)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = math.nan
        model.model.layers[2].input_layernorm.weight.zero_()
    source = tmp_path / "planted"
    model.save_pretrained(source)
    said = {one.name: one for one in read_weights(source).findings}
    live = {one.name: one for one in diagnose(model, jacobian_sequences=0, trials=False).findings}
    for name in ("not finite", "norm of zeros"):
        assert (said[name].text, said[name].layers) == (live[name].text, live[name].layers)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert next(one for one in read_weights(source).findings if one.name == "layers left out").layers == (2,)
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert next(one for one in read_weights(source).findings if one.name == "layers missing").layers == (3,)


def test_equal_layers(llama: Path, tmp_path: Path) -> None:
    def planted(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if ".layers.0." in name:
                tensors[name.replace(".layers.0.", ".layers.2.")] = tensors[name].clone()

    (found,) = read_weights(copied(llama, tmp_path / "equal", planted)).findings
    assert (found.name, found.layers) == ("equal layers", (0, 2))


def crafted(header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


WHOLE = r"is not a whole safetensors file \(.+\); download or save it again"


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", WHOLE),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (crafted(entry(), length=1 << 62), WHOLE),
        (crafted(b"{" * 10_000), WHOLE),
        (crafted({"layers.1." * 200 + "\n": entry()["x"]}), "1,801 characters"),
        (crafted(entry(shape=[-2])), WHOLE),
        (crafted(entry(shape=[1] * 100 + [2])), "101 axes"),
        (crafted(entry(data_offsets=[8, 0])), WHOLE),
        (crafted(entry() | {"y": entry()["x"]}), WHOLE),
        (crafted(entry(), data=b"\0" * 7), WHOLE),
    ],
)
def test_crafted_files_are_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_weights(path)


def test_what_else_is_refused(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"\x80")
    index = {"weight_map": {"x": "gone.safetensors"}}
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    twice = copied(llama, tmp_path / "twice", lambda tensors: None)
    (twice / "again.safetensors").write_bytes((twice / "model.safetensors").read_bytes())
    for name, says in {"pickled": "no .safetensors files", "shards": "which is missing", "twice": "both hold",
                       "nothing": "neither a directory"}.items():  # fmt: skip
        with pytest.raises(InputError, match=says):
            read_weights(tmp_path / name)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = written(tmp_path / "one", a=heavy(64)), written(tmp_path / "other", b=heavy(64))
    with pytest.raises(InputError, match="have no tensor of one name; expected two checkpoints of one architecture"):
        read_weights(one, other)
