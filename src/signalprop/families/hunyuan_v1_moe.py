"""HunYuan with experts (v1): the dense one, with experts beside a shared one in every layer."""

from signalprop.errors import InputError
from signalprop.families import _experts, hunyuan_v1_dense
from signalprop.families.base import BY_HAND, Config, Fields


def fields(c: Config) -> Fields:
    """Layers that differ in their number of experts are refused."""
    counts = [c.get("num_local_experts") or c["num_experts"], c["moe_topk"]]
    found = [{*count} if isinstance(count, list) else {count} for count in counts]
    if any(len(several) > 1 for several in found):
        raise InputError(f"layers with different numbers of experts are not supported; {BY_HAND}")
    (n_experts,), (top_k,) = found
    made = hunyuan_v1_dense.FAMILY.fields(c)
    return _experts.sparse(made, n_experts=n_experts, top_k=top_k, shared_width=c["intermediate_size"])


FAMILY = hunyuan_v1_dense.FAMILY.like(
    "hunyuan_v1_moe", fields,
    {"num_experts": 1, "moe_topk": 1},
    paths=_experts.paths(_experts.branch(router="gate.wg", shared="shared_mlp"), hunyuan_v1_dense.ATTENTION),
)  # fmt: skip
