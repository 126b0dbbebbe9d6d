"""Whether a family says everything: what is missing is told when its file is imported, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import ROLES

if TYPE_CHECKING:
    from signalprop.families.base import Family, ModelPaths, StackPaths


def check_complete(family: Family) -> None:
    """Read the family's defaults, and hold its paths and its initialisation against the Architecture that they give."""
    try:
        architecture = Architecture(**family.read(family.readable))
    except KeyError as error:
        raise _incomplete(family, f"`fields` reads {error}, which `defaults` lacks") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise _incomplete(family, f"its defaults cannot be read: {type(error).__name__} {error}") from None
    drawn = family.initialisation.weights(architecture)
    lacking = [f"a standard deviation of {role!r} in its initialisation" for role in ROLES if role not in drawn]
    places = [list(_unsaid(family, paths, architecture)) for paths in family.paths]
    if all(places) and not (architecture.streams and not family.paths):  # one of them has to fit the defaults
        lacking += places[0] if places else ["paths"]
    if lacking:
        raise _incomplete(family, f"it lacks {'; '.join(lacking)}")


def _incomplete(family: Family, why: str) -> InputError:
    return InputError(f"the family {family.model_type!r} is incomplete: {why} (CONTRIBUTING.md: Add a family)")


def _unsaid(family: Family, paths: ModelPaths, a: Architecture) -> Iterator[str]:
    """What the paths do not say of a model of this architecture."""
    two = a.kind == "encoder-decoder"
    needed = {
        "position": a.positions in ("learned", "sinusoidal"),
        "decoder_position": two and a.positions_of(decoder=True) in ("learned", "sinusoidal"),
        "segment": a.n_segments > 0,
        "embedding_norm": a.embedding_norm,
        "decoder_norm": two and a.embedding_norm,
        "class_tokens": a.n_class_tokens > 0,
        "convolutions": a.input == "frames",
        "transform": family.head_transform,
        "classifiers": family.head == "classes",
    }
    yield from (f"paths.{name}" for name, needs in needed.items() if needs and not getattr(paths, name))
    inputs = (a.input, "decoder_tokens") if two else (a.input,)
    yield from (f"paths.inputs[{name!r}]" for name in inputs if name not in paths.inputs)
    if len(paths.stacks) != 1 + two:
        yield f"paths.stacks of {1 + two} ({a.kind})"
        return
    for stack, layers in zip(
        paths.stacks, (a.layer_branches[: a.n_layers], a.layer_branches[a.n_layers :]), strict=False
    ):
        for kinds in dict.fromkeys(layers):
            yield from (f"{name} in the stack {stack.layers!r}" for name in _unsaid_of_layer(stack, a, kinds))


def _unsaid_of_layer(stack: StackPaths, a: Architecture, kinds: tuple[str, ...]) -> Iterator[str]:
    if a.has_final_norm and not stack.final_norm:
        yield "final_norm"
    if len(stack.sublayers) < len(kinds) and set(kinds) - set(stack.kinds):
        yield f"{len(kinds)} sublayers"
        return
    placement = a.placements[-1 if "cross_attention" in kinds else 0]
    for k, its_name in enumerate(kinds):
        sublayer, kind = stack.of(k, its_name), kind_named(its_name)
        fused = {"query", "key", "value"} if sublayer.fused else set()
        fused |= {role for roles in sublayer.blocks.values() for role in roles}
        roles = set(kind.role_names(a)) - fused
        yield from (f"weights[{role!r}]" for role in sorted(roles - set(sublayer.weights)))
        needed = {
            "post_norm": placement == "sandwich",
            "reads": placement in ("none", "res-post"),
            "query_norm": bool(a.qk_norm) and kind.attends,
            "key_norm": bool(a.qk_norm) and kind.attends,
        }
        for name, needs in needed.items():
            if needs and not getattr(sublayer, name) and not (name == "reads" and sublayer.reads is not None):
                yield name
