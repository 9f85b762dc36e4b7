"""Where a request's rows lie: pages of one pool, found through a table inside the cache.

A pool is one array of pages a layer, ``[N, ..., P, ...]`` with ``P`` rows a page. The table names,
for every slot, the page of rows ``0..P-1``, of rows ``P..2P-1`` and so on. A contiguous cache is
the special case of one page a slot, its own; it has no table (None), so that nothing is looked up.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class PagePool:
    """Size of a pool: ``count`` pages of ``size`` rows, at most ``columns`` of them a request."""

    count: int
    size: int
    columns: int

    def empty_table(self, slots: int) -> Int[Array, "S C"]:
        """A table in which no slot has a page."""
        return jnp.full((slots, self.columns), -1, jnp.int32)


def contiguous(slots: int, capacity: int, page_size: int) -> Int[Array, "S C"]:
    """The table in which slot ``s`` owns its own run of pages, ``ceil(capacity / page_size)``."""
    columns = -(-capacity // page_size)
    return jnp.arange(slots * columns, dtype=jnp.int32).reshape(slots, columns)


def locate(
    table: Int[Array, "S C"], slot: Int[Array, "*B"], row: Int[Array, "*B"], page_size: int
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """Page and offset of each ``row`` of each ``slot``.

    The page is one that no pool has (the largest int32) where the slot is outside the table, the
    row is negative or past the table's end, or the table holds a negative page there: scatter
    with ``mode="drop"``, gather with ``mode="fill"``.
    """
    column = row // page_size
    known = (slot >= 0) & (slot < table.shape[0]) & (row >= 0) & (column < table.shape[1])
    page = table[jnp.where(known, slot, 0), jnp.where(known, column, 0)]
    absent = jnp.iinfo(jnp.int32).max
    return jnp.where(known & (page >= 0), page, absent), row % page_size


def place(
    table: Int[Array, "S C"] | None, slot: Int[Array, "*B"], row: Int[Array, "*B"], page_size: int
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """`locate`, or slot and row themselves where every slot is its own page."""
    return (slot, row) if table is None else locate(table, slot, row, page_size)
