"""Attention within a window and to averages of what came before, as a PyTorch module."""

from __future__ import annotations

from functools import partial

from signalprop.sublayers.compressed_sparse_attention.roles import KIND
from signalprop.sublayers.shared_kv_attention.module import make as make_name

make = partial(make_name, name=KIND.name)
