"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.paged_attention import live_rows, mosaic_gpu, reference
from pallas_kernels.paged_attention.packing import apart, together

Implementation = Literal["xla", "live", "mosaic"]


def paged_attention(
    query: Float[Array, "A W H E"] | Float[Array, "T H E"],
    keys: Float[Array, "B N P E"],
    values: Float[Array, "B N P E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None = None,
    table: Int[Array, "S C"] | None = None,
    *,
    rows: Int[Array, "A W"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "A W H E"] | Float[Array, "T H E"]:
    """Softmax attention of query rows over the rows ``0..position`` of their request's slot.

    Query head h reads key/value head ``h // (H / N)``; scores are scaled by ``E ** -0.5``.
    Scores, softmax and sums are fp32. Cache rows past the last position of a request are not
    read into any result, whatever they hold (NaN included).

    Args:
        query: W rows of A requests, positions already encoded; or T rows, packed as ``rows`` says.
        keys: cache rows in B pages of P rows, the rows of this call already written.
        values: as ``keys``.
        position: absolute position of each query row, below C*P (P without a table); -1 in
            padding rows, which get zeros.
        slots: cache slot of each request; a request with a slot outside ``0..S-1`` is padding
            and gets zeros. None when request a is slot a (then A = S).
        table: the page of rows ``0..P-1`` of each slot, of rows ``P..2P-1``, and so on; negative
            where there is none, which no position may reach. None when slot s is page s.
        rows: the row of ``query``, and of the result, that is query w of request a, no row twice.
            An absent query, whose position is -1, names a padding row to be filled with zeros, or T
            and more for none. None when query is ``[A, W]``.
        implementation: ``"xla"`` runs anywhere and can be differentiated if every cache row is
            finite; ``"live"`` loops over the rows that are live, without a gradient; ``"mosaic"``
            needs a Hopper GPU, bf16, E of 64 or 128, ``W * H / N <= 64`` and P a multiple of 64.
            None takes live on a CPU, mosaic where it can run, and xla elsewhere.

    Returns:
        As ``query`` in shape and dtype. Rows that ``rows`` does not name may hold anything.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"mosaic"`` was asked for and cannot run.
    """
    _check_shapes(query, keys, values, position, slots, table, rows)
    obstacles = {
        "live": lambda: live_rows.unsupported(keys, table),
        "mosaic": lambda: (
            missing_hopper() or mosaic_gpu.unsupported(query, keys, values, position, table)
        ),
    }
    automatic = "live" if jax.default_backend() == "cpu" else "mosaic"
    kernel = implementation if implementation in obstacles else automatic
    wanted = choose("paged_attention", kernel, implementation, automatic, obstacles[kernel])
    if wanted == "mosaic":
        return mosaic_gpu.paged_attention(query, keys, values, position, slots, table, rows)
    run = {"xla": reference.paged_attention, "live": live_rows.paged_attention}[wanted]
    if rows is None:
        return run(query, keys, values, position, slots, table)
    out = run(apart(query, rows), keys, values, position, slots, table)
    return together(out, rows, query.shape[0])


def _check_shapes(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    slots: jax.Array | None,
    table: jax.Array | None,
    rows: jax.Array | None,
) -> None:
    wanted = "[A, W, H, E]" if rows is None else "[T, H, E]"
    if query.ndim != wanted.count(",") + 1 or keys.ndim != 4:
        raise ValueError(
            f"query and keys have {query.ndim} and {keys.ndim} axes, wanted {wanted} and "
            "[B, N, P, E]"
        )
    if table is not None and table.ndim != 2:
        raise ValueError(f"table has shape {table.shape}, wanted [S, C]")
    requests, width = position.shape if rows is not None else query.shape[:2]
    heads, head_dim = query.shape[-2:]
    pages, kv_heads, _, key_dim = keys.shape
    slot_count = pages if table is None else table.shape[0]
    if values.shape != keys.shape:
        raise ValueError(f"values have shape {values.shape}, wanted that of keys, {keys.shape}")
    if key_dim != head_dim:
        raise ValueError(f"keys have head width {key_dim}, wanted that of query, {head_dim}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query has {heads} heads, wanted a multiple of the {kv_heads} of keys")
    if position.shape != (requests, width):
        raise ValueError(f"position has shape {position.shape}, wanted {(requests, width)}")
    if rows is not None and rows.shape != position.shape:
        raise ValueError(f"rows have shape {rows.shape}, wanted that of position, {position.shape}")
    if slots is None and requests != slot_count:
        raise ValueError(
            f"query has {requests} requests and the cache {slot_count} slots: wanted equal "
            "numbers, or slots"
        )
    if slots is not None and slots.shape != (requests,):
        raise ValueError(f"slots have shape {slots.shape}, wanted {(requests,)}")
