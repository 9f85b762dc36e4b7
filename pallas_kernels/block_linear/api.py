"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.block_linear import pallas_triton, reference
from pallas_kernels.choice import choose, empty
from pallas_kernels.hopper import missing_hopper

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "triton"
"""What None takes where both can run (docs/kernels/block_linear.md)."""


def obstacle(
    x: jax.Array | jax.ShapeDtypeStruct, matrices: jax.Array | jax.ShapeDtypeStruct, size: int
) -> str | None:
    """Why the kernel cannot run on such operands and blocks of ``size`` rows here, or None."""
    return missing_hopper() or pallas_triton.unsupported(x, matrices, size)


def block_linear(
    x: Float[Array, "R I"],
    row: Int[Array, "B S"],
    matrices: Float[Array, "X O I"],
    owner: Int[Array, "B"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B S O"]:
    """``matrices[owner[b]] @ x[row[b, s]]`` of every row of every block, summed in fp32.

    Args:
        x: rows, named by any number of blocks.
        row: of ``x``; one below 0 or past its end is a row of zeros.
        matrices: X of them.
        owner: matrix of each block. The result of a block whose owner is below 0 or past X - 1
            may be anything, and costs nothing.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, bf16, S a power
            of two of 16 to 128, I a multiple of 64 and O of 128. None takes `AUTOMATIC` where that
            can run and xla elsewhere. Neither is meant to be differentiated.

    Returns:
        In the dtype of ``x``.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if row.ndim != 2 or owner.shape != row.shape[:1]:
        raise ValueError(
            f"row and owner have shapes {row.shape} and {owner.shape}, wanted [B, S], [B]"
        )
    if x.ndim != 2 or matrices.ndim != 3 or x.shape[1] != matrices.shape[2]:
        raise ValueError(
            f"x and matrices have shapes {x.shape} and {matrices.shape}, wanted [R, I], [X, O, I]"
        )
    wanted = choose(
        "block_linear",
        "triton",
        implementation,
        AUTOMATIC,
        lambda: obstacle(x, matrices, row.shape[1]) or empty(row=row),
    )
    run = {"xla": reference.block_linear, "triton": pallas_triton.block_linear}[wanted]
    return run(x, row, matrices, owner)
