"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.top_k import pallas_triton, reference

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where both can run (docs/kernels/top_k.md has the times)."""


def top_k(
    scores: Float[Array, "T K"],
    seen: Int[Array, "T"],
    count: int,
    *,
    implementation: Implementation | None = None,
) -> Int[Array, "T k"]:
    """Positions of the ``count`` highest of the first ``seen`` scores of each row, ascending.

    Of equal scores the later ones are chosen. NaN counts as +inf, and -inf as the least finite
    number, so that whatever the scores are, ``min(count, seen)`` positions below ``seen`` come out.

    Args:
        scores: what lies at or past ``seen`` counts for nothing.
        seen: taken as 0 below 0 and as K above K.
        count: entries to choose; K if that is less.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, fp32 and a count
            of at most 4096. None takes `AUTOMATIC` where that can run and xla elsewhere.

    Returns:
        Positions, then -1.

    Raises:
        ValueError: shapes disagree, ``count`` is below 1, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if scores.ndim != 2 or seen.shape != scores.shape[:1]:
        raise ValueError(
            f"scores and seen have shapes {scores.shape} and {seen.shape}, wanted [T, K] and [T]"
        )
    if count < 1:
        raise ValueError(f"count is {count}, wanted at least 1")
    wanted = choose(
        "top_k",
        "triton",
        implementation,
        AUTOMATIC,
        lambda: missing_hopper() or pallas_triton.unsupported(scores, count),
    )
    run = {"xla": reference.top_k, "triton": pallas_triton.top_k}[wanted]
    return run(scores, jax.numpy.asarray(seen), count)
