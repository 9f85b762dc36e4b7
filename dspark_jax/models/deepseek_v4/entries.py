"""Compressed entries: which a token sees, and where they lie in their pages.

Entry w of a layer of ratio r stands for tokens ``w r .. w r + r - 1`` and is written by the last
of them. A token at p sees entries ``w < (p + 1) // r``: those that closed at or before it. That
rule alone keeps rejected drafts out: an entry that one of them closed is invisible until its
position is run again, and then it is written again first.

An entry lies in the page of its last token. A page of P tokens has ``P / r`` entries, or where r is
larger room for one, which stays empty in all but the last page of a window.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.batch import Part
from dspark_jax.models.pages import locate


def visible(position: Int[Array, "*B"], ratio: int) -> Int[Array, "*B"]:
    """How many entries a token sees; 0 at a negative position."""
    return jnp.maximum(position + 1, 0) // ratio


def page_size(page_tokens: int, ratio: int) -> int:
    """Entries of a page."""
    return max(page_tokens // ratio, 1)


def closing(part: Part, ratio: int) -> tuple[Int[Array, "A N"], Int[Array, "A N"]]:
    """Entries that the requests close, and the position that closes each; -1 in place of others.

    N is the most that fits into their width.
    """
    count = (part.width + ratio - 1) // ratio
    entry = part.start[:, None] // ratio + jnp.arange(count, dtype=jnp.int32)
    last = entry * ratio + ratio - 1
    closes = last < part.end[:, None]
    return jnp.where(closes, entry, -1), jnp.where(closes, last, -1)


def write(
    pool: Float[Array, "M P E"],
    place: tuple[Int[Array, "N"], Int[Array, "N"]],
    values: Float[Array, "N E"],
) -> Float[Array, "M P E"]:
    """Write entries at their page and offset; a page that no pool has is written nowhere."""
    return jax.lax.optimization_barrier(pool.at[place].set(values.astype(pool.dtype), mode="drop"))


def place(
    table: Int[Array, "S C"],
    slot: Int[Array, "*B"],
    entry: Int[Array, "*B"],
    ratio: int,
    page_tokens: int,
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """Page and offset of each entry; a page that no pool has where a slot has none for it."""
    page, offset = locate(table, slot, entry * ratio + ratio - 1, page_tokens)
    return page, offset // ratio


def rows(
    table: Int[Array, "S C"],
    slot: Int[Array, "T"],
    entry: Int[Array, "T K"],
    ratio: int,
    page_tokens: int,
) -> Int[Array, "T K"]:
    """Row of each entry in a pool seen as ``[M * P, E]``; -1 where it has none."""
    slot = jnp.broadcast_to(slot[:, None], entry.shape)
    page, offset = place(table, slot, entry, ratio, page_tokens)
    known = page < jnp.iinfo(jnp.int32).max
    row = jnp.where(known, page, 0) * page_size(page_tokens, ratio) + offset
    return jnp.where(known, row, -1)
