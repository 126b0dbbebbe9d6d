"""What a family of transformers is: everything that the rest of the library has to know of it, in one value.

Nothing here or in a family's file imports torch: a description is read and predicted without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from signalprop.errors import InputError
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import ROLES

T = TypeVar("T")
Config = Mapping[str, Any]
Fields = dict[str, Any]  # of an Architecture
BY_HAND = "map the model by hand (docs/measuring.md)"
SINUSOIDS = 0.5**0.5  # root mean square of sines and cosines


@dataclass(frozen=True)
class SublayerPaths:
    """Where one sublayer's parts are: paths in its layer.

    `norm`, `branch`, `weights`, `post_norm`, `reads`, `call`, `calls`, `dropout`, `scaling`, `activation`,
    `query_norm`, `key_norm`: see `SublayerMap`. A branch ends after the output dropout where that is a module. `fused`
    is the module that holds query, key and value together; `blocks`, of other modules that hold several weights, these
    one after the other, or by turns: in so many groups of rows (`turns`) that each hold a part of every weight.
    `by_depth`: path of a flag that divides the scores by the layer's
    number. A norm that is nn.Identity counts as none, as does a `scaling` that the installed transformers does not
    have; one that is not the whole factor is left out. `reads` of "" is the layer itself.
    """

    norm: str
    branch: str
    weights: Mapping[str, str]
    fused: str = ""
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    turns: Mapping[str, Callable[[Architecture], int]] = field(default_factory=dict)
    call: int = 0
    calls: int = 1
    by_depth: str = ""
    scaling: str = ""
    dropout: str = ""
    reads: str | None = None
    post_norm: str = ""
    activation: str = ""
    query_norm: str = ""
    key_norm: str = ""


@dataclass(frozen=True)
class StackPaths:
    """A stack: paths in the base model, and the sublayers of one of its layers in order.

    Attributes:
        kinds: where layers differ: of a sublayer of that kind, in the place of the one that other layers have.
        scalar: path in a layer of a tensor of one number that multiplies the stream which leaves it.
    """

    layers: str
    sublayers: tuple[SublayerPaths, ...]
    final_norm: str | None = None
    kinds: Mapping[str, SublayerPaths] = field(default_factory=dict)
    scalar: str = ""

    def of(self, k: int, kind: str) -> SublayerPaths:
        """Sublayer `k` of a layer, which is of this kind."""
        return self.kinds.get(kind) or self.sublayers[k]


@dataclass(frozen=True)
class ModelPaths:
    """Where a model's modules are: stacks and embeddings in the base model, heads in the whole model.

    Attributes:
        fused_order: query, key, value as three `blocks`, or by turns in `groups` (query heads of a key, the key, its
            value).
        position, decoder_position: the tables, or root mean squares of ones that the model computes.
        transform, transform_activation: the dense layer before the head, and its activation where that is a module.
        convolutions: the maps that read frames, or lists of them. features_first: frames are (batch, features, frames).
        padding: the argument that holds the mask of what the (first) stack reads.
        gain_offset: a norm's gain is this plus its weight.
        inputs: what a Batch holds -> the model's argument for it.
    """

    stacks: tuple[StackPaths, ...]
    token: str
    position: str | float | None = None
    segment: str | None = None
    embedding_norm: str | None = None
    decoder_position: str | float | None = None
    decoder_norm: str | None = None
    class_tokens: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    features_first: bool = False
    fused_order: Literal["blocks", "groups"] = "blocks"
    transform: str | None = None
    transform_activation: str | None = None
    classifiers: tuple[str, ...] = ("score", "classifier")
    gain_offset: float = 0.0
    padding: str = "attention_mask"
    inputs: Mapping[str, str] = field(default_factory=lambda: {"tokens": "input_ids", "keep": "attention_mask"})


@dataclass(frozen=True)
class Initialisation:
    """What the family's `_init_weights` draws at its default settings: normal, nearly all biases zero.

    Attributes:
        weights: standard deviation of every role, of an Architecture.
        biases: likewise, of the roles whose biases are not zero.
        tables: of embeddings, convolutions and a separate head.
        transform: of the dense layer before the head, of an Architecture, where it is another.
        positions: of learned positions, where it is another; sines and cosines have mean square 1/2 whatever is said.
        setting: the number of a configuration to which all of these are proportional. usual: its default. gains: gains
            of norms, which are 1 by default, are proportional to it too.
    """

    weights: Callable[[Architecture], Mapping[str, float]]
    tables: float = 0.02
    biases: Mapping[str, float] = field(default_factory=dict)
    positions: float | None = None
    transform: Callable[[Architecture], float] | None = None
    setting: str = "initializer_range"
    usual: float = 0.02
    gains: bool = False

    def scale(self, config: Config) -> float:
        """The `setting` of a configuration over its default; as in transformers, 0 and none are the default."""
        value = config.get(self.setting) or self.usual
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InputError(f"{self.setting} is {value!r:.40}; expected a positive number, as {self.usual:g}")
        return value / self.usual


def normal(std: float = 0.02, **changes: Any) -> Initialisation:
    """The same standard deviation everywhere, and other fields of the Initialisation (`changes`)."""
    return Initialisation(lambda architecture: dict.fromkeys(ROLES, std), std, **changes)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in transformers. An incomplete one raises an InputError when it is created.

    Attributes:
        model_type: its name in config.json; the file is named so too, with _ for -.
        defaults: what its configuration class fills in, for every key that `fields` reads. readable: where `fields`
            refuses these, what a configuration has to say at least. former: names of keys in configurations that were
            written for other code, with those that `fields` reads.
        fields: configuration -> fields of an Architecture.
        paths: where the modules are; several where they moved between versions of transformers or differ with the
            configuration: the first that fits the model is taken. None of a family with several residual streams,
            whose models are measured where these are found, and hold no weights that a table could be read from.
        initialisation: what transformers draws.
        head: what a model has on top whose class is not known.
        encoder_classes: classes of an encoder-decoder's encoder alone.
        head_transform: a dense layer, an activation and a norm come before a language-model head.
        tied_head_scale: factor on the input of a head that is the token table.
        position_offset: rows that its tables of learned positions have beside those that are read.
        key_bias: keys have a bias where the other projections have one.
        hears: of a speech model, the class of its feature extractor, and how many of its units of length (samples, or
            frames) a frame is.
        score_bias: scores get a bias by distance beside the positions, one table per stack (an Architecture has no
            place for it: predictions are those of a model where it is zero).
    """

    model_type: str
    defaults: Config
    fields: Callable[[Config], dict[str, Any]]
    paths: tuple[ModelPaths, ...]
    initialisation: Initialisation
    head: Literal["lm", "classes"] = "lm"
    encoder_classes: tuple[str, ...] = ()
    head_transform: bool = False
    tied_head_scale: Callable[[Architecture], float] | None = None
    position_offset: int = 0
    key_bias: bool = True
    score_bias: bool = False
    readable: Config = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    hears: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        _check_complete(self)

    def like(
        self,
        model_type: str,
        fields: Callable[[Config], dict[str, Any]] | None = None,
        own: Config | None = None,
        **changes: Any,
    ) -> Family:
        """A family like this one.

        Args:
            model_type, fields: as of Family. own: defaults that differ or are added.
            changes: other fields of Family.
        """
        given = {"defaults": {**self.defaults, **(own or {})}, "fields": fields or self.fields, **changes}
        return replace(self, model_type=model_type, **given)

    def with_stack(self, **changes: Any) -> tuple[ModelPaths, ...]:
        """Its paths, with other fields of their first stack."""
        return tuple(replace(one, stacks=(replace(one.stacks[0], **changes), *one.stacks[1:])) for one in self.paths)

    def read(self, config: Config) -> Fields:
        """what the configuration leaves out is as in transformers' class."""
        renamed = {new: config[old] for old, new in self.former.items() if old in config}
        return self.fields({**self.defaults, **config, **renamed, "model_type": self.model_type})


