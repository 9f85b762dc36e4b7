"""Compressed entries: which a token sees, and where they lie in their pages.

Entry w of a layer of ratio r stands for tokens ``w r .. w r + r - 1`` and is written by the last
of them. A token at p sees entries ``w < (p + 1) // r``: those that closed at or before it. That
rule alone keeps rejected drafts out: an entry that one of them closed is invisible until its
position is run again, and then it is written again first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.batch import Batch
from dspark_jax.models.pages import locate


def visible(position: Int[Array, "*B"], ratio: int) -> Int[Array, "*B"]:
    """How many entries a token sees; 0 at a negative position."""
    return jnp.maximum(position + 1, 0) // ratio


def closing(batch: Batch, ratio: int) -> tuple[Int[Array, "A N"], Int[Array, "A N"]]:
    """Entries that the batch may close, and the position that closes each; -1 where it does not.

    N is the most that fits into the batch's width.
    """
    count = (batch.width + ratio - 1) // ratio
    entry = batch.start[:, None] // ratio + jnp.arange(count, dtype=jnp.int32)
    last = entry * ratio + ratio - 1
    closes = last < batch.end[:, None]
    return jnp.where(closes, entry, -1), jnp.where(closes, last, -1)


def write(
    pool: Float[Array, "M P E"],
    place: tuple[Int[Array, "A N"], Int[Array, "A N"]],
    values: Float[Array, "A N E"],
) -> Float[Array, "M P E"]:
    """Write entries at their page and offset; a page that no pool has is written nowhere."""
    return jax.lax.optimization_barrier(pool.at[place].set(values.astype(pool.dtype), mode="drop"))


def rows(
    table: Int[Array, "S C"], slot: Int[Array, "T"], entry: Int[Array, "T K"], page_size: int
) -> Int[Array, "T K"]:
    """Row of each entry in a pool seen as ``[M * page_size, E]``; -1 where it has none."""
    slot = jnp.broadcast_to(slot[:, None], entry.shape)
    page, offset = locate(table, slot, entry, page_size)
    known = page < jnp.iinfo(jnp.int32).max
    return jnp.where(known, jnp.where(known, page, 0) * page_size + offset, -1)
