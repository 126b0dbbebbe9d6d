"""What a tied head's gradient has along the stream, and what of it attention sends back.

A head that is the table of tokens favours the token that a position reads, and the final norm takes that part out of
the gradient: it lies along the stream, and so along what every branch has added to it. On its way back it passes the
weights that made it, so that it is not independent of them: docs/theory/network.md, "Through the weights that made it".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from signalprop.kernels.embedding_and_loss import read_and_asked
from signalprop.kernels.scaled_kernel import State, on_both_sides
from signalprop.kernels.stack import Read, Stack
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import drawn_rows, kind_of, kinds_in
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.log_arithmetic import inverse_roots, safe_exp
from signalprop.theory.loss_gradient import top_gradient

_KINDS = {"attention", "cross_attention", "feed_forward", "experts"}
_FELT = 2e-3  # gradient along the stream, over that of one row of the head, from which it is followed


@dataclass
class Along:
    """Of the gradient of one sequence, on its way back through one stack.

    Attributes:
        overlap: (T, T), of the gradient at the last stream, of the row (first axis), with the table's row that stands
            in every stream at the column, per feature. curve: (T, T), how the gradient at the row follows the stream at
            the column, negative, per feature: what its final norm takes out, first of all.
        sent, more: (S, S) of an encoder's output: the same as `curve`, and kernel beyond, of all cross-attentions.
    """

    stack: Stack
    overlap: FloatArray
    curve: FloatArray
    sent: FloatArray | float = 0.0
    more: FloatArray | float = 0.0

    def added(self, i: int, read: Read, stream: State, share: State) -> State:
        """The share of a gradient that sublayer i sends back, with what it has beyond independent weights."""
        branch, across = self.stack.branches[i], self.stack.across[i]
        assert read.divisor is not None
        root = inverse_roots(read.divisor) * abs(float(self.stack.p.norm_output[i]))
        squared = float(self.stack.p.branch[i]) ** 2
        kernel = stream.absolute()
        curve = branch.backward(i, read.kernel, self.curve * squared)
        moved = on_both_sides(_tangential(curve, kernel), root)
        beyond: FloatArray | float = 0.0
        if kind_of(self.stack.p, i).attends:
            if across:
                self.sent = self.sent + branch.sent
            # the part along the branch, through the square of its weights
            self.stack.cache_attention(True)  # for `backward`
            output = branch.forward(i, read.kernel)
            self.stack.cache_attention(False)
            along = self.curve @ output @ self.curve.T * squared**2
            beyond = on_both_sides(branch.backward(i, read.kernel, along), root)
            if across:
                self.more = self.more + branch.sent
            else:
                crossed = (self.overlap - self.curve @ kernel) @ moved.T
                beyond += moved @ kernel @ moved.T - crossed - crossed.T
        self.curve = self.curve + moved
        return State(share.kernel + beyond * safe_exp(-share.log_scale), share.log_scale).rescaled()

    def at_memory(self, memory: FloatArray, arrived: State) -> FloatArray:
        """What the gradient's kernel at an encoder's output has beyond, in units of what arrives there, (S, S)."""
        sent = _tangential(np.asarray(self.sent), memory)
        return np.asarray((sent @ memory @ sent.T + self.more) * safe_exp(-arrived.log_scale))

    def of_encoder(self, last: State) -> Along:
        """The same before the final norm of an encoder, whose last stream that is."""
        kernel = last.absolute()
        root = inverse_roots(np.diagonal(kernel) + self.stack.a.norm_eps) * abs(self.stack.p.head.final_norm_gain)
        curve = on_both_sides(_tangential(np.asarray(self.sent), kernel), root)
        return Along(self.stack, np.zeros_like(curve), curve)


def follows(p: Parametrization, inputs: InputStatistics) -> bool:
    """Whether it is derived of a table of one setting: of real ids, in pre-norm stacks of attention and feed-forwards
    in closed form with plain skips, whose head is the table of tokens after a final norm alone.

    Args:
        inputs: of the loss.
    """
    a = p.architecture
    length = a.target_len if a.kind == "encoder-decoder" and a.target_len else a.seq_len
    ids = all(x is not None and x.shape[1] == length for x in (inputs.tokens, inputs.targets))
    head = a.has_tied_head and a.has_final_norm and not a.head_transform
    skips = not a.several_streams and bool((p.skip == 1).all()) and not p.parallel.any()
    plain = set(a.placements) == {"pre"} and p.shaping.kind == "none" and not drawn_rows(p).any()
    return bool(ids and head and skips and plain and {kind.name for kind in kinds_in(p)} <= _KINDS)


def along_of(stack: Stack, inputs: InputStatistics, last: State, log_token_share: float) -> Along | None:
    """At the last stream; None where no token is favoured, or more stands between than is derived.

    Args:
        inputs: of the loss. log_token_share: as of `theory.loss_gradient.top_gradient`.
    """
    p, a = stack.p, stack.a
    if not follows(p, inputs):
        return None
    kernel = last.absolute()
    p_read = np.maximum(np.diagonal(kernel) + a.norm_eps, 1e-300)
    size = np.sqrt(p_read)
    r = np.clip(kernel / np.outer(size, size), 0.0, 1.0)
    top = top_gradient(p, np.log(np.outer(size, size)), r, log_token_share)
    favour, aligned = (np.diagonal(np.broadcast_to(x, r.shape)) for x in (top.p_read, top.aligned))
    if (favour * np.sqrt(aligned)).mean() < _FELT:
        return None
    read, asked = read_and_asked(inputs)
    row = p.embedding.token * math.exp(log_token_share / 2)  # of the table, as it stands in the stream
    overlap = row * (favour[:, None] * read - asked)
    along = np.diagonal(overlap) / p_read
    return Along(stack, overlap / size[:, None], np.diag(along / size))


def _tangential(curve: FloatArray, kernel: FloatArray) -> FloatArray:
    """What a norm leaves: vectors sum_j curve_ij x_j without what lies along x_i, of unit vectors with this kernel."""
    root = inverse_roots(np.diagonal(kernel))
    along = (curve * on_both_sides(kernel, root)).sum(1)
    return curve - np.diag(along)
