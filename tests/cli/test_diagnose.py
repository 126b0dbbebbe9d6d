"""`signalprop diagnose` on checkpoints in directories: numbers of the library, files, and one line per mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commandline
from commandline import Command, Refused
from diagnosing import tiny, transformers
from signalprop.attachment.families import mapping_of
from signalprop.data.batches import load_text
from signalprop.diagnosis import Diagnosis, diagnose, load, token_batches
from signalprop.diagnosis.tasks import _name_in, harness, is_task_file
from signalprop.errors import InputError
from tiny import bpe

SMALL = ["--tokens", "64", "--seq-len", "16"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the directories `llama` (and its tokenizer), `other`, `bert`, `t5` and `vit`, and `book.txt`."""
    root = tmp_path_factory.mktemp("checkpoints")
    (root / "book.txt").write_text(load_text()[:30_000], encoding="utf-8")
    tokenizer = bpe(load_text()[:20_000], 300, "<mask>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", mask_token="<mask>")
    for name, family, seed in (("llama", "llama", 0), ("other", "llama", 1), ("bert", "bert", 0), ("t5", "t5", 0)):
        tiny(family, 3 if family != "t5" else 2, seed, vocab_size=300).save_pretrained(root / name)
        fast.save_pretrained(root / name)
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    transformers.ViTForImageClassification(vit).save_pretrained(root / "vit")
    return root


def result_of(command: Command, *arguments: Any) -> Any:
    return commandline.result_of(command, "diagnose", *arguments)


class TestResults:
    @pytest.mark.slow
    def test_numbers_are_the_library_s(self, command: Command, root: Path) -> None:
        got = result_of(command, root / "llama", "--data", root / "book.txt", *SMALL, "--remove", "--cast", "int8")
        loaded = load(root / "llama")
        batches = token_batches(
            root / "book.txt", loaded.tokenizer, 16, 2, 4, architecture=mapping_of(loaded.model).architecture
        )
        assert got == diagnose(loaded.model, batches, name="llama", remove=True, cast=["int8"]).to_json()
        assert got["data"]["tokens"] == 64 and got["data"]["source"] == str(root / "book.txt")
        assert [row["layers"] for row in got["removal"]["single"]] == [[0], [1], [2]]

    def test_stored_and_against(self, command: Command, root: Path, tmp_path: Path) -> None:
        stored = tmp_path / "llama.json"
        assert command("diagnose", str(root / "llama"), *SMALL, "--json", str(stored)).status == 0
        found = Diagnosis.load(stored)
        assert Diagnosis.from_json(result_of(command, stored)) == found
        pair = result_of(command, stored, "--against", root / "other", *SMALL)
        assert pair["schema"] == "signalprop/diagnoses/1"
        assert Diagnosis.from_json(pair["diagnosis"]) == found
        assert Diagnosis.from_json(pair["against"]).model == "other"
        out = command("diagnose", str(stored), "--against", str(stored)).out
        assert "llama against llama" in out

    def test_weights_only(self, command: Command, root: Path, refused: Refused) -> None:
        found = result_of(command, root / "llama", "--weights-only", "--against", root / "other")
        assert found["schema"] == "signalprop/weights/2"
        assert found["n"] == sum(p.numel() for p in tiny("llama", 3, 0, vocab_size=300).parameters())
        assert {"self_attn.q_proj", "mlp.down_proj", "model.embed_tokens"} <= {role["role"] for role in found["roles"]}
        out = command("diagnose", str(root / "llama"), "--weights-only").out
        assert "all numbers are finite" in out and "rms" in out
        says = "leave out --data, --remove"
        assert says in refused("diagnose", str(root / "llama"), "--weights-only", "--remove", "--data", "x")


