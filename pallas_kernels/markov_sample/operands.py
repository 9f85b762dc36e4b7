"""What a position of the walk takes and gives."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Confidence(NamedTuple):
    """A linear head ``weight . [hidden; embedding] + bias`` in fp32.

    Attributes:
        hidden: of the position.
        embedding: of the previous token; None for a head on hidden states alone.
        weight: D numbers, or D + R of them.
        bias: a scalar; None is 0.
    """

    hidden: Float[Array, "S D"]
    embedding: Float[Array, "S R"] | None
    weight: Float[Array, "X"]
    bias: Float[Array, ""] | None


class Position(NamedTuple):
    """Operands of one position.

    Attributes:
        base: fp32 logits of all positions walked, C of them.
        ranked: what the sequential head makes of the previous token, in rank space.
        matrix: from rank space to the vocabulary (W2).
        temperature: of each request; 0 draws the most likely token.
        keys: typed keys of this position's noise, ``noise.gumbel``'s; None where every request
            is greedy: no scores are kept then.
        confidence: its head; None without one.
    """

    base: Float[Array, "S C Vd"]
    ranked: Float[Array, "S R"]
    matrix: Float[Array, "Vd R"]
    temperature: Float[Array, "S"]
    keys: Array | None
    confidence: Confidence | None


class Sample(NamedTuple):
    """What was drawn.

    Attributes:
        column: draft-vocabulary column of each request.
        scores: fp32 logits over temperature that the draws were made from, at this position, as
            they were elsewhere; None without noise.
        logprob: log-softmax of those scores at the column; None without noise.
        confidence: logit; None without a head.
    """

    column: Int[Array, "S"]
    scores: Float[Array, "S G Vd"] | None
    logprob: Float[Array, "S"] | None
    confidence: Float[Array, "S"] | None
