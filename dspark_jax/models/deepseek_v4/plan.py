"""Where a batch reads and writes, worked out once for all layers of a kind."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.models.deepseek_rope import Phases
from dspark_jax.models.deepseek_v4 import entries, ring
from dspark_jax.models.deepseek_v4.batch import Batch, Part
from dspark_jax.models.deepseek_v4.cache import DeepseekV4Cache, span
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.rope import phases
from pallas_kernels.swa_index import swa_index


@flax.struct.dataclass
class EntryPlan:
    """Entries of one ratio; N are those that the batch may close, part by part.

    Attributes:
        state: places in the rings of compressor states.
        pooled: by part ``[A, n, span]``, rows of the rings it reads that each entry is pooled
            from; -1 before the text, and everywhere in an entry that the batch does not close.
        place: page and offset of each entry, ``[N]`` each.
        turn: phases of the position where each entry's window starts.
        seen: ``[T]`` how many entries each token sees.
    """

    state: ring.Places
    pooled: tuple[Int[Array, "A n s"], ...]
    place: tuple[Int[Array, "N"], Int[Array, "N"]]
    turn: Phases
    seen: Int[Array, "T"]


@flax.struct.dataclass
class Plan:
    """What the layers share.

    Attributes:
        batch: the rows.
        table: pages of entries.
        window: places in the rings of raw rows.
        window_rows: by part ``[T, window]``, raw rows each token attends to, first the oldest,
            then -1.
        window_count: ``[T]`` how many they are.
        turn: phases of each row: in layers with a window alone, in layers with entries.
        ratios: an EntryPlan for every ratio there is.
        page_tokens: tokens of a page.
    """

    batch: Batch
    table: Int[Array, "S C"]
    window: ring.Places
    window_rows: tuple[Int[Array, "T w"], ...]
    window_count: Int[Array, "T"]
    turn: tuple[Phases, Phases]
    ratios: dict[int, EntryPlan]
    page_tokens: int = flax.struct.field(pytree_node=False)

    def turn_of(self, ratio: int) -> Phases:
        """Phases of each row in a layer of this ratio."""
        return self.turn[1 if ratio else 0]

    def entry_rows(self, ratio: int, entry: Int[Array, "T K"]) -> Int[Array, "T K"]:
        """Row of each entry in the pools of this ratio, -1 where it has none."""
        return entries.rows(self.table, self.batch.slot, entry, ratio, self.page_tokens)

    def pages_of(self, part: Part) -> Int[Array, "A C"]:
        """Pages of each request of a part, in order; -1 where there is none."""
        there = part.slots[:, None] >= 0
        return jnp.where(there, self.table[jnp.maximum(part.slots, 0)], -1)


def make_plan(config: DeepseekV4Config, cache: DeepseekV4Cache, batch: Batch) -> Plan:
    """The plan of a batch in a cache."""
    rings = cache.layers[0].window.shape[0]
    window = ring.places(cache.ring_table, batch, rings, config.sliding_window - 1)
    listed = [
        swa_index(
            part.position,
            part.packed.request,
            reading.ring,
            reading.origin,
            config.sliding_window,
            reading.length,
        )
        for reading, part in zip(window.reading, batch.parts, strict=True)
    ]
    ratios = sorted(set(config.compress_ratios) - {0})
    return Plan(
        batch=batch,
        table=cache.table,
        window=window,
        window_rows=tuple(rows for rows, _ in listed),
        window_count=batch.packed.join(count for _, count in listed),
        turn=(
            phases(config, batch.position, compressed=False),
            phases(config, batch.position, compressed=True),
        ),
        ratios={ratio: _entry_plan(config, cache, batch, rings, ratio) for ratio in ratios},
        page_tokens=cache.page_tokens,
    )


def _entry_plan(
    config: DeepseekV4Config, cache: DeepseekV4Cache, batch: Batch, rings: int, ratio: int
) -> EntryPlan:
    state = ring.places(cache.ring_table, batch, rings, span(ratio) - 1)
    pooled, slots, closed = [], [], []
    for reading, part in zip(state.reading, batch.parts, strict=True):
        entry, last = entries.closing(part, ratio)
        position = last[..., None] - jnp.arange(span(ratio) - 1, -1, -1, dtype=jnp.int32)
        request = jnp.arange(entry.shape[0], dtype=jnp.int32)[:, None, None]
        pooled.append(reading.rows(request, jnp.where(last[..., None] >= 0, position, -1)))
        slots.append(jnp.broadcast_to(part.slots[:, None], entry.shape).reshape(-1))
        closed.append(entry.reshape(-1))
    slot, entry = jnp.concatenate(slots), jnp.concatenate(closed)
    return EntryPlan(
        state=state,
        pooled=tuple(pooled),
        place=entries.place(cache.table, slot, entry, ratio, cache.page_tokens),
        turn=phases(config, jnp.maximum(entry, 0) * ratio, compressed=True),
        seen=entries.visible(batch.position, ratio),
    )
