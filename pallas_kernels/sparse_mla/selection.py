"""Which cache rows each query token attends to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "indices", "lengths"],
    meta_fields=["page_size"],
)
@dataclasses.dataclass(frozen=True)
class Selection:
    """Per token, a list of rows of one paged pool.

    Row ``offset`` of page ``page`` has the id ``page * page_size + offset``. Causality, windows
    and top-k are all in the lists: nothing else is masked.

    Attributes:
        pool: N pages of R rows.
        indices: ids; one below 0 or past the last page names no row, and an id that stands
            twice counts twice.
        lengths: entries of each list that count; whatever stands after them is ignored. Taken
            as 0 below 0 and as K above K. None when all K count.
        page_size: rows of a page that have ids, at most R; None when all R have. Less where
            pages are padded, or shared with something else.
    """

    pool: Float[Array, "N R W"]
    indices: Int[Array, "T K"]
    lengths: Int[Array, "T"] | None = None
    page_size: int | None = None

    def rows(self) -> Int[Array, "T K"]:
        """The listed rows of the pool seen as ``[N * R, W]``, -1 where an entry names none."""
        pages, stride = self.pool.shape[:2]
        size = stride if self.page_size is None else self.page_size
        ids = self.indices.astype(jnp.int32)
        named = (ids >= 0) & (ids < pages * size)
        if self.lengths is not None:
            named &= jnp.arange(ids.shape[1], dtype=jnp.int32) < self.lengths[:, None]
        if size != stride:
            ids = ids // size * stride + ids % size
        return jnp.where(named, ids, -1)
