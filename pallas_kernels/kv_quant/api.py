"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.kv_quant import pallas_triton, reference
from pallas_kernels.kv_quant.layouts import Layout

Implementation = Literal["xla", "triton"]


def write(
    pool: UInt8[Array, "..."],
    slots: Int[Array, "T"],
    rows: Float[Array, "T W"],
    layout: Layout,
    page_size: int,
    *,
    implementation: Implementation | None = None,
) -> UInt8[Array, "..."]:
    """``pool`` with each row quantised into slot ``page * page_size + offset``.

    Args:
        pool: N pages, ``[N, bytes]`` or ``[N, R, bytes]``, of any stride that holds
            ``page_size`` rows; what is left of a page is not touched. Written in place where
            the caller's buffer allows.
        slots: a slot below 0 or past the pool writes nothing. No two rows may name the same.
        rows: finite numbers.
        layout: of a row.
        page_size: rows of a page.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, bf16 rows and
            one of the two published layouts. None takes triton where it can run and xla
            elsewhere.

    Raises:
        ValueError: shapes disagree, a page is too short, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    if pool.ndim < 2 or slots.ndim != 1 or rows.shape != (slots.shape[0], layout.width):
        raise ValueError(
            f"pool, slots and rows have shapes {pool.shape}, {slots.shape} and {rows.shape}, "
            f"wanted [N, bytes] or [N, R, bytes], [T] and [T, {layout.width}]"
        )
    stride, used = pool.size // max(pool.shape[0], 1), page_size * layout.row_bytes
    if pool.shape[0] and stride < used:
        raise ValueError(f"a page has {stride} bytes, wanted {used} for {page_size} rows")
    wanted = choose(
        "kv_quant.write",
        "triton",
        implementation,
        "triton",
        lambda: missing_hopper() or pallas_triton.unsupported(pool, slots, rows, layout),
    )
    run = {"xla": reference.write, "triton": pallas_triton.write}[wanted]
    return run(pool, slots, rows, layout, page_size)