# --- what the files of several families need -------------------------------------------------------------


def refuse(config: Config, **words: str) -> None:
    """Raise InputError where one of these keys is set, which an Architecture cannot say; by key, what it means."""
    for key, what in words.items():
        if config.get(key):
            raise InputError(f"{config['model_type']} with {what} ({key}) is not supported; {BY_HAND}")


def check_kinds(kinds: Sequence[str], known: Container[str]) -> None:
    """Raise InputError where a layer is of a kind that is not known."""
    if odd := sorted(kind for kind in kinds if kind not in known):
        raise InputError(f"layers of {odd[0]!r} are not supported; {BY_HAND}")


def separate(prefix: str, names: str, output: str) -> dict[str, str]:
    """The four weights of an attention: `names` of query, key and value after a `prefix`, and the path of the output's.

    >>> separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj")["key"]
    'self_attn.k_proj'
    """
    roles = zip(("query", "key", "value"), names.split(), strict=True)
    return {role: f"{prefix}{name}" for role, name in roles} | {"output": output}


def activation_name(name: Any) -> str:
    """transformers' name of an activation -> the library's."""
    return activation(name).name


def rotary(config: Config, name: str, default: float) -> float:
    """A rotary number: in transformers 5 under `rope_parameters`, before that at the top level."""
    value = (config.get("rope_parameters") or {}).get(name, config.get(name))
    return default if value is None else float(value)


