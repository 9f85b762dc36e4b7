"""Writing key or value rows into a request cache, in place when the cache is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.ragged import Packed

# Up to this many requests are written one block each; more go through one scatter, which XLA
# runs as a loop over rows on CPUs.
BLOCK_WRITES = 8


def write_rows(
    cache: Float[Array, "S N K E"],
    rows: Float[Array, "T N E"],
    packed: Packed,
    position: Int[Array, "A W"],
) -> Float[Array, "S N K E"]:
    """Put every real row of the batch at its slot and position; nothing else changes.

    ``position`` is ``unpack_position(packed, ...)``. Padding rows and rows past the capacity
    write nothing.
    """
    slot_count, _, capacity, _ = cache.shape
    requests, width = position.shape
    rows = rows.astype(cache.dtype)
    if requests <= BLOCK_WRITES and width <= capacity:
        slots = jnp.arange(requests) if packed.slots is None else packed.slots
        blocks = packed.unpack(rows).transpose(0, 2, 1, 3)
        for request in range(requests):
            cache = _write_block(cache, blocks[request], position[request], slots[request])
        return cache
    slot = packed.slot_of_row(slot_count)
    return cache.at[slot, :, packed.position].set(rows, mode="drop", wrap_negative_indices=False)


def unpack_position(packed: Packed, slot_count: int) -> Int[Array, "A W"]:
    """``[A, W]`` position of every query row, -1 where there is none."""
    slot = packed.slot_of_row(slot_count)
    real = (slot >= 0) & (slot < slot_count)
    return packed.unpack(jnp.where(real, packed.position, -1), fill=-1)


def _write_block(
    cache: Float[Array, "S N K E"],
    block: Float[Array, "N W E"],
    position: Int[Array, "W"],
    slot: Int[Array, ""],
) -> Float[Array, "S N K E"]:
    """Write one request's rows over a window of its slot, keeping what is not replaced.

    ``dynamic_update_slice`` moves a window that would not fit, so the window is placed first
    and each of its rows then asks which query row, if any, belongs there.
    """
    groups, width, head_dim = block.shape
    start = jnp.clip(position[0], 0, cache.shape[2] - width)
    at = (slot, 0, start, 0)
    kept = jax.lax.dynamic_slice(cache, at, (1, groups, width, head_dim))
    source = start + jnp.arange(width, dtype=jnp.int32) - position[0]
    inside = (source >= 0) & (source < width)
    source = jnp.clip(source, 0, width - 1)
    real = inside & (position[0] >= 0) & (position[source] >= 0)
    window = jnp.where(real[None, :, None], block[:, source], kept[0])
    return jax.lax.dynamic_update_slice(cache, window[None], at)
