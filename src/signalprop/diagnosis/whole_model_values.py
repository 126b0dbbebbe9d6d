"""What a diagnosis says of a model as a whole, as values: its ends, fresh weights, changes that were tried."""

from __future__ import annotations

from signalprop.files.validation import Value

Number = float | None


# Names of trials of the configuration: an entry that has its default, or was set; and a new model without any change.
SETTINGS, REBUILT = ("unset", "setting"), "rebuilt"


class BadTensor(Value):
    """A parameter or buffer that holds numbers which are not finite.

    Attributes:
        name: its path. kind: `parameter` or `buffer`. layer: the first number in its path. first: index of the first
            such entry. nan, infinite: how many, of `n`.
    """

    name: str
    kind: str
    layer: int | None
    first: tuple[int, ...]
    nan: int
    infinite: int
    n: int


class OutlyingRow(Value):
    """A row that is far larger than the others of its table.

    Attributes:
        table: in words. row: the largest one. ratio: its norm over the median row's. count: how many lie beyond
            `bound`, such a ratio. losses: of a text with these words among the answers and without, where that is less.
    """

    table: str
    row: int
    ratio: float
    count: int
    bound: Number = None
    losses: tuple[float, ...] = ()


class Ends(Value):
    """A language model before its first layer and after its last.

    Attributes:
        log_vocab: ln V, the loss of guessing. logits_variance: over the vocabulary, mean over positions.
        stream_variance: of what the final norm reads, over features. read_rms: root mean square of what the head reads.
        table_rms, head_rms: of the weights. tied: the head is the table.
        final_gain: root mean square of the final norm's gains; final_gain_constant: their number, if all are one.
        layer_gains_constant: whether the gains of every layer's norms are constant, as an initialiser leaves them.
        head_drawn: whether the head looks like independent draws. outlying: rows far outside the others.
        learnt: the first parameter that no initialiser leaves as it is, and why; '' where all are fresh.
        drawn_layers: layers in which nothing was learnt. frequencies: entropy of the words that were asked for, by how
            often each was, where they are many times as many as the different ones: the loss of frequencies alone.
        head_copies_table: it is not tied, and holds the same numbers. other_losses: of a text whose next words are
            asked for, as if the word itself, and the one after the next, were.
    """

    log_vocab: float
    logits_variance: Number
    stream_variance: Number
    read_rms: Number
    table_rms: Number
    head_rms: Number
    tied: bool
    final_gain: Number
    final_gain_constant: Number
    layer_gains_constant: bool | None
    head_drawn: bool
    outlying: tuple[OutlyingRow, ...] = ()
    learnt: str = ""
    drawn_layers: tuple[int, ...] = ()
    frequencies: Number = None
    head_copies_table: bool = False
    other_losses: tuple[float, ...] = ()


class Off(Value):
    """Fresh weights of one role that are not what the model's initialiser draws.

    Attributes:
        place: kind of sublayer, `embedding` or `head`. name: role or gain. layers: which, () at the ends.
        wanted, measured: standard deviation, or value of a gain, of the first. zeros: whether all are 0.
        paths: of the first parameter.
    """

    place: str
    name: str
    layers: tuple[int, ...]
    wanted: Number
    measured: Number
    zeros: bool
    paths: tuple[str, ...] = ()


class Reached(Value):
    """A sublayer: how many of the parameters of its norm and its maps get a gradient that is not 0, of `n`."""

    layer: int
    kind: str
    reached: int
    n: int


class Fresh(Value):
    """Of a model with fresh weights: what deviates from its initialiser, and what the gradient of a text reaches.

    Attributes:
        not_checked: why the weights were not compared with the initialiser, '' if they were.
    """

    off: tuple[Off, ...] = ()
    reached: tuple[Reached, ...] = ()
    not_checked: str = ""


class Tried(Value):
    """A cheap change of the weights or of how they are read, and what it does to the loss of a short text.

    Attributes:
        name: a short word for its kind. fault: what is wrong if it repairs the model; repair: the change, in words.
        loss, before: with and without it, in nats per token. standard_error: of their difference, where it
            was looked at on several sequences. further: another change that lowers the loss clearly where this one is
            made, so that this one alone does not repair the model.
    """

    name: str
    fault: str
    repair: str
    loss: float
    before: float
    standard_error: Number = None
    further: str = ""
