"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.ragged_pack import pallas_triton, reference

Implementation = Literal["xla", "triton"]


def ragged_pack(
    tokens: Int[Array, "S W"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    size: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T"], Int[Array, "T"], Int[Array, "T"], Int[Array, "S W"]]:
    """The first ``count`` tokens of each request, one request after another, in ``size`` rows.

    Args:
        tokens: up to W consecutive tokens of each request.
        start: position of the first of them in the request's text.
        count: how many of them are packed, 0..W; their sum must not exceed ``size``.
        size: T, rows of the packed batch.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU and int32.
            None takes triton where it can run and xla elsewhere.

    Returns:
        tokens ``[T]``, 0 in rows that no request owns; requests ``[T]``, S there; positions
        ``[T]``, 0 there; and the packed row of every token ``[S, W]``, T where it is not packed.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if tokens.ndim != 2 or not start.shape == count.shape == tokens.shape[:1]:
        raise ValueError(
            f"tokens, start and count have shapes {tokens.shape}, {start.shape} and "
            f"{count.shape}, wanted [S, W], [S] and [S]"
        )
    wanted = choose(
        "ragged_pack",
        "triton",
        implementation,
        "triton",
        lambda: missing_hopper() or pallas_triton.unsupported(tokens, start, count),
    )
    run = {"xla": reference.ragged_pack, "triton": pallas_triton.ragged_pack}[wanted]
    return run(tokens, start, count, size)
