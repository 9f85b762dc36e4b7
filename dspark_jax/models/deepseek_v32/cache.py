"""What DeepSeek-V3.2 keeps of a token in every layer: one latent row and one index key."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.pages import PagePool


@flax.struct.dataclass
class LayerCache:
    """Rows of one layer, in pages: latent and rotated key side by side, and index keys."""

    latent: Float[Array, "N P C+R"]
    index: Float[Array, "N P I"]


class DeepseekV32Cache(flax.struct.PyTreeNode):
    """Every layer's rows, where each slot's lie, and how many are committed.

    Attributes:
        layers: one a layer, never stacked.
        length: committed rows; those at or past it are scratch and never attended except by the
            batch that wrote them.
        table: the pages of each slot in every pool (``models.pages``), or None where slot s owns
            page s.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, "S"]
    table: Int[Array, "S C"] | None = None


def init_cache(
    config: DeepseekV32Config, slots: int, capacity: int, dtype: Any
) -> DeepseekV32Cache:
    """An empty cache for ``slots`` requests of ``capacity`` rows each."""
    return _empty(config, slots, slots, capacity, dtype)


def init_pages(
    config: DeepseekV32Config, slots: int, pool: PagePool, dtype: Any
) -> DeepseekV32Cache:
    """An empty paged cache: no slot has a page."""
    cache = _empty(config, slots, pool.count, pool.size, dtype)
    return cache.replace(table=pool.empty_table(slots))


def write_rows(
    pool: Float[Array, "N P B"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    rows: Float[Array, "T B"],
) -> Float[Array, "N P B"]:
    """The pool with ``rows`` in it; a row whose place is outside the pool is dropped."""
    written = pool.at[page, offset].set(
        rows.astype(pool.dtype), mode="drop", wrap_negative_indices=False
    )
    # XLA would repeat the write of a single row inside each of its readers, and copy the cache
    # so that it can
    return jax.lax.optimization_barrier(written)


def _empty(
    config: DeepseekV32Config, slots: int, pages: int, rows: int, dtype: Any
) -> DeepseekV32Cache:
    return DeepseekV32Cache(
        layers=tuple(
            LayerCache(
                latent=jnp.zeros((pages, rows, config.row_width), dtype),
                index=jnp.zeros((pages, rows, config.index_head_dim), dtype),
            )
            for _ in range(config.num_hidden_layers)
        ),
        length=jnp.zeros(slots, jnp.int32),
    )
