"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.swa_index import pallas_triton, reference

Implementation = Literal["xla", "triton"]


def swa_index(
    position: Int[Array, "T"],
    request: Int[Array, "T"],
    ring: Int[Array, "A"],
    origin: Int[Array, "A"],
    window: int,
    length: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "T w"], Int[Array, "T"]]:
    """Rows of a pool of rings ``[N, length, X]``, seen flat, in the window of each token.

    A ring is a page of ``length`` rows; position p of a request stands in its row
    ``(p - origin) mod length``. A token at p sees positions ``max(0, p - window + 1) .. p``.

    Args:
        position: of each token; -1 in padding.
        request: of each token, 0..A; A in padding.
        ring: of each request; -1 where it has none.
        origin: a position that stands in the first row of the request's ring.
        window: positions that a token sees, its own included.
        length: rows of a ring.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU and int32.
            None takes triton where it can run and xla elsewhere.

    Returns:
        Rows ``[T, window]``, the oldest first, then -1, and -1 alone where the request has no
        ring; and how many positions each token sees ``[T]``.

    Raises:
        ValueError: shapes disagree, ``window`` or ``length`` is not positive, or
            ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if position.ndim != 1 or request.shape != position.shape:
        raise ValueError(
            f"position and request have shapes {position.shape} and {request.shape}, wanted [T]"
        )
    if ring.ndim != 1 or origin.shape != ring.shape:
        raise ValueError(f"ring and origin have shapes {ring.shape} and {origin.shape}, wanted [A]")
    if window < 1 or length < 1:
        raise ValueError(f"window is {window} and length {length}, wanted at least 1")
    wanted = choose(
        "swa_index",
        "triton",
        implementation,
        "triton",
        lambda: missing_hopper() or pallas_triton.unsupported(position, request, ring, origin),
    )
    run = {"xla": reference.swa_index, "triton": pallas_triton.swa_index}[wanted]
    return run(position, request, ring, origin, window, length)
