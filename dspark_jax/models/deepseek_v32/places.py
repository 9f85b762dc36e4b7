"""Where the rows of a batch are written, and where those it may read lie."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v32.cache import DeepseekV32Cache
from dspark_jax.models.pages import place
from dspark_jax.models.ragged import Mixed, Packed


@flax.struct.dataclass
class Places:
    """A packed batch with what every layer asks of it.

    Attributes:
        packed: the rows.
        slot: cache slot of each row.
        position: position of each row, -1 in padding.
        page, offset: where each row is written; outside every pool for rows that are not.
        table: the cache's.
    """

    packed: Packed | Mixed
    slot: Int[Array, "T"]
    position: Int[Array, "T"]
    page: Int[Array, "T"]
    offset: Int[Array, "T"]
    table: Int[Array, "S C"] | None

    def ids(self, pool: Float[Array, "N P B"], chosen: Int[Array, "T K"]) -> Int[Array, "T K"]:
        """Rows of the whole pool that the request rows ``chosen`` are, -1 where there is none."""
        pages, size = pool.shape[:2]
        page, offset = place(self.table, self.slot[:, None], chosen, size)
        there = (chosen >= 0) & (page >= 0) & (page < pages)
        return jnp.where(there, jnp.where(there, page, 0) * size + offset, -1)

    def pages_of(self, part: Packed) -> Int[Array, "A C"]:
        """Pages of each request of a part, in order; -1 or past the pool where there is none."""
        slots = part.slots
        if slots is None:
            slots = jnp.arange(part.row.shape[0], dtype=jnp.int32)
        if self.table is None:
            return slots[:, None]
        return jnp.take(self.table, slots, axis=0, mode="fill", fill_value=-1)


def find_places(cache: DeepseekV32Cache, packed: Packed | Mixed) -> Places:
    """The places of ``packed`` in a cache."""
    slot_count = cache.length.shape[0]
    slot = packed.slot_of_row(slot_count)
    real = (slot >= 0) & (slot < slot_count)
    position = jnp.where(real, packed.position, -1)
    page, offset = place(cache.table, slot, position, cache.layers[0].latent.shape[1])
    return Places(packed, slot, position, page, offset, cache.table)
