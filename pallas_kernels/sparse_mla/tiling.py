"""The lists of a token cut into tiles of 64 keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.kv_quant import Layout
from pallas_kernels.sparse_mla.selection import Selection

KEYS = 64
"""Keys of a tile."""

Starts = tuple[int, int]
"""Where the second list and the empty tile begin."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the keys of a launch come from.

    Attributes:
        starts: see `layout`.
        layout: of the pools' bytes; None if they hold numbers.
        page_sizes: rows of a page of each pool, as its lists count them.
        shared: two blocks fill each other's tiles.
        ring: bytes wait in shared memory to be converted, not in registers.
    """

    starts: Starts
    layout: Layout | None
    page_sizes: tuple[int, ...]
    shared: bool = False
    ring: bool = False


def layout(
    selections: Sequence[Selection],
) -> tuple[Int[Array, "T C"], Int[Array, "T 2"], Starts]:
    """One list a token, the number of tiles that count in each part of it, and where parts begin.

    Each selection's rows are padded with -1 to whole tiles, and a tile of -1 ends the list: it
    pairs up with the last tile of a token that has an odd number of them.
    """
    parts = [_whole_tiles(s.rows()) for s in selections]
    tokens = parts[0].shape[0]
    empty = jnp.full((tokens, KEYS), -1, jnp.int32)
    widths = [part.shape[1] for part in parts]
    counts = [_tiles(s) for s in selections] + [jnp.zeros(tokens, jnp.int32)]
    rows = jnp.concatenate([*parts, empty], axis=1)
    return rows, jnp.stack(counts[:2], axis=1), (widths[0], sum(widths))


def tile_start(number: Any, tiles: tuple[Any, Any], starts: Starts) -> Any:
    """Where in its list a token's tile ``number`` begins; past the last one, the empty tile."""
    extra = starts[0] + (number - tiles[0]) * KEYS
    rest = jnp.where(number < tiles[0] + tiles[1], extra, starts[1])
    return jnp.where(number < tiles[0], number * KEYS, rest)


def _whole_tiles(rows: Int[Array, "T K"]) -> Int[Array, "T C"]:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % KEYS)), constant_values=-1)


def _tiles(selection: Selection) -> Int[Array, "T"]:
    tokens, entries = selection.indices.shape
    if selection.lengths is None:
        return jnp.full(tokens, -(-entries // KEYS), jnp.int32)
    return (jnp.clip(selection.lengths, 0, entries).astype(jnp.int32) + KEYS - 1) // KEYS
