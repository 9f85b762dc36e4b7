"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.paged_attention import mosaic_gpu, reference

Implementation = Literal["xla", "mosaic"]


def paged_attention(
    query: Float[Array, "A W H E"],
    keys: Float[Array, "S N K E"],
    values: Float[Array, "S N K E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "A W H E"]:
    """Softmax attention of query rows over the rows ``0..position`` of their request's slot.

    Query head h reads key/value head ``h // (H / N)``; scores are scaled by ``E ** -0.5``.
    Scores, softmax and sums are fp32. Cache rows past the last position of a request are not
    read into any result, whatever they hold (NaN included).

    Args:
        query: W rows of A requests, positions already encoded.
        keys: cache rows of S slots, the rows of this call already written.
        values: as ``keys``.
        position: absolute position of each query row, below K; -1 in padding rows, which get
            zeros.
        slots: cache slot of each request; a request with a slot outside ``0..S-1`` is padding
            and gets zeros. None when request a is slot a (then A = S).
        implementation: ``"xla"`` runs anywhere and can be differentiated if every cache row is
            finite; ``"mosaic"`` needs a Hopper GPU, bf16, E of 64 or 128, ``W * H / N <= 64``
            and K a multiple of 64. None takes mosaic where it can run and xla elsewhere.

    Returns:
        ``[A, W, H, E]`` in the dtype of ``query``.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"mosaic"`` was asked for and cannot run.
    """
    _check_shapes(query, keys, values, position, slots)
    wanted = choose(
        "paged_attention",
        "mosaic",
        implementation,
        "mosaic",
        lambda: missing_hopper() or mosaic_gpu.unsupported(query, keys, values),
    )
    run = {"xla": reference.paged_attention, "mosaic": mosaic_gpu.paged_attention}[wanted]
    return run(query, keys, values, position, slots)


def _check_shapes(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    slots: jax.Array | None,
) -> None:
    if query.ndim != 4 or keys.ndim != 4:
        raise ValueError(
            f"query and keys have {query.ndim} and {keys.ndim} axes, wanted [A, W, H, E] and "
            "[S, N, K, E]"
        )
    requests, width, heads, head_dim = query.shape
    slot_count, kv_heads, _, key_dim = keys.shape
    if values.shape != keys.shape:
        raise ValueError(f"values have shape {values.shape}, wanted that of keys, {keys.shape}")
    if key_dim != head_dim:
        raise ValueError(f"keys have head width {key_dim}, wanted that of query, {head_dim}")
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads, wanted a multiple of the {kv_heads} of keys")
    if position.shape != (requests, width):
        raise ValueError(f"position has shape {position.shape}, wanted {(requests, width)}")
    if slots is None and requests != slot_count:
        raise ValueError(
            f"query has {requests} requests and the cache {slot_count} slots: wanted equal "
            "numbers, or slots"
        )
    if slots is not None and slots.shape != (requests,):
        raise ValueError(f"slots have shape {slots.shape}, wanted {(requests,)}")
