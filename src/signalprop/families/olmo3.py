"""OLMo 3: OLMo 2, with a window on three layers of four."""

from signalprop.families import llama, olmo2
from signalprop.families.base import Config, Fields, every, rotary_base_of, seeing


def fields(c: Config) -> Fields:
    kinds = every(4, c)
    bases = [rotary_base_of(c, kind, "rope_theta", 500_000.0) for kind in kinds]
    return olmo2.FAMILY.fields(c) | {"rotary_base": bases[0]} | seeing(c, kinds, rotary_base=bases)


FAMILY = olmo2.FAMILY.like(
    "olmo3", fields,
    {"sliding_window": 4096},
    paths=llama.paths(olmo2.ATTENTION, olmo2.FEED_FORWARD),
)  # fmt: skip
