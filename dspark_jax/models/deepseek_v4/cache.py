"""What DeepSeek-V4 keeps of a request: rings of recent rows, and compressed entries for ever.

Entries lie in pages of tokens, so one page table serves every ratio (``entries``). Rings are pools
of one ring a slot: they belong to whoever has the slot, and no page brings them back.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4 import entries, ring
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.pages import PagePool, contiguous

PAGE_TOKENS = 256
"""Tokens of a page where nobody asks for another size."""


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
        table: ``[S, C]`` the pages of each slot's entries, in every pool of entries.
        length: ``[S]`` committed rows; what lies past them is scratch.
        page_tokens: tokens of a page.
    """

    layers: tuple[LayerCache, ...]
    ring_table: Int[Array, "S 1"]
    table: Int[Array, "S C"]
    length: Int[Array, "S"]
    page_tokens: int = flax.struct.field(pytree_node=False)


def init_cache(config: DeepseekV4Config, slots: int, capacity: int, dtype: Any) -> DeepseekV4Cache:
    """An empty cache for ``slots`` requests of ``capacity`` rows each."""
    return _empty(config, slots, contiguous(slots, capacity, PAGE_TOKENS), None, dtype)


def init_pages(config: DeepseekV4Config, slots: int, pool: PagePool, dtype: Any) -> DeepseekV4Cache:
    """An empty paged cache: every slot has its rings, and none a page.

    Raises:
        ValueError: a page size that entries do not fit.
    """
    ratios = sorted(set(config.compress_ratios) - {0})
    for ratio in ratios:
        # an indexer reads pages that are full of entries
        divides = ratio % pool.size == 0 and ratio != OVERLAPPING_RATIO
        if pool.size % ratio and not divides:
            raise ValueError(
                f"page_size is {pool.size}, entries stand for {ratios} tokens; wanted a divisor or "
                f"a multiple of each, and of {OVERLAPPING_RATIO} a multiple"
            )
    return _empty(config, slots, pool.empty_table(slots), pool, dtype)


def span(ratio: int) -> int:
    """Tokens that an entry is pooled from."""
    return 2 * ratio if ratio == OVERLAPPING_RATIO else ratio


def channels(ratio: int, width: int) -> int:
    """Numbers a token brings to a compressor: one set for each window it takes part in."""
    return 2 * width if ratio == OVERLAPPING_RATIO else width


def _empty(
    config: DeepseekV4Config,
    slots: int,
    table: Int[Array, "S C"],
    pool: PagePool | None,
    dtype: Any,
) -> DeepseekV4Cache:
    """Rings by slot, and pages of ``pool``, or those that ``table`` names."""
    pages, tokens = (table.size, PAGE_TOKENS) if pool is None else (pool.count, pool.size)

    def compressor(ratio: int, width: int) -> CompressorCache:
        return CompressorCache(
            state=ring.init(slots, span(ratio) - 1, 2 * channels(ratio, width), jnp.float32),
            entries=jnp.zeros((pages, entries.page_size(tokens, ratio), width), dtype),
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
        table=table,
        length=jnp.zeros(slots, jnp.int32),
        page_tokens=tokens,
    )
