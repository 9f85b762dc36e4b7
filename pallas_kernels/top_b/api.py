"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.top_b import pallas_triton, reference

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where slots are too many to be counted and both can run; the times are in
docs/kernels/top_b.md."""


def top_b(
    survival: Float[Array, "S G"],
    valid: Bool[Array, "S G"],
    budget: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Int[Array, "S"]:
    """How many of each request's drafts are among the ``budget`` slots of highest survival.

    Ties go to the earlier position, then the lower request.

    Args:
        survival: probabilities, 0..1 and no NaN, non-increasing along each row, so that the
            chosen slots of a request are a prefix of them.
        valid: which slots may be chosen; a prefix of each row.
        budget: slots to choose; all valid ones if there are fewer, none if it is negative.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, fp32 and at
            most 32768 slots. None takes `AUTOMATIC` where that can run and xla elsewhere.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if survival.ndim != 2 or valid.shape != survival.shape or budget.shape != ():
        raise ValueError(
            f"survival, valid and budget have shapes {survival.shape}, {valid.shape} and "
            f"{budget.shape}, wanted [S, G] twice and a scalar"
        )
    wanted = choose(
        "top_b",
        "triton",
        implementation,
        "xla" if reference.counts(survival.size) else AUTOMATIC,
        lambda: missing_hopper() or pallas_triton.unsupported(survival),
    )
    run = {"xla": reference.top_b, "triton": pallas_triton.top_b}[wanted]
    return run(survival, valid, jax.numpy.asarray(budget))
