"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import mosaic_gpu, reference

Implementation = Literal["xla", "mosaic"]

_log = logging.getLogger(__name__)


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
    if implementation is None:
        obstacle = _mosaic_obstacle(query, keys, values)
        implementation = "mosaic" if obstacle is None else "xla"
        _announce(implementation, obstacle)
    elif implementation == "mosaic":
        obstacle = _mosaic_obstacle(query, keys, values)
        if obstacle is not None:
            raise NotImplementedError(f'paged_attention cannot run as "mosaic": {obstacle}')
    elif implementation != "xla":
        raise ValueError(f'implementation is {implementation!r}, wanted "xla", "mosaic" or None')
    run = {"xla": reference.paged_attention, "mosaic": mosaic_gpu.paged_attention}[implementation]
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


def _mosaic_obstacle(query: jax.Array, keys: jax.Array, values: jax.Array) -> str | None:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return f"the device is {device.device_kind}, wanted a Hopper GPU (compute capability 9.0)"
    return mosaic_gpu.unsupported(query, keys, values)


@functools.cache
def _announce(implementation: str, obstacle: str | None) -> None:
    reason = "" if obstacle is None else f", because {obstacle}"
    _log.info("paged_attention runs as %s%s", implementation, reason)
