"""Why two greedy answers part: a tie that rounding may settle either way, or a bug."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.models.ragged import rectangle

Verdict = Literal["EXACT", "TIE", "BUG"]

TIE_MULTIPLE = 4
"""Noise units that a tie may be wide: either token's logit may be off by one unit each way, in
the prefix's cache as well as in the row itself."""

PIECE = 128
"""Prefix tokens forwarded at once."""


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where an answer leaves the reference, and what the target's logits say about it.

    Attributes:
        verdict: "EXACT" when it does not.
        position: first differing position of the answer; None when exact.
        gap: logits by which the best token leads the worse of the two chosen ones.
        noise: largest difference of any logit there between batch shapes of the same forward.
    """

    verdict: Verdict
    position: int | None = None
    gap: float | None = None
    noise: float | None = None


def first_difference(reference: Sequence[int], answer: Sequence[int]) -> int | None:
    """First position where two answers differ, the end of the shorter included."""
    for position, (mine, other) in enumerate(itertools.zip_longest(reference, answer)):
        if mine != other:
            return position
    return None


def classify(logits: Float[np.ndarray, "shapes V"], chosen: tuple[int, int]) -> Parting:
    """Judge two tokens by the next-token logits that several batch shapes give for one prefix.

    A tie needs noise: where every shape gives the same logits, only a gap of 0 is one.
    """
    noise = float((logits.max(axis=0) - logits.min(axis=0)).max())
    gap = float(max(row.max() - min(row[token] for token in chosen) for row in logits))
    return Parting("TIE" if gap <= TIE_MULTIPLE * noise else "BUG", gap=gap, noise=noise)


def compare(
    target: LoadedTarget,
    prompt: Sequence[int],
    reference: Sequence[int],
    answer: Sequence[int],
    *,
    batch: int,
    width: int,
    capacity: int,
) -> Parting:
    """Compare a greedy answer with the reference.

    An answer that merely stops earlier or later is a bug: nothing random ends one.

    Args:
        batch: requests of the larger batch shape.
        width: rows a request has in a full window.
        capacity: tokens that bound prompt and answer.
    """
    position = first_difference(reference, answer)
    if position is None:
        return Parting("EXACT")
    if position >= min(len(reference), len(answer)):
        return Parting("BUG", position)
    logits = prefix_logits(
        target, [*prompt, *reference[:position]], batch=batch, width=width, capacity=capacity
    )
    found = classify(logits, (reference[position], answer[position]))
    return dataclasses.replace(found, position=position)


def prefix_logits(
    target: LoadedTarget, prefix: Sequence[int], *, batch: int, width: int, capacity: int
) -> Float[np.ndarray, "4 V"]:
    """Next-token logits of ``prefix``, computed in four shapes.

    One request and ``batch`` requests, whose last token is forwarded in a window of one row and
    of ``width`` rows; the tokens before it in pieces. The other requests hold the same prefix.
    """
    dtype = target.config.family.input_embedding(target.weights).dtype
    rows = -(-(capacity + PIECE) // PIECE) * PIECE
    found = []
    for requests, window in itertools.product((1, batch), (1, width)):
        cache = target.config.family.init_cache(target.config, requests, rows, dtype)
        body = prefix[:-1]
        for begin in range(0, len(body), PIECE):
            piece = body[begin : begin + PIECE]
            cache = _append(target, cache, piece, PIECE, requests)[1]
        hidden, _ = _append(target, cache, prefix[-1:], window, requests)
        # every row is unembedded, as a step does: one row alone would be another shape
        found.append(np.asarray(_unembed(target.config, target.weights, hidden)[0]))
    return np.stack(found)


def _append(
    target: LoadedTarget, cache: Any, tokens: Sequence[int], width: int, requests: int
) -> tuple[Float[Array, "T D"], Any]:
    padded = np.zeros((requests, width), np.int32)
    padded[:, : len(tokens)] = tokens
    return _forward(target.config, target.weights, cache, padded, np.int32(len(tokens)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _forward(
    config: Any, weights: Any, cache: Any, tokens: Int[Array, "A W"], count: Int[Array, ""]
) -> tuple[Float[Array, "T D"], Any]:
    """Append the first ``count`` tokens to every request."""
    counts = jnp.full(tokens.shape[0], count, jnp.int32)
    packed = rectangle(tokens, cache.length, counts)
    hidden, _, cache = config.family.forward(config, weights, cache, packed, taps=())
    return hidden, config.family.commit(config, cache, cache.length + counts)


@functools.partial(jax.jit, static_argnums=0)
def _unembed(config: Any, weights: Any, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
    return config.family.unembed(config, weights, hidden)
