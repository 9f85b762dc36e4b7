"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.indexer_logits import pallas_triton, reference
from pallas_kernels.indexer_logits.operands import Batch, check

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where both can run (docs/kernels/indexer_logits.md has the times)."""


def indexer_logits(
    query: Float[Array, "T J I"],
    weight: Float[Array, "T J"],
    keys: Float[Array, "M P I"],
    batch: Batch,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T K"]:
    """fp32 ``sum_j weight_j relu(query_j . key)`` of each token with all keys of its request.

    K is what a request's pages hold, C * P. Scores of keys that a token does not see, and of
    packed rows of no request, may be anything.

    Args:
        query: index queries with their position.
        weight: of each head, all constant factors included.
        keys: pages of index keys.
        batch: whose tokens and whose keys.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, bf16, J of 16,
            32, 64 or 128, I of 32, 64 or 128, and no empty operand. None takes `AUTOMATIC` where
            that can run and xla elsewhere.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    check(query, weight, keys, batch)
    wanted = choose(
        "indexer_logits",
        "triton",
        implementation,
        AUTOMATIC,
        lambda: missing_hopper() or pallas_triton.unsupported(query, keys, batch),
    )
    run = {"xla": reference.indexer_logits, "triton": pallas_triton.indexer_logits}[wanted]
    return run(query, weight, keys, batch)
