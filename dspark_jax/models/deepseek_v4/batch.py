"""Where the rows of a packed batch stand in their requests' texts."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.models.ragged import Mixed, Packed


@flax.struct.dataclass
class Part:
    """Rows of one shape in a batch.

    Several requests of a part with ``slots`` may be pieces of one slot's text.

    Attributes:
        packed: the rows.
        slot: ``[T]`` slot of each row, -1 in padding.
        position: ``[T]`` position of each row, -1 in padding.
        slots: ``[A]`` slot of each request, -1 for a padding request.
        start: ``[A]`` first position of each request.
        end: ``[A]`` position after its last one; ``start`` where it has no rows.
        first, last: the same of all pieces of a request's slot.
        owner: ``[A]`` one request that stands for all of a slot.
    """

    packed: Packed
    slot: Int[Array, "T"]
    position: Int[Array, "T"]
    slots: Int[Array, "A"]
    start: Int[Array, "A"]
    end: Int[Array, "A"]
    first: Int[Array, "A"]
    last: Int[Array, "A"]
    owner: Int[Array, "A"]

    @property
    def width(self) -> int:
        """Most rows of one request, W."""
        return self.packed.row.shape[1]

    @property
    def alone(self) -> bool:
        """Whether every request is all that its slot has in the part."""
        return self.packed.slots is None

    def of_request(self, values: Array, fill: int) -> Array:
        """``[A, ...]`` to ``[T, ...]``; padding rows hold ``fill``."""
        return jnp.take(values, self.packed.request, axis=0, mode="fill", fill_value=fill)

    def row_at(self, position: Int[Array, "A h"]) -> Int[Array, "A h"]:
        """Row that stands at each position of a request's slot; T where the part has none."""
        requests, rows = self.slots.shape[0], self.position.shape[0]
        owner = self.of_request(self.owner, requests)
        offset = jnp.where(self.position >= 0, self.position - self.of_request(self.first, 0), rows)
        found = jnp.full((requests, rows), rows, jnp.int32)
        found = found.at[owner, offset].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
        offset = position - self.first[:, None]
        inside = (offset >= 0) & (offset < rows)
        return jnp.where(inside, found[self.owner[:, None], jnp.where(inside, offset, 0)], rows)


@flax.struct.dataclass
class Batch:
    """A packed batch with what every layer asks of it.

    Attributes:
        packed: the rows.
        parts: the same by shape. No slot has rows in two of them.
        slot: ``[T]`` slot of each row, -1 in padding.
        position: ``[T]`` position of each row, -1 in padding.
    """

    packed: Packed | Mixed
    parts: tuple[Part, ...]
    slot: Int[Array, "T"]
    position: Int[Array, "T"]

    @property
    def real(self) -> Bool[Array, "T"]:
        """Which rows are no padding."""
        return self.position >= 0


def locate_rows(packed: Packed | Mixed, slot_count: int) -> Batch:
    """The batch of ``packed`` in a cache of ``slot_count`` slots."""
    parts = tuple(_locate_part(part, slot_count) for part in packed.parts)
    slot = packed.join(part.slot for part in parts)
    return Batch(packed, parts, slot, packed.join(part.position for part in parts))


def _locate_part(packed: Packed, slot_count: int) -> Part:
    requests = packed.row.shape[0]
    own = jnp.arange(requests, dtype=jnp.int32)
    slots = own if packed.slots is None else packed.slots
    slots = jnp.where((slots >= 0) & (slots < slot_count), slots, -1)
    slot = jnp.take(slots, packed.request, mode="fill", fill_value=-1)
    position = jnp.where(slot >= 0, packed.position, -1)
    within = packed.unpack(position, fill=-1)
    count = (within >= 0).sum(axis=1).astype(jnp.int32)
    start = jnp.where(count > 0, within[:, 0], 0)
    end = start + count
    if packed.slots is None:
        return Part(packed, slot, position, slots, start, end, start, end, own)
    same = (slots[:, None] == slots) & (count > 0)
    first = jnp.where(same, start, jnp.iinfo(jnp.int32).max).min(axis=1)
    last = jnp.where(same, end, 0).max(axis=1)
    owner = jnp.argmax(same, axis=1).astype(jnp.int32)
    return Part(
        packed, slot, position, slots, start, end, jnp.where(count > 0, first, 0), last, owner
    )
