"""DeiT: ViT with a distillation token; transformers starts its positions and class tokens at zero."""

from dataclasses import replace

from signalprop.families import vit
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    plain = vit.fields(c)
    return plain | {"distillation_token": True, "seq_len": plain["seq_len"] + 1}


FAMILY = vit.FAMILY.like(
    "deit", fields,
    paths=vit.paths("cls_token", "distillation_token"),
    initialisation=replace(vit.FAMILY.initialisation, positions=0.0),
)  # fmt: skip
