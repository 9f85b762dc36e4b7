"""Where the rows of a packed batch stand in their requests' texts."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.models.ragged import Packed


@flax.struct.dataclass
class Batch:
    """A packed batch with what every layer asks of it.

    Attributes:
        packed: the rows.
        slot: ``[T]`` slot of each row, -1 in padding.
        position: ``[T]`` position of each row, -1 in padding.
        slots: ``[A]`` slot of each request, -1 for a padding request.
        start: ``[A]`` first position of each request.
        end: ``[A]`` position after its last one; ``start`` where it has no rows.
    """

    packed: Packed
    slot: Int[Array, "T"]
    position: Int[Array, "T"]
    slots: Int[Array, "A"]
    start: Int[Array, "A"]
    end: Int[Array, "A"]

    @property
    def width(self) -> int:
        """Most rows of one request, W."""
        return self.packed.row.shape[1]

    @property
    def real(self) -> Bool[Array, "T"]:
        """Which rows are no padding."""
        return self.position >= 0

    def of_request(self, values: Array, fill: int) -> Array:
        """``[A, ...]`` to ``[T, ...]``; padding rows hold ``fill``."""
        return jnp.take(values, self.packed.request, axis=0, mode="fill", fill_value=fill)


def locate_rows(packed: Packed, slot_count: int) -> Batch:
    """The batch of ``packed`` in a cache of ``slot_count`` slots."""
    requests = packed.row.shape[0]
    slots = packed.slots
    if slots is None:
        slots = jnp.arange(requests, dtype=jnp.int32)
    slots = jnp.where((slots >= 0) & (slots < slot_count), slots, -1)
    slot = jnp.take(slots, packed.request, mode="fill", fill_value=-1)
    position = jnp.where(slot >= 0, packed.position, -1)
    within = packed.unpack(position, fill=-1)
    count = (within >= 0).sum(axis=1).astype(jnp.int32)
    start = jnp.where(count > 0, within[:, 0], 0)
    return Batch(packed, slot, position, slots, start, start + count)