class TestNothingIsThrownAway:
    @pytest.mark.parametrize("against", ["{root}/none", "{root}/book.txt", "{tmp}/bad.json", "{root}/vit"])
    def test_the_other_model_is_read_before_the_work(
        self, refused: Refused, root: Path, tmp_path: Path, against: str
    ) -> None:
        (tmp_path / "bad.json").write_text("{}")
        named = against.format(root=root, tmp=tmp_path)
        err = refused("diagnose", root / "llama", *SMALL, "--remove", "--json", tmp_path / "o.json", "--against", named)
        assert "signal:" not in err and not (tmp_path / "o.json").exists()

    def test_a_picture_that_fails_costs_nothing_else(
        self, command: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from signalprop.report import diagnoses

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("x")

        monkeypatch.setattr(diagnoses, "sections_figure", fail)
        ended = command(
            "diagnose", str(root / "llama"), *SMALL, "--json", str(tmp_path / "d.json"),
            "--plot", str(tmp_path / "d.png"),
        )  # fmt: skip
        assert ended.status == 1 and ended.err.splitlines()[-1].startswith("signalprop: ZeroDivisionError: x")
        assert Diagnosis.load(tmp_path / "d.json").signal and "3 layers" in ended.out
        assert re.findall(r"^(json|plot) ", ended.out, re.MULTILINE) == ["json"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["{root}/nothing"], "there is no such file or directory"),
            (["{root}/vit"], "the model reads images, not text"),
            (["{root}/llama", "--data", "{root}/no.txt"], "there is no such file"),
            (["{root}/llama", "--cast", "fp4"], "unknown format 'fp4'"),
            (["{root}/llama", "--dtype", "int4"], "dtype is 'int4'"),
            (["{root}/llama", "--seq-len", "4"], "none after the first 4"),
            (["{root}/vit", "--task", "arc_easy"], "needs the model's tokenizer"),
            (["{root}/vit", "--against"], "requires an argument"),
        ],
    )
    def test_one_line(self, refused: Refused, root: Path, arguments: list[str], message: str) -> None:
        assert message in refused("diagnose", *(a.format(root=root) for a in arguments))

    def test_stored_ones_have_no_model(self, refused: Refused, command: Command, root: Path, tmp_path: Path) -> None:
        stored = tmp_path / "stored.json"
        command("diagnose", str(root / "llama"), *SMALL, "--json", str(stored))
        for more in (["--remove"], ["--cast", "int8"]):
            assert "is a stored diagnosis" in refused("diagnose", stored, *more)
        (tmp_path / "no.json").write_text("{}", encoding="utf-8")
        assert "this is not a diagnosis" in refused("diagnose", tmp_path / "no.json")


class TestTasks:
    def written(self, path: Path, *rows: Any) -> Path:
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return path

    def test_the_harness(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What lm-evaluation-harness is asked for and what is made of its answer, without the package."""
        seen: list[Any] = []
        scores: dict[str, Any] = {
            "arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.03}, "piqa": {"acc,none": 0.7, "acc_stderr,none": 0.04},
            "wikitext": {"word_perplexity,none": 12.0},
        }  # fmt: skip

        def simple_evaluate(model: Any, tasks: list[str], task_manager: Any) -> Any:
            seen.append((model, tasks))
            return {"results": {task: scores[task] for task in tasks}}

        def get_task_dict(tasks: list[str], task_manager: Any) -> None:
            if "offline" in tasks:
                raise ConnectionError("no\n connection")

        package = SimpleNamespace(simple_evaluate=simple_evaluate)
        inner = SimpleNamespace(HFLM=lambda pretrained, tokenizer: (pretrained, tokenizer))
        manager = SimpleNamespace(all_tasks=[*scores, "offline"])
        tasks = SimpleNamespace(TaskManager=lambda include_path: manager, get_task_dict=get_task_dict)
        for name, module in (
            ("lm_eval", package), ("lm_eval.models", package), ("lm_eval.models.huggingface", inner),
            ("lm_eval.tasks", tasks),
        ):  # fmt: skip
            monkeypatch.setitem(sys.modules, name, module)
        model = tiny("llama", 1)
        found = harness(["arc_easy", "piqa"], "tokenizer")(model)
        assert seen == [((model, "tokenizer"), ["arc_easy", "piqa"])]
        assert found.value == pytest.approx(0.6) and found.standard_error == pytest.approx(0.025)
        with pytest.raises(InputError, match="the task wikitext gives no accuracy"):
            harness(["wikitext"], "tokenizer")(model)
        with pytest.raises(InputError, match=r"has no task 'arc_eesy'; did you mean arc_easy\? .*\.yaml"):
            harness(["piqa", "arc_eesy"], "tokenizer")
        with pytest.raises(InputError, match=r"lm_eval cannot run offline: no connection"):
            harness(["offline"], "tokenizer")

    def test_task_files(self, tmp_path: Path) -> None:
        """The name of a task is read where YAML of lm_eval's own would not be."""
        good = self.written(tmp_path / "good.yaml", "x: !function a.b", "task: 'mine'  # here", "  task: other")
        assert is_task_file("a/B.YML") and is_task_file(str(good)) and not is_task_file("arc_easy")
        assert _name_in(good) == "mine"
        with pytest.raises(InputError, match="names no task; expected a line `task: NAME`"):
            _name_in(self.written(tmp_path / "bad.yaml", "group: all"))
