"""Models of transformers with several residual streams, measured: against plain hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError


@pytest.fixture(scope="module")
def model() -> Any:
    modeling = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    config = modeling.HYV4Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, index_topk=4, index_n_heads=2,
        index_head_dim=16, hc_mult=3, max_position_embeddings=32, pad_token_id=0,
        mlp_layer_types=["dense", "dense"],
    )  # fmt: skip
    torch.manual_seed(0)
    return modeling.HYV4ForCausalLM(config).eval()


def test_moments_are_means_over_streams(model: Any) -> None:
    ids = torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    measured = sp.measure(model, {"input_ids": ids, "labels": ids})
    for hook in hooks:
        hook.remove()
    assert seen[0].shape == (2, 8, 3, 32)
    expected = [float(x.detach().double().var(correction=0)) for x in seen[:2]]
    assert measured.forward["stream_out"].variance[1::2] == pytest.approx(expected, rel=1e-5)
    between = measured.stream_covariance
    assert between is not None and between.shape == (4, 3, 3)
    streams = seen[0].detach().double().movedim(2, 0).reshape(3, -1) - float(seen[0].detach().double().mean())
    shared = (streams @ streams.T).numpy()
    assert between[1] == pytest.approx(3 * shared / np.trace(shared), rel=1e-5)
    assert np.isfinite(measured.gradient["stream_in"].log_variance).all()
    assert any("means over them" in note for note in measured.notes)


def test_what_is_not_known_of_them_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="mapping"):
        sp.apply(model, "lns")
