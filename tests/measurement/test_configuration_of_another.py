"""A model with a configuration of a family that reads something else (Chronos-Bolt: T5 on patches of a series)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5PreTrainedModel, T5Stack

import signalprop as sp

PATCH = 16


class PatchedT5(T5PreTrainedModel):
    """T5's encoder on a linear map of patches; its decoder reads one start token."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.shared, self.patches = nn.Embedding(2, config.d_model), nn.Linear(PATCH, config.d_model)
        stacks = [copy.deepcopy(config) for _ in range(2)]
        for one, decodes in zip(stacks, (False, True), strict=True):
            one.is_decoder, one.is_encoder_decoder, one.use_cache = decodes, False, False
        self.encoder, self.decoder = (T5Stack(one) for one in stacks)
        self.out = nn.Linear(config.d_model, PATCH)
        self.post_init()

    def forward(self, context: Tensor) -> Tensor:
        memory = self.encoder(inputs_embeds=self.patches(context.unflatten(-1, (-1, PATCH)))).last_hidden_state
        start = self.shared(torch.zeros(len(context), 1, dtype=torch.long))
        read: Tensor = self.decoder(inputs_embeds=start, encoder_hidden_states=memory).last_hidden_state
        return self.out(read)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return PatchedT5(T5Config(vocab_size=2, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)).eval()


SERIES = 3 * torch.randn(2, 4 * PATCH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "verb",
    [
        lambda m: sp.predict(m, SERIES),
        lambda m: sp.compare(m, inputs=SERIES, seeds=1),
        lambda m: sp.check(m, "xavier", inputs=SERIES),
    ],
)
def test_it_is_not_taken_for_a_model_of_tokens(model: nn.Module, verb: Callable[[nn.Module], object]) -> None:
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(sp.InputError, match="one token attends to itself, so that any"):
        verb(model)
    assert not any(stack.tokens_first for stack in sp.anatomy(model, SERIES).stacks)  # of its decoder's one token
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_it_is_measured(model: nn.Module) -> None:
    seen: list[float] = []
    hook = model.patches.register_forward_hook(lambda _, __, out: seen.append(float(out.detach().var(correction=0))))
    profile = sp.measure(model, SERIES, loss=lambda out: out.square().mean())
    hook.remove()
    assert profile.forward["stream_in"].variance[0] == pytest.approx(seen[-1], rel=1e-5)
    assert seen[-1] > 50  # where T5's table of tokens would give 1
