"""What `apply` makes of a model's class: it knows its record, and saves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from signalprop.attachment.mapping import Mapping
from signalprop.repair.module_swaps import Splice, carry_over
from signalprop.repair.record import Record, applied_mapping, attached_vanilla, is_pretrained
from signalprop.repair.saving import save_pretrained, warn_of_plain_loading


class Applied(Splice):
    """A model that carries a scheme. Its name stays that of the vanilla class, which libraries look at."""

    keeps_name = True
    adaptable = True
    brings = ("signalprop_record",)
    signalprop_record: Record

    def signalprop_mapping(self) -> Mapping:
        """Where the signal runs, in the units of the Parametrization, for `measure` and `Probe`."""
        return applied_mapping(attached_vanilla(self), self.signalprop_record)


class AppliedPretrained(Applied):
    """A Hugging Face model that carries a scheme: what it saves can be loaded again with the scheme."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As transformers has it; it makes a new head, which gets the old one's multiplier."""
        vanilla: Any = super()
        before = vanilla.get_input_embeddings(), vanilla.get_output_embeddings()
        table: nn.Embedding = vanilla.resize_token_embeddings(*args, **kwargs)
        for old, new in zip(before, (vanilla.get_input_embeddings(), vanilla.get_output_embeddings()), strict=True):
            carry_over(old, new)
        p = self.signalprop_record.parametrization
        architecture = p.architecture.replace(vocab_size=int(table.weight.shape[0]))
        self.signalprop_record.parametrization = replace(p, architecture=architecture)
        return table

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers has it, and beside it the record that `signalprop.load` needs.

        Warns that transformers by itself would load the vanilla function, where that is another one.
        """
        vanilla: Any = super()
        warn_of_plain_loading(self)
        save_pretrained(self, vanilla.save_pretrained, save_directory, *args, **kwargs)


def applied_mixin(model: type[nn.Module]) -> type[Applied]:
    """The mixin for a model of this class."""
    return AppliedPretrained if is_pretrained(model) else Applied
