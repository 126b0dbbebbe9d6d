"""Attention to the encoder's output as a PyTorch module."""

from __future__ import annotations

from functools import partial

from signalprop.sublayers.attention.module import Attention

make = partial(Attention, cross=True)
