"""Rings: the most recent rows of every slot, found by position modulo the length of the ring.

A batch writes its rows before anything reads them, so what a rejected row left behind at some
position is overwritten before that position is read again. It has then destroyed nothing older
that is still wanted: a ring of ``history + SCRATCH`` rows keeps the ``history`` rows before any
batch of up to SCRATCH rows a request, whichever prefix of it is accepted.

A wider batch (prefill) does not fit beside its history. It reads from a ring of its own, wide
enough for both, and every row of it must be committed.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.batch import Batch
from dspark_jax.models.pages import locate

SCRATCH = 16
"""Most rows a request may have in a batch that may be rejected."""


def init(slots: int, history: int, width: int, dtype: Any) -> Float[Array, "N R X"]:
    """A pool of ``slots`` rings that keep ``history`` rows before the batch at hand."""
    return jnp.zeros((slots, history + SCRATCH, width), dtype)


@flax.struct.dataclass
class Places:
    """Where a batch writes and reads in every pool of rings of one length.

    Attributes:
        write: ring and offset of each row, ``[T]`` each; a ring that no pool has where a row is
            not to be written.
        ring: ``[A]`` the ring each request reads from; -1 where it has none.
        origin: ``[A]`` a position that stands in the first row of that ring.
        old: rows of the pool, seen as ``[N * R, X]``, that a wide batch copies into a ring of its
            own; past the end where there is none. None where it reads from the pool.
        length: rows of a ring that is read from.
    """

    write: tuple[Int[Array, "T"], Int[Array, "T"]]
    ring: Int[Array, "A"]
    origin: Int[Array, "A"]
    old: Int[Array, "A h"] | None
    length: int = flax.struct.field(pytree_node=False)

    def rows(self, request: Int[Array, "*B"], position: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Row of what ``extend`` returns, seen flat; -1 for a negative position or no ring."""
        ring = jnp.take(self.ring, request, mode="fill", fill_value=-1)
        origin = jnp.take(self.origin, request, mode="fill", fill_value=0)
        row = ring * self.length + (position - origin) % self.length
        return jnp.where((position >= 0) & (ring >= 0), row, -1)


def places(table: Int[Array, "S 1"], batch: Batch, rings: int, history: int) -> Places:
    """Places in pools of ``rings`` rings that keep ``history`` rows (see ``init``)."""
    length = history + SCRATCH
    # where a request laps its ring, only the last row of each place is written
    last = batch.position >= batch.of_request(batch.end, 0) - length
    slot = jnp.where(last, batch.slot, -1)
    write = locate(table, slot, jnp.maximum(batch.position, 0) % length, length)
    own, _ = locate(table, batch.slots, jnp.zeros_like(batch.slots), length)
    own = jnp.where(own < rings, own, -1)
    narrow = Places(write, own, jnp.zeros_like(own), None, length)
    if batch.width <= SCRATCH:
        return narrow
    request = jnp.arange(own.shape[0], dtype=jnp.int32)
    origin = batch.start - history
    position = origin[:, None] + jnp.arange(history, dtype=jnp.int32)
    old = narrow.rows(request[:, None], position)
    old = jnp.where(old >= 0, old, rings * length)
    return Places(write, jnp.where(own >= 0, request, -1), origin, old, history + batch.width)


def extend(
    places: Places, pool: Float[Array, "N R X"], batch: Batch, values: Float[Array, "T X"]
) -> tuple[Float[Array, "N R X"], Float[Array, "M Q X"]]:
    """Write one row a token; the pool written, and the rings to read at ``places.rows``."""
    values = values.astype(pool.dtype)
    # readers must not repeat the write
    written = jax.lax.optimization_barrier(pool.at[places.write].set(values, mode="drop"))
    if places.old is None:
        return written, written
    flat = pool.reshape(-1, pool.shape[2])
    old = jnp.take(flat, places.old, axis=0, mode="fill", fill_value=0)
    return written, jnp.concatenate([old, batch.packed.unpack(values)], axis=1)
