"""measure: padding, precision, checkpointing, compilation, batches, and input that is bad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalprop.attachment.families import mapping_of
from signalprop.data.batches import Batch, default_batch
from signalprop.diagnosis import diagnose
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.network.inputs import tensor_moments
from signalprop.results.profile import Profile

from .conftest import VOCABULARY
from .test_measure_families import arguments_for, brute_force, total


def n_hooks(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def assert_same(one: Profile, other: Profile, rel: float = 1e-5, absolute: float = 1e-5) -> None:
    for mine, theirs in ((one.forward, other.forward), (one.gradient, other.gradient)):
        assert (mine is None) == (theirs is None)
        for point in mine or {}:
            np.testing.assert_allclose(mine[point].variance, theirs[point].variance, rtol=rel)
            np.testing.assert_allclose(mine[point].token_correlation, theirs[point].token_correlation, atol=absolute)


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "gpt_neox", "t5", "opt", "olmo2", "falcon", "bart", "speech_to_text"]
)
def test_padded_positions_are_left_out(build: Any, name: str) -> None:
    """Sequences of 7, 4 and 11 tokens in one padded batch, against the masked NumPy definition on cloned tensors."""
    model = build(name).eval()
    arguments = arguments_for(model)
    mask = torch.arange(11) < torch.tensor([7, 4, 11])[:, None]
    arguments["attention_mask"] = mask.long()
    if name == "speech_to_text":  # four frames make a token
        arguments["attention_mask"] = (torch.arange(44) < torch.tensor([27, 13, 44])[:, None]).long()
    profile = measure(model, arguments, loss=total)
    tensors = brute_force(model, arguments)
    for (point, row), tensor in tensors.items():
        keep = mask.numpy() if tensor.value.shape[1] == 11 else None  # decoders behind an encoder are not padded
        got, expected = profile.forward[point].at(row), tensor_moments(tensor.value, keep)
        assert got["variance"] == pytest.approx(expected.variance, rel=1e-5)
        assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5)
        got, expected = profile.gradient[point].at(row), tensor_moments(tensor.grad, keep)
        assert got["variance"] * profile.gradient_scale == pytest.approx(expected.variance, rel=1e-5)
        assert got["token_correlation"] == pytest.approx(expected.token_correlation, abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_bf16_autocast(build: Any, name: str) -> None:
    """Under autocast the statistics are those of the tensors there, summed in float32: close to the float32 model's."""
    model = build(name).eval()
    arguments = arguments_for(model)
    reference = measure(model, arguments, loss=total)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = measure(model, arguments, loss=total)
    assert_same(mixed, reference, rel=0.05, absolute=0.03)
    half = measure(model.bfloat16(), arguments, loss=total)
    assert_same(half, reference, rel=0.15, absolute=0.05)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neox", "vit", "t5"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(build: Any, name: str, use_reentrant: bool) -> None:
    model = build(name).train()
    arguments = arguments_for(model)
    torch.manual_seed(11)
    plain = measure(model, arguments, loss=total)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    before = n_hooks(model)  # transformers adds its own
    torch.manual_seed(11)
    assert_same(plain, measure(model, arguments, loss=total))
    assert n_hooks(model) == before


def test_an_exception_leaves_no_hooks_and_no_gradients(build: Any) -> None:
    model = build("gpt2")
    arguments = arguments_for(model)
    model.transformer.h[2].mlp.c_fc.register_forward_hook(lambda *_: 1 / 0)
    before = n_hooks(model)
    with pytest.raises(ZeroDivisionError):
        measure(model, arguments, loss=total)
    assert n_hooks(model) == before
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_gradients_and_frozen_parameters_are_left_alone(build: Any) -> None:
    model = build("gpt2").eval()
    arguments = arguments_for(model)
    reference = measure(model, arguments, loss=total)
    total(model(**arguments)).backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = measure(model, arguments, loss=total)
    assert_same(reference, frozen, rel=1e-7)
    for name, p in model.named_parameters():
        assert not p.requires_grad and torch.equal(p.grad, kept[name])


