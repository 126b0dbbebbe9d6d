"""VaultGemma: Gemma 2 without norms on the branches' outputs."""

from dataclasses import replace

from signalprop.families import gemma2, llama

FAMILY = gemma2.FAMILY.like(
    "vaultgemma", lambda c: gemma2.fields(c) | {"norm_placement": "pre"},
    paths=llama.paths(
        llama.ATTENTION,
        replace(llama.FEED_FORWARD, norm="pre_feedforward_layernorm"),
        gain_offset=1.0,
    ),
)  # fmt: skip
