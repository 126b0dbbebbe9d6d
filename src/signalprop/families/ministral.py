"""Ministral: Mistral, with a window on the layers that say so (by default, all)."""

from signalprop.families import mistral

FAMILY = mistral.FAMILY.like("ministral")
