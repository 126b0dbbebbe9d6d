"""Shaped attention, and other activations, inside models whose forward code stays as it is.

Attention goes through one function that is registered with transformers; it finds what it needs on the attention module
itself, so models do not share numbers, and modules without any compute what they always did. Positions are read off
the mask, row by row, so padding, packed sequences and caches need nothing. `docs/theory/kernels.md` has B and D.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.errors import InputError, require
from signalprop.kernels.stack import attention_shapes
from signalprop.models.activations import TorchFunction, torch_activation
from signalprop.models.shaping import LOW, TorchShape, shaped_attention, torch_shape
from signalprop.models.token_positions import Positions
from signalprop.network.activations import activation
from signalprop.network.parametrization import Parametrization
from signalprop.repair.module_swaps import Splice, splice

Numbers = tuple[float, float, float]
NAME = "signalprop"  # of the attention implementation, among transformers' `eager` and `sdpa`
# tables are made for so many tokens at first, and grow with the input
_TOKENS = 1024
# a calibration sends kernels of that many tokens through the stack, (tokens, tokens) in float64


class Shaped(Splice):
    """An attention whose matrix is D softmax(scores + B), through transformers' attention interface.

    Attributes:
        shape: B and D. numbers: the columns shape_in, shape_out and shape_gain that they come from.
    """

    brings = ("shape", "numbers")
    shape: TorchShape
    numbers: Numbers

    def __setstate__(self, state: Any) -> None:
        _interfaces()  # in a process that unpickles the model
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.config
        if config._attn_implementation != NAME:
            raise InputError(
                f"this model's attention is shaped by a scheme, and its implementation was set to "
                f"{config._attn_implementation!r}, which would leave that out; call "
                f"model.set_attn_implementation({NAME!r})"
            )
        return super().forward(*args, **kwargs)


class Activating(Splice):
    """An activation that computes another one.

    Attributes:
        function: what it computes. name: that, as `signalprop.network.activations` calls it.
    """

    brings = ("function", "name")
    function: TorchFunction
    name: str

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# --- what transformers calls -----------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: shaped where the module is, else its `sdpa`.

    Args:
        query: (batch, heads, queries, d_head). key, value: (batch, key heads, keys, d_head).
        attention_mask: (batch, 1, queries or 1, keys), True or 0 where a query may look; other numbers are added.

    Returns:
        (batch, queries, heads, d_head), and no weights.
    """
    if not isinstance(module, Shaped):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    window = kwargs.get("sliding_window")
    if window is not None and key.shape[2] > window:
        raise InputError(
            f"shaped attention has no sliding window, and {key.shape[2]} tokens do not fit into the model's of {window}"
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise InputError(f"shaped attention cannot follow {name!r}, which this model's attention asks for")
    shape = module.shape
    at, added = _positions(attention_mask, query, key, causal=shape.causal)
    bias = kwargs.get("position_bias")
    if bias is not None:
        added = bias if added is None else added + bias
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixed = shaped_attention(shape, query, key, value, at, added=added, dropout=dropout, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _positions(mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> tuple[Positions, Tensor | None]:
    """Where the tokens stand, and what the mask adds to the scores."""
    n, m = query.shape[2], key.shape[2]
    if mask is None:
        if n != m:
            raise InputError(f"shaped attention needs a mask where {n} queries read {m} keys")
        return Positions.of_length(n, query.device), None
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] < m:
        raise InputError(
            f"shaped attention reads positions off the mask, which has shape {tuple(mask.shape)}; expected (batch, 1, "
            f"{n}, {m})"
        )
    mask = mask[..., :m].expand(-1, -1, n, -1)
    if not mask.is_floating_point():
        return Positions.of_mask(mask.bool(), causal=causal), None
    # forbidden places hold -inf or the least number of their type
    seen = mask > max(LOW, 0.5 * torch.finfo(mask.dtype).min)
    return Positions.of_mask(seen, causal=causal), mask


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Masks for `attend`: transformers' for sdpa, left out only where queries and keys are the same whole sequence."""
    from transformers.masking_utils import sdpa_mask

    queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    if queries != kwargs["kv_length"]:
        kwargs["allow_is_causal_skip"] = False  # a cache may be longer than what was written into it
    found: Tensor | None = sdpa_mask(*args, **kwargs)
    return found


def _interfaces() -> None:
    """Register `attend` and `mask`, once."""
    require("transformers", "models")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


# --- installing ------------------------------------------------------------------------------------------


def shape_attention(module: nn.Module, shape: TorchShape, numbers: Numbers, where: str) -> None:
    """Have an attention of a transformers model shaped."""
    forward: Any = inspect.unwrap(type(module).forward)
    if "ALL_ATTENTION_FUNCTIONS" not in forward.__code__.co_names:
        raise InputError(
            f"{where}: {type(module).__name__} does not call its attention through transformers' interface, so it "
            "cannot be shaped; take BERT, GPT-2, Llama or ViT, or build(parametrization)"
        )
    splice(module, Shaped, shape=shape, numbers=numbers)


def shapes_of(p: Parametrization) -> list[TorchShape | None]:
    """B and D of every sublayer; None where attention is not shaped."""
    return [torch_shape(shapes, min(p.architecture.seq_len, _TOKENS)) for shapes in attention_shapes(p)]


def set_implementation(model: nn.Module) -> str | None:
    """Have a model of transformers call `attend`; the implementation that it had."""
    setter = getattr(model, "set_attn_implementation", None)
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(model, "base_model_prefix"):
        _interfaces()
    if setter is None or config is None:
        raise InputError(
            f"{type(model).__name__} is not a model of transformers, whose attention alone can be shaped from outside; "
            "build(parametrization) makes one"
        )
    window, length = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", 0)
    if window is not None and window < length:
        raise InputError(
            f"this model's attention has a sliding window of {window} tokens, which hides the start of the sequence "
            "that shaped attention counts from; load it with sliding_window=None, or build(parametrization)"
        )
    before: str | None = config._attn_implementation
    logging: Any = require("transformers", "models").logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it only warns where it cannot; what has changed is looked at below
    try:
        setter(NAME)
    except (ValueError, KeyError) as error:
        raise _unsupported(model, str(error).split("\n")[0]) from None
    finally:
        logging.set_verbosity(verbosity)
    if config._attn_implementation != NAME:
        version = require("transformers", "models").__version__
        raise _unsupported(model, f"in transformers {version} its attention code is fixed")
    return before


def _unsupported(model: nn.Module, why: str) -> InputError:
    return InputError(
        f"{type(model).__name__} does not take another attention ({why}), so it cannot be shaped; "
        "take BERT, GPT-2, Llama or ViT, or build(parametrization)"
    )


def replace_activation(module: Any, name: str, where: str) -> None:
    """Have an activation module compute another activation."""
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is not None:
        what = "nothing" if module is None else f"a {type(module).__name__}"
        raise InputError(
            f"{where}: the scheme changes the activation, and the mapping's `activation` is {what}; expected a module "
            "without parameters (or choose activation=keep, where the scheme has that)"
        )
    splice(module, Activating, function=torch_activation(name), name=activation(name).name)
