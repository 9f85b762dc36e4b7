"""What DeepSeek-V4 keeps of a request: rings of recent rows, and compressed entries for ever.

Entries live in pages of PAGE_TOKENS tokens, so one page table serves every ratio: a page holds
``PAGE_TOKENS / ratio`` entries of each layer. Rings are pools of one page a slot.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4 import ring
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.pages import contiguous

PAGE_TOKENS = 256


@flax.struct.dataclass
class CompressorCache:
    """A compressor's recent inputs and all its entries.

    Attributes:
        state: rings of (pooled vector, gate logit) of recent tokens, fp32.
        entries: pages of entries.
    """

    state: Float[Array, "N R 2C"]
    entries: Float[Array, "M P E"]


@flax.struct.dataclass
class LayerCache:
    """One layer: rings of raw rows; entries and index keys where the layer has them."""

    window: Float[Array, "N R E"]
    compressed: CompressorCache | None
    index: CompressorCache | None


class DeepseekV4Cache(flax.struct.PyTreeNode):
    """Every layer's rows, where each slot's lie, and how many are committed.

    Attributes:
        layers: one a layer, never stacked.
        ring_table: ``[S, 1]`` the ring of each slot, in every pool of rings.
        entry_table: ``[S, C]`` the pages of each slot's entries, in every pool of entries.
        length: ``[S]`` committed rows; what lies past them is scratch.
    """

    layers: tuple[LayerCache, ...]
    ring_table: Int[Array, "S 1"]
    entry_table: Int[Array, "S C"]
    length: Int[Array, "S"]


def init_cache(config: DeepseekV4Config, slots: int, capacity: int, dtype: Any) -> DeepseekV4Cache:
    """An empty cache for ``slots`` requests of ``capacity`` rows each."""
    entry_table = contiguous(slots, capacity, PAGE_TOKENS)
    pages = entry_table.size

    def compressor(ratio: int, width: int) -> CompressorCache:
        return CompressorCache(
            state=ring.init(slots, span(ratio) - 1, 2 * channels(ratio, width), jnp.float32),
            entries=jnp.zeros((pages, page_size(ratio), width), dtype),
        )

    def layer(ratio: int) -> LayerCache:
        overlaps = ratio == OVERLAPPING_RATIO
        return LayerCache(
            window=ring.init(slots, config.sliding_window - 1, config.head_dim, dtype),
            compressed=compressor(ratio, config.head_dim) if ratio else None,
            index=compressor(ratio, config.index_head_dim) if overlaps else None,
        )

    return DeepseekV4Cache(
        layers=tuple(layer(ratio) for ratio in config.compress_ratios),
        ring_table=contiguous(slots, 1, 1),
        entry_table=entry_table,
        length=jnp.zeros(slots, jnp.int32),
    )


def page_size(ratio: int) -> int:
    """Entries of a page."""
    return PAGE_TOKENS // ratio


def span(ratio: int) -> int:
    """Tokens that an entry is pooled from."""
    return 2 * ratio if ratio == OVERLAPPING_RATIO else ratio


def channels(ratio: int, width: int) -> int:
    """Numbers a token brings to a compressor: one set for each window it takes part in."""
    return 2 * width if ratio == OVERLAPPING_RATIO else width