@pytest.mark.parametrize(
    "name",
    ["vit", "t5", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bert", "roberta", "gpt2", "llama", "gpt_neox"))],
)
def test_a_batch_of_real_data(build: Any, name: str) -> None:
    model = build(name).eval()
    a = mapping_of(model).architecture
    if a.input == "tokens":
        lengths = {"target_len": 12} if a.kind == "encoder-decoder" else {}
        a = a.replace(seq_len=16, **lengths)
    batch = default_batch(a, batch_size=2, seed=3)
    profile = measure(model, batch, scheme="xavier")
    assert profile.gradient is not None and profile.scheme == "xavier" and profile.source == "measured"
    assert profile.architecture.seq_len == a.seq_len and profile.architecture.target_len == a.target_len
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.gradient["stream_out"].variance[-1] == pytest.approx(1)
    assert profile.input["variance"] == profile.forward["stream_in"].variance[0]


def test_padding_stays_and_so_does_the_decoders_start(build: Any) -> None:
    tokens = np.array([[5, 1, 6, 1]])
    batch = Batch(tokens=tokens, targets=tokens, keep=np.array([[True, True, True, False]]))
    given = mapping_of(build("roberta")).arguments(batch)  # type: ignore[misc]
    assert given["input_ids"].tolist() == [[5, VOCABULARY - 1, 6, 1]]
    model = build("t5")
    model.config.decoder_start_token_id = padding = model.get_input_embeddings().padding_idx or 0
    said = np.array([[padding, 5, 6]])
    given = mapping_of(model).arguments(Batch(tokens=tokens, targets=said, decoder_tokens=said))  # type: ignore[misc]
    assert given["decoder_input_ids"].tolist() == said.tolist()


def test_a_word_with_the_padding_id_is_renamed_among_the_targets_too(build: Any) -> None:
    """A tied head knows whether the word to come is the one that is read, or was."""
    model, said = build("opt").eval(), np.array([[1, 5, 1, 1, 7, 1]])
    renamed = np.where(said == 1, VOCABULARY - 1, said)  # 1 is the padding id
    first, second = (measure(model, Batch(tokens=ids[:, :-1], targets=ids[:, 1:])) for ids in (said, renamed))
    assert first.gradient == second.gradient


def test_words_without_a_vector_are_told_of(build: Any) -> None:
    model = build("gpt2").eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0
    ids = torch.tensor([[5, 7, 8, 7], [7, 9, 10, 11]])
    told = "input_ids (ids 7) read rows of zeros"
    assert f"37.50% of {told}" in measure(model, {"input_ids": ids}, loss=total).notes[-1]
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])  # padding is not a word
    assert f"16.67% of {told}" in measure(model, {"input_ids": ids, "attention_mask": mask}, loss=total).notes[-1]
    ids[ids == 7] = 6
    assert not any("zeros" in note for note in measure(model, {"input_ids": ids}, loss=total).notes)


class TestBadInput:
    def test_nan_weight_names_layer_point_and_parameter(self, build: Any) -> None:
        model = build("llama").eval()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
        with pytest.raises(InputError, match=r"layer 1 feed-forward, branch.*model\.layers\.1\.mlp\.up_proj\.weight"):
            measure(model, arguments_for(model), loss=total)

    def test_a_gradient_that_is_not_finite(self, build: Any) -> None:
        model = build("gpt2").eval()
        with pytest.raises(InputError, match=r"layer 2 feed-forward, stream_out: the gradient .*loss scale"):
            measure(model, arguments_for(model), loss=lambda out: float("inf") * total(out))

    def test_unknown_family(self) -> None:
        with pytest.raises(InputError, match=r"^give a mapping.*no residual stream .* Linear"):
            measure(nn.Linear(3, 3), {"input": torch.ones(1, 2, 3)})

    def test_tokens_outside_the_vocabulary_or_too_many(self, build: Any) -> None:
        model = build("gpt2")
        with pytest.raises(InputError, match=r"holds id 97; the vocabulary is 0..96"):
            measure(model, Batch(tokens=np.array([[97, 1]]), targets=np.array([[1, 1]])))
        with pytest.raises(InputError, match="41 tokens per sequence; the model has 40 positions"):
            measure(model, Batch(tokens=np.ones((1, 41), np.int64), targets=np.ones((1, 41), np.int64)))
        with pytest.raises(InputError, match="tokens is empty"):
            measure(model, Batch(tokens=np.ones((1, 0), np.int64), targets=np.ones((1, 0), np.int64)))

    def test_no_loss(self, build: Any) -> None:
        model = build("gpt2-bare")
        with pytest.raises(InputError, match="no logits and no loss"):
            measure(model, arguments_for(model))
        assert any("next token" in note for note in measure(build("gpt2"), arguments_for(model)).notes)
        with pytest.raises(InputError, match="one number with a gradient"):
            measure(model, arguments_for(model), loss=lambda out: 3.0)


def test_sequences_beyond_a_rotary_models_positions_are_told_of(build: Any) -> None:
    model = build("llama").eval()
    ids = np.arange(80).reshape(1, 80) % VOCABULARY
    batch = Batch(tokens=ids, targets=ids)
    told = "sequences of 80 tokens: the model's configuration has 40 positions"
    assert told in measure(model, batch).notes
    assert told in diagnose(model, [batch], jacobian_sequences=0).notes
    assert not any("configuration has" in note for note in measure(model).notes)
