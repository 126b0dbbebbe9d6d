"""mBART: BART, with norms before the branches, and one at the end of each stack."""

from dataclasses import replace

from signalprop.families import bart

STACKS = bart.stack("encoder", final_norm=True), bart.stack("decoder", final_norm=True, cross=True)
FAMILY = bart.FAMILY.like(
    "mbart",
    lambda c: bart.fields(c) | {"norm_placement": "pre", "final_norm": True},
    paths=(replace(bart.PATHS, stacks=STACKS),),
)
