"""The sequential walk with bias, draw and confidence of a position in one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from dspark_jax.decode import noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.state import State
from pallas_kernels.markov_sample import Position, kernel_runs, markov_sample


class Walked(NamedTuple):
    """A walk by position; ``scores`` is one array ``[S, G, Vd]``, None without noise."""

    tokens: list[Array]
    scores: Float[Array, "S G Vd"] | None
    logprobs: list[Array]
    confidences: list[Array]


def fused_walk(
    weights: Any,
    state: State,
    keys: Array | None,
    hidden: Float[Array, "S C D"],
    base: Float[Array, "S C Vd"],
    *,
    config: StepConfig,
) -> Walked | None:
    """Walk all C positions of ``base`` from each anchor; None where the kernel is not to run."""
    drafter, family = config.drafter, config.drafter.family
    ranks = getattr(family, "walk_ranks", None)
    if ranks is None:
        return None
    walk = family.start_walk(drafter, weights.drafter, state.slots)
    previous, scores, last = state.anchor, None, base.shape[1] - 1
    tokens, logprobs, confidences = [], [], []
    for j in range(last + 1):
        ranked = ranks(drafter, weights.drafter, walk, hidden[:, j], previous)
        if ranked is None:
            return None
        position = Position(
            base=base,
            ranked=ranked.vector,
            matrix=ranked.matrix,
            temperature=state.requests.temperature,
            keys=None if keys is None else noise.fold(keys, noise.DRAFT, j + 1),
            confidence=ranked.confidence,
        )
        if j == 0 and not kernel_runs(position):
            return None
        drawn = markov_sample(position, scores, j, config.depth, last=j == last)
        walk, scores = ranked.state, drawn.scores
        previous = family.to_target_ids(weights.drafter, drawn.column)
        tokens.append(previous)
        if drawn.logprob is not None:
            logprobs.append(drawn.logprob)
        confidences.append(drawn.confidence)
    return Walked(tokens, scores, logprobs, confidences)
