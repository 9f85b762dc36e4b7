"""The public operation: checks operands, picks an implementation, says once what was picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.best_linear import mosaic_gpu, reference
from pallas_kernels.best_linear.mosaic_gpu import LowRank, Operand
from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper

Implementation = Literal["xla", "mosaic"]

MANY_ROWS = 32
"""From as many rows on None takes the kernel where it can run (docs/kernels/best_linear.md)."""


def best_linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "V I"],
    low_rank: LowRank | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T"], Float[Array, "T"]]:
    """The highest of ``x @ weight.T + y @ weight2.T`` per row, and which one it is.

    Args:
        x: input rows.
        weight: the matrix, a row an output.
        low_rank: ``(y, weight2)``, rows and matrix of a second product that is added: the bias of
            a Markov head. None adds nothing.
        implementation: ``"xla"`` runs anywhere and writes all logits; ``"mosaic"`` needs a Hopper
            GPU, bf16, I and R multiples of 64 and V one of 8, at least 256, and writes none. None
            takes it from `MANY_ROWS` rows on where it can run, and xla elsewhere.

    Returns:
        Per row the output, the lowest among equals, and its value; sums are fp32. Logits must not
        be NaN: of a row that has one neither result means anything, but the output exists.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"mosaic"`` was asked for and cannot run.
    """
    _check("x", x, "weight", weight)
    if low_rank is not None:
        _check("y", low_rank[0], "weight2", low_rank[1])
        found, wanted = (low_rank[0].shape[0], low_rank[1].shape[0]), (x.shape[0], weight.shape[0])
        if found != wanted:
            raise ValueError(f"y and weight2 have {found} rows, wanted {wanted}")
    kernel = _runs_mosaic(implementation, x, weight, low_rank)
    return (mosaic_gpu if kernel else reference).best_linear(x, weight, low_rank)


def avoids_logits(
    x: Operand, weight: Operand, low_rank: tuple[Operand, Operand] | None = None
) -> bool:
    """Whether `best_linear` of operands like these writes no logits, left to its own choice."""
    return _runs_mosaic(None, x, weight, low_rank)


def _runs_mosaic(
    implementation: Implementation | None,
    x: Operand,
    weight: Operand,
    low_rank: tuple[Operand, Operand] | None,
) -> bool:
    chosen = choose(
        "best_linear",
        "mosaic",
        implementation,
        "mosaic" if x.shape[0] >= MANY_ROWS else "xla",
        lambda: missing_hopper() or mosaic_gpu.unsupported(x, weight, low_rank),
    )
    return chosen == "mosaic"


def _check(left_name: str, left: jax.Array, name: str, right: jax.Array) -> None:
    if left.ndim != 2:
        raise ValueError(f"{left_name} has shape {left.shape}, wanted two axes")
    if right.ndim != 2 or right.shape[1] != left.shape[1]:
        raise ValueError(
            f"{name} has shape {right.shape}, wanted two axes and {left.shape[1]} columns"
        )
