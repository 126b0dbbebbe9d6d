"""The recipes that come with the package, and recipes that are based on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.results.cost import count_parameters
from signalprop.schemes import scheme
from signalprop_lab.training.recipe import Recipe, architecture_of, load_recipe
from signalprop_lab.training.recipe_files import shipped
from signalprop_lab.training.run import train

RECIPES = [name for name in shipped() if not name.startswith("sweep-")]
SMALL = [name for name in RECIPES if name.endswith("-small")]

# Millions of parameters as the papers print them: TGS Tables 4 and 8, Table 9; the shapes of The Curse of Depth as its
# configurations give them. TGS rounds, and pads the vocabulary of its BERT to a multiple of 128.
PRINTED = {
    "bert-12x1024": (30522, 185, 0.01),
    "bert-48x512": (30522, 168, 0.01),
    "bert-192x256": (30522, 160, 0.01),
    "bert-768x128": (30522, 156, 0.01),
    "bert-24x1024": (30522, 336, 0.01),
    "bert-96x512": (30522, 319, 0.01),
    "bert-384x256": (30522, 311, 0.01),
    "gpt-12x1024": (50257, 204, 0.01),
    "gpt-48x512": (50257, 178, 0.01),
    "speech-12-6x256": (8000, 31.1, 0.01),
    "speech-48-24x128": (8000, 28.4, 0.01),
    "llama-130m": (32000, 134.11, 1e-4),
    "llama-250m": (32000, 247.37, 1e-4),
    "llama-350m": (32000, 367.97, 1e-4),
    "llama-1b": (32000, 1339.08, 1e-4),
}
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return made


def facts_of(recipe: Recipe, vocab_size: int) -> dict[str, Any]:
    """What the data of a paper's recipe would decide."""
    if recipe.task == "image-classification":
        return {"n_classes": 1000, "head": "classes"}
    length = {} if recipe.task == "speech-to-text" else {"seq_len": recipe.data.seq_len}
    return {"vocab_size": vocab_size} | length


@pytest.mark.parametrize("name", PRINTED)
def test_networks_have_as_many_parameters_as_the_papers_print(name: str) -> None:
    vocab_size, millions, tolerance = PRINTED[name]
    recipe = load_recipe(name)
    counted = count_parameters(architecture_of(recipe, facts_of(recipe, vocab_size)))["total"] / 1e6
    assert counted == pytest.approx(millions, rel=tolerance)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_loads_and_its_scheme_takes_its_network(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    if recipe.model.architecture is None:
        return
    architecture = architecture_of(recipe, facts_of(recipe, 8000))
    assert recipe.model.scheme is not None
    # of photographs (TGS v1 appendix I.1); text and speech have defaults
    patches = InputStatistics("patches", token_correlation=0.46) if architecture.input == "patches" else None
    table = scheme(recipe.model.scheme, **recipe.model.options)(architecture, patches)
    assert len(table.skip) == 2 * architecture.n_layers + 3 * (architecture.n_decoder_layers or 0)


# --- small ones train -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized text, made once."""
    return tmp_path_factory.mktemp("cache")


def pairs(folder: Path) -> Path:
    """A line per sentence and the same words backwards."""
    text = "a signal runs through many layers and comes back as the gradient that should not fade"
    words = text.split()
    lines = [" ".join(words[i : i + 4]) + "\t" + " ".join(words[i + 3 : i - 1 : -1]) for i in range(1, len(words) - 3)]
    path = folder / "pairs.tsv"
    path.write_text("\n".join(lines * 3) + "\n")
    return path


def brief(cache: Path, *more: str) -> list[str]:
    """Settings of two steps on a few tokens."""
    cadence = [f"cadence.{name}=0" for name in ("evaluate", "save", "signal")]
    budget = ["budget.steps=2", "budget.batch_size=2", "cadence.validation_examples=2"]
    return [f"data.cache={cache}", *cadence, *budget, *more]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("vit-small", "translation-small") else pytest.param(name, marks=pytest.mark.slow)
        for name in SMALL
        if name != "lora-small"
    ],
)
def test_small_recipes_train(name: str, cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    more = []
    if recipe.data.source in ("sotu", "pairs.tsv"):  # tokenizers have tests of their own
        more = ["data.tokenizer={kind: bytes}", "data.seq_len=32"]
    if recipe.task == "translation":
        more += [f"data.source={pairs(tmp_path)}"]
    if recipe.task == "sequence-classification" or recipe.data.source == "synthetic-speech":
        more += ["data.limit=400"]
    result = train(name, tmp_path / "run", settings=brief(cache, *more), progress=False, final=False)
    assert (result.status, result.steps) == ("finished", 2)
    assert result.eval_loss is not None
    assert 0 < result.eval_loss < 10


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.slow
def test_adapters_are_trained_on_what_llama_small_leaves(cache: Path, tmp_path: Path) -> None:
    """`signalprop train llama-small`, then `signalprop train lora-small`, as docs/training.md has them."""
    bytes_ = ["data.tokenizer={kind: bytes}", "data.seq_len=32"]
    short = "model.huggingface.num_hidden_layers=2"
    train("llama-small", tmp_path / "llama-small", settings=brief(cache, *bytes_, short), progress=False)
    folded = tmp_path / "llama-small" / "folded"
    tuned = brief(cache, "data.limit=400", *bytes_, f"model.pretrained={folded}")
    result = train("lora-small", tmp_path / "lora-small", settings=tuned, progress=False, final=False)
    assert (result.status, result.steps) == ("finished", 2)
    assert 0 < result.trained_parameters < result.parameters / 2


# --- base -------------------------------------------------------------------------------------------------------------


def test_a_recipe_changes_what_it_names_of_its_base(write: Write) -> None:
    path = write(
        "mine.yaml",
        "base: gpt-48x512\nname: mine\n"
        "model: {architecture: {n_layers: 3}, options: {k: 1.0}}\noptimizer: {clip: null}\n",
    )
    base, mine = load_recipe("gpt-48x512"), load_recipe(path)
    assert mine.model.architecture == {**(base.model.architecture or {}), "n_layers": 3}
    assert (mine.model.scheme, mine.model.options, mine.optimizer.clip) == ("deepscalelm-simple", {"k": 1.0}, None)
    assert (mine.data, mine.schedule, mine.budget) == (base.data, base.schedule, base.budget)
    assert mine.description == ""


def test_bases_that_lead_back_to_one_another_are_refused(write: Write) -> None:
    write("one.yaml", "base: two.yaml\nname: one\n")
    path = write("two.yaml", "base: one.yaml\nname: two\n")
    with pytest.raises(InputError, match="based on one another"):
        load_recipe(path)


def test_what_is_wrong_says_how_to_right_it(write: Write) -> None:
    model = "model: {architecture: null, huggingface: {model_type: gpt2}}\n"
    path = write("own.yaml", f"base: bytes-decoder\nname: own\n{model}")
    with pytest.raises(InputError, match=r"ends belongs to .* by architecture; leave it out \(of a base: null\)"):
        load_recipe(path)
    assert load_recipe(path, ["model.ends=null"]).model.ends is None
    with pytest.raises(InputError, match=r"unknown model.architecture field 'nlayers'; did you mean n_layers\?"):
        load_recipe("bytes-decoder", ["model.architecture.nlayers=3"])
