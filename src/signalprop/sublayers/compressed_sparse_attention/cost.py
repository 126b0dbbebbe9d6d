"""What attention within a window and to averages of what came before costs."""

from __future__ import annotations

from functools import partial

from signalprop.sublayers.compressed_sparse_attention.roles import KIND
from signalprop.sublayers.shared_kv_attention.cost import flops as flops_of_name
from signalprop.sublayers.shared_kv_attention.cost import parameters as parameters_of_name

parameters, flops = partial(parameters_of_name, name=KIND.name), partial(flops_of_name, name=KIND.name)
