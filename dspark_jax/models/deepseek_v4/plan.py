"""Where a batch reads and writes, worked out once for all layers of a kind."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.models.deepseek_v4 import entries, ring
from dspark_jax.models.deepseek_v4.batch import Batch
from dspark_jax.models.deepseek_v4.cache import DeepseekV4Cache, page_size, span
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.rope import Phases, phases
from dspark_jax.models.pages import locate


@flax.struct.dataclass
class EntryPlan:
    """Entries of one ratio.

    Attributes:
        state: places in the rings of compressor states.
        pooled: ``[A, N, span]`` rows of those rings that each entry is pooled from; -1 before the
            text, and everywhere in an entry that the batch does not close.
        place: page and offset of each entry, ``[A, N]`` each.
        turn: phases of the position where each entry's window starts.
        seen: ``[T]`` how many entries each token sees.
    """

    state: ring.Places
    pooled: Int[Array, "A N s"]
    place: tuple[Int[Array, "A N"], Int[Array, "A N"]]
    turn: Phases
    seen: Int[Array, "T"]


@flax.struct.dataclass
class Plan:
    """What the layers share.

    Attributes:
        batch: the rows.
        entry_table: pages of entries.
        window: places in the rings of raw rows.
        window_rows: ``[T, window]`` raw rows each token attends to, first the oldest, then -1.
        window_count: ``[T]`` how many they are.
        turn: phases of each row: in layers with a window alone, in layers with entries.
        ratios: an EntryPlan for every ratio there is.
    """

    batch: Batch
    entry_table: Int[Array, "S C"]
    window: ring.Places
    window_rows: Int[Array, "T w"]
    window_count: Int[Array, "T"]
    turn: tuple[Phases, Phases]
    ratios: dict[int, EntryPlan]

    def turn_of(self, ratio: int) -> Phases:
        """Phases of each row in a layer of this ratio."""
        return self.turn[1 if ratio else 0]

    def entry_rows(self, ratio: int, entry: Int[Array, "T K"]) -> Int[Array, "T K"]:
        """Row of each entry in the pools of this ratio, -1 where it has none."""
        return entries.rows(self.entry_table, self.batch.slot, entry, page_size(ratio))


def make_plan(config: DeepseekV4Config, cache: DeepseekV4Cache, batch: Batch) -> Plan:
    """The plan of a batch in a cache."""
    rings = cache.layers[0].window.shape[0]
    window = ring.places(cache.ring_table, batch, rings, config.sliding_window - 1)
    first = jnp.maximum(batch.position - config.sliding_window + 1, 0)
    position = first[:, None] + jnp.arange(config.sliding_window, dtype=jnp.int32)
    position = jnp.where(position <= batch.position[:, None], position, -1)
    ratios = sorted(set(config.compress_ratios) - {0})
    return Plan(
        batch=batch,
        entry_table=cache.entry_table,
        window=window,
        window_rows=window.rows(batch.packed.request[:, None], position),
        window_count=jnp.minimum(batch.position + 1, config.sliding_window),
        turn=(
            phases(config, batch.position, compressed=False),
            phases(config, batch.position, compressed=True),
        ),
        ratios={ratio: _entry_plan(config, cache, batch, rings, ratio) for ratio in ratios},
    )


def _entry_plan(
    config: DeepseekV4Config, cache: DeepseekV4Cache, batch: Batch, rings: int, ratio: int
) -> EntryPlan:
    state = ring.places(cache.ring_table, batch, rings, span(ratio) - 1)
    entry, last = entries.closing(batch, ratio)
    position = last[..., None] - jnp.arange(span(ratio) - 1, -1, -1, dtype=jnp.int32)
    request = jnp.arange(entry.shape[0], dtype=jnp.int32)[:, None, None]
    slot = jnp.broadcast_to(batch.slots[:, None], entry.shape)
    return EntryPlan(
        state=state,
        pooled=state.rows(request, jnp.where(last[..., None] >= 0, position, -1)),
        place=locate(cache.entry_table, slot, entry, page_size(ratio)),
        turn=phases(config, jnp.maximum(entry, 0) * ratio, compressed=True),
        seen=entries.visible(batch.position, ratio),
    )