def stretch(said: Config) -> float:
    """Factor on rotated queries and keys, each, that the `rope_parameters` of a configuration say (YaRN); else 1."""
    if said.get("rope_type", said.get("type")) != "yarn":
        return 1.0
    if said.get("attention_factor"):
        return float(said["attention_factor"])
    if "factor" not in said:
        raise InputError("rope_parameters of rope_type yarn have no factor; give that by which lengths are stretched")
    some, whole = said.get("mscale"), said.get("mscale_all_dim")
    if some and whole:
        return grown(said["factor"], some) / grown(said["factor"], whole)
    return grown(said["factor"])


def grown(factor: float, share: float = 1.0) -> float:
    """By what YaRN multiplies queries and keys, each, of rotations slowed by a factor (2309.00071)."""
    return 0.1 * share * math.log(max(factor, 1.0)) + 1.0


def rotary_base_of(config: Config, kind: str, before: str, default: float) -> float:
    """The rotary base of one kind of layers: in transformers 5 under its name, before that at the top level."""
    value = ((config.get("rope_parameters") or {}).get(kind) or {}).get("rope_theta", config.get(before))
    return default if value is None else float(value)


def every(n: int, config: Config, *, first: bool = False) -> Sequence[str]:
    """Kinds of the layers: what a configuration says, or a full one after n - 1 with a window (`first`: before)."""
    full = [(i % n == 0) if first else ((i + 1) % n == 0) for i in range(config["num_hidden_layers"])]
    return config.get("layer_types") or ["full_attention" if one else "sliding_attention" for one in full]


def pattern(values: Sequence[T]) -> T | tuple[T, ...]:
    """The shortest run that gives these values when it is repeated; a single one by itself.

    >>> pattern([8, 0, 8, 0, 8])
    (8, 0)
    """
    n = next(n for n in range(1, len(values) + 1) if all(x == values[i % n] for i, x in enumerate(values)))
    return values[0] if n == 1 else tuple(values[:n])


def seeing(config: Config, kinds: Sequence[str], **settings: Any) -> dict[str, Any]:
    """`seq_len` and `settings` of attention whose layers are of these kinds; seq_len is the width of a window, if any.

    Args:
        settings: others of the attention's, a value or one per layer.
    """
    check_kinds(kinds, ("full_attention", "sliding_attention"))
    length, window = config["max_position_embeddings"], config.get("sliding_window")
    windows = [window if window and kind == "sliding_attention" and window < length else 0 for kind in kinds]
    given = {"window": windows, **settings}
    said = {name: pattern(value) if isinstance(value, (list, tuple)) else value for name, value in given.items()}
    return {"seq_len": window if any(windows) else length, "settings": {"attention": said}}


def rotating_in_windows(config: Config, kinds: Sequence[str]) -> dict[str, Any]:
    """`seeing`, where layers without a window rotate nothing if others have one."""
    rotates = [not config["sliding_window"] or kind == "sliding_attention" for kind in kinds]
    return seeing(config, kinds, rotates=rotates)


def pair(value: Any) -> tuple[int, int]:
    """Height and width; one number is both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


# --- whether a family's file is complete: importing it raises one line that names what is missing -------------


def _check_complete(family: Family) -> None:
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
