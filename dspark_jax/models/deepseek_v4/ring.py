"""Rings: the most recent rows of every slot, found by position modulo the length of the ring.

A batch writes its rows before anything reads them, so what a rejected row left behind at some
position is overwritten before that position is read again. It has then destroyed nothing older
that is still wanted: a ring of ``history + SCRATCH`` rows keeps the ``history`` rows before any
batch of up to SCRATCH rows a request, whichever prefix of it is accepted.

A wider batch (prefill) does not fit beside its history. It reads from a ring of its own, wide
enough for both, and every row of it must be committed. So do several pieces of one text: the
history of a piece is in the slot's ring and in the pieces before it.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.batch import Batch, Part
from dspark_jax.models.pages import locate

SCRATCH = 16
"""Most rows a slot may have in a batch that may be rejected."""


def init(slots: int, history: int, width: int, dtype: Any) -> Float[Array, "N R X"]:
    """A pool of ``slots`` rings that keep ``history`` rows before the batch at hand."""
    return jnp.zeros((slots, history + SCRATCH, width), dtype)


@flax.struct.dataclass
class History:
    """Rows before each request of a part, which are copied into a ring of its own.

    Attributes:
        kept: rows of the pool, seen as ``[N * R, X]``; past the end where there is none.
        batch: rows of the part; past the end where there is none. They go first.
    """

    kept: Int[Array, "A h"]
    batch: Int[Array, "A h"]


@flax.struct.dataclass
class Reading:
    """Where one part of a batch reads.

    Attributes:
        ring: ``[A]`` the ring each request reads from; -1 where it has none.
        origin: ``[A]`` a position that stands in the first row of that ring.
        history: what rings of the part's own begin with; None where it reads from the pool.
        length: rows of a ring that is read from.
    """

    ring: Int[Array, "A"]
    origin: Int[Array, "A"]
    history: History | None
    length: int = flax.struct.field(pytree_node=False)

    def rows(self, request: Int[Array, "*B"], position: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Row of what ``extend`` returns, seen flat; -1 for a negative position or no ring."""
        ring = jnp.take(self.ring, request, mode="fill", fill_value=-1)
        origin = jnp.take(self.origin, request, mode="fill", fill_value=0)
        row = ring * self.length + (position - origin) % self.length
        return jnp.where((position >= 0) & (ring >= 0), row, -1)


@flax.struct.dataclass
class Places:
    """Where a batch writes and reads in every pool of rings of one length.

    Attributes:
        write: ring and offset of each row, ``[T]`` each; a ring that no pool has where a row is
            not to be written.
        reading: by part.
    """

    write: tuple[Int[Array, "T"], Int[Array, "T"]]
    reading: tuple[Reading, ...]


def places(table: Int[Array, "S 1"], batch: Batch, rings: int, history: int) -> Places:
    """Places in pools of ``rings`` rings that keep ``history`` rows (see ``init``)."""
    length = history + SCRATCH
    # where a slot laps its ring, only the last row of each place is written
    last = batch.packed.join(part.of_request(part.last, 0) for part in batch.parts)
    slot = jnp.where(batch.position >= last - length, batch.slot, -1)
    write = locate(table, slot, jnp.maximum(batch.position, 0) % length, length)
    return Places(write, tuple(_reading(table, part, rings, history) for part in batch.parts))


def extend(
    places: Places, pool: Float[Array, "N R X"], batch: Batch, values: Float[Array, "T X"]
) -> tuple[Float[Array, "N R X"], list[Float[Array, "M Q X"]]]:
    """Write one row a token; the pool written, and by part the rings to read."""
    values = values.astype(pool.dtype)
    own = [
        None if reading.history is None else _own_rings(reading.history, pool, part, rows)
        for reading, part, rows in zip(
            places.reading, batch.parts, batch.packed.split(values), strict=True
        )
    ]
    # What is read of the pool as it was is read before the write, or the pool would be copied;
    # and readers must not repeat the write.
    pool, own = jax.lax.optimization_barrier((pool, own))
    written = jax.lax.optimization_barrier(pool.at[places.write].set(values, mode="drop"))
    return written, [written if rings is None else rings for rings in own]


def _reading(table: Int[Array, "S 1"], part: Part, rings: int, history: int) -> Reading:
    length = history + SCRATCH
    own, _ = locate(table, part.slots, jnp.zeros_like(part.slots), length)
    own = jnp.where(own < rings, own, -1)
    narrow = Reading(own, jnp.zeros_like(own), None, length)
    if part.alone and part.width <= SCRATCH:
        return narrow
    request = jnp.arange(own.shape[0], dtype=jnp.int32)
    origin = part.start - history
    position = origin[:, None] + jnp.arange(history, dtype=jnp.int32)
    kept = narrow.rows(request[:, None], position)
    kept = jnp.where(kept >= 0, kept, rings * length)
    before = History(kept, part.row_at(position))
    return Reading(jnp.where(own >= 0, request, -1), origin, before, history + part.width)


def _own_rings(
    history: History, pool: Float[Array, "N R X"], part: Part, values: Float[Array, "T X"]
) -> Float[Array, "A Q X"]:
    """Rings of a part's own: the history of each request, and its rows."""
    kept = pool.reshape(-1, pool.shape[2])
    kept = jnp.take(kept, history.kept, axis=0, mode="fill", fill_value=0)
    fresh = jnp.take(values, history.batch, axis=0, mode="fill", fill_value=0)
    before = jnp.where((history.batch < values.shape[0])[..., None], fresh, kept)
    return jnp.concatenate([before, part.packed.unpack(values)], axis=1)
