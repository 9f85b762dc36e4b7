"""Which cache rows each query token attends to."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.kv_quant import V3_2, V4, Layout, dequantise, read


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
        pool: N pages of R rows; or bytes in a layout of `pallas_kernels.kv_quant`, ``[N, R, 656]``
            in that of DeepSeek-V3.2 and ``[N, bytes]`` in that of V4.
        indices: ids; one below 0 or past the last page names no row, and an id that stands
            twice counts twice.
        lengths: entries of each list that count; whatever stands after them is ignored. Taken
            as 0 below 0 and as K above K. None when all K count.
        page_size: rows of a page that have ids, at most R; None when all R have. Less where
            pages are padded, or shared with something else. V4's layout needs it: scales stand
            after that many rows, and what is left of a page is padding.
    """

    pool: Float[Array, "N R W"] | UInt8[Array, "N *B"]
    indices: Int[Array, "T K"]
    lengths: Int[Array, "T"] | None = None
    page_size: int | None = None

    @property
    def layout(self) -> Layout | None:
        """Of the pool's bytes; None if it holds numbers."""
        if self.pool.dtype != jnp.uint8:
            return None
        return V4 if self.pool.ndim == 2 else V3_2

    @property
    def stride(self) -> int:
        """Rows from a page to the next, as `rows` counts them."""
        return self.pool.shape[1] if self.pool.ndim == 3 else self.page_size or 0

    def rows(self) -> Int[Array, "T K"]:
        """The listed rows of the pool seen as ``[N * stride]`` rows, -1 for entries without one."""
        size = self.stride if self.page_size is None else self.page_size
        ids = self.indices.astype(jnp.int32)
        named = (ids >= 0) & (ids < self.pool.shape[0] * size)
        if self.lengths is not None:
            named &= jnp.arange(ids.shape[1], dtype=jnp.int32) < self.lengths[:, None]
        if size != self.stride:
            ids = ids // size * self.stride + ids % size
        return jnp.where(named, ids, -1)

    def keys(self, rows: Int[Array, "K"], dtype: Any) -> Float[Array, "K W"]:
        """Numbers of rows that `rows` gave; zeros for -1."""
        inside = jnp.maximum(rows, 0)
        if self.layout is V4:
            keys = read(self.pool, inside, V4, self.stride, dtype)
        else:
            keys = self.pool.reshape(-1, self.pool.shape[2])
            keys = keys.at[inside].get(mode="promise_in_bounds")
            keys = keys.astype(dtype) if self.layout is None else dequantise(keys, V3_2, dtype)
        # A weight of zero does not silence a NaN, so what stands for no row is zeroed itself.
        return jnp.where(rows[:, None] >= 0, keys, 0)
