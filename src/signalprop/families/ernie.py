"""ERNIE (1 to 3): BERT."""

from signalprop.errors import InputError
from signalprop.families import bert
from signalprop.families.base import BY_HAND, Config, Fields


def fields(c: Config) -> Fields:
    if c["use_task_id"]:
        raise InputError(f"ERNIE with use_task_id adds a fourth embedding, which an Architecture cannot say; {BY_HAND}")
    return bert.fields(c)


FAMILY = bert.FAMILY.like("ernie", fields, {"use_task_id": False})
