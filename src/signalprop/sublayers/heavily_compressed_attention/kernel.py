"""Token kernels through attention within a window and to averages of what came before."""

from __future__ import annotations

from functools import partial

from signalprop.sublayers.heavily_compressed_attention.roles import KIND
from signalprop.sublayers.shared_kv_attention.kernel import of as of_name

of = partial(of_name, name=KIND.name)
