"""Settings of the whole suite: one thread per process, so that results do not depend on the machine's load."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="signalprop-tests-"))  # a home may be read-only
# matplotlib lists the fonts of the machine once, not in every process.
os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), "signalprop-tests-matplotlib"))
os.environ.setdefault("HF_HOME", os.path.join(os.environ["XDG_CACHE_HOME"], "huggingface"))

import hypothesis
import numpy as np
import pytest
import torch

from commandline import Command, Result
from signalprop.cli import run
from signalprop.data.batches import load_text, word_ids

torch.set_num_threads(1)
# Properties try the same few examples every time; `make test-slow` tries many, other ones each time.
hypothesis.settings.register_profile("few", deadline=None, derandomize=True, max_examples=10)
hypothesis.settings.register_profile("many", deadline=None, max_examples=150)
hypothesis.settings.load_profile("few")


def pytest_collection_finish() -> None:
    """What is imported stays: collections look at the objects of tests alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def word_stream() -> np.ndarray:
    """The default text as ids below 5,000."""
    return word_ids(load_text(), 5000)


@pytest.fixture(scope="session")
def compiles() -> None:
    """Skips where transformers does not compile by itself, as 5.3 under PyTorch 2.6."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0))
    handle = model.transformer.h[0].register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.compile(model, backend="eager")(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except NameError:
            pytest.skip("transformers does not compile under this PyTorch")
        finally:
            handle.remove()
            torch._dynamo.reset()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run the command line in process, in an empty directory: some commands write a report into theirs."""
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """Run a command that has to be refused: exit status 2, nothing on stdout, one line on stderr, which is returned."""

    def call(*arguments: str) -> str:
        status, out, err = command(*arguments)
        assert (status, out) == (2, ""), err
        assert err.startswith("signalprop: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return call


@pytest.fixture(scope="session")
def hf_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models: `bert` (with a trained tokenizer.json), `gpt2` and `vit` (without)."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ViTConfig
    from transformers import ViTForImageClassification as ViT

    from signalprop.data.batches import load_text
    from tiny import wordpiece

    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=24, **size)).save_pretrained(root / "bert")
    gpt2 = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    ViT(ViTConfig(image_size=8, patch_size=4, num_labels=10, **size)).save_pretrained(root / "vit")

    wordpiece(load_text()[:100_000], 300).save(str(root / "bert" / "tokenizer.json"))
    return root
