"""Attention to the encoder's output as a PyTorch module."""

from __future__ import annotations

from functools import partial

from signalprop.sublayers.attention.module import make as make_attention

make = partial(make_attention, cross=True)
