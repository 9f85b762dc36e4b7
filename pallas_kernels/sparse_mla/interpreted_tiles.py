"""Key tiles for Pallas' GPU interpreter: `hopper_tiles` in plain loads, stores and barriers.

The interpreter has no inline MLIR. What it can check is everything around it: which tile is
where, who waits for whom, and the arithmetic of the softmax. Blocks that share their keys on a GPU
fill tiles of their own here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla.hopper_ptx import SLOTS
from pallas_kernels.sparse_mla.tiling import KEYS, Source, tile_start

_HALF = 256


def scratch(source: Source) -> tuple[Any, ...]:
    """Barriers: ready slots, free slots."""
    del source
    return plgpu.Barrier(num_barriers=SLOTS), plgpu.Barrier(num_barriers=SLOTS)


class Tiles:
    """As `hopper_tiles.Tiles`."""

    def __init__(self, keys: Any, source: Source, ready: Any, freed: Any) -> None:
        self.keys, self.source, self.ready, self.freed = keys, source, ready, freed

    def initialise(self) -> None:
        """Nothing: these barriers come initialised."""

    def wait(self, slot: int, parity: jax.Array) -> None:
        """Until ``slot`` has been filled."""
        del parity  # these barriers count their phases themselves
        plgpu.barrier_wait(self.ready.at[slot])

    def free(self, slot: int) -> None:
        """Says that the calling warpgroup has read ``slot`` for the last time."""
        plgpu.barrier_arrive(self.freed.at[slot])

    def meet_peer(self) -> None:
        """Nothing: it shares nothing."""

    def scores(self, query: Any, tail: jax.Array | None, tile: int, parity: jax.Array) -> jax.Array:
        """fp32 products of 64 query rows with the keys of ``tile``, once they are there."""
        self.wait(2 * tile, parity)
        self.wait(2 * tile + 1, parity)
        boxes = [query[box] for box in range(8)] + ([] if tail is None else [tail])
        return jnp.dot(
            jnp.concatenate(boxes, axis=1),
            self.keys[tile].T,
            preferred_element_type=jnp.float32,
        )

    def weigh(self, out: jax.Array, weights: Any, tile: int, half: int) -> jax.Array:
        """``out`` plus the 256 value columns of ``half`` of ``tile``, weighed."""
        left = weights if isinstance(weights, jax.Array) else weights[tile]
        values = self.keys[tile, :, pl.ds(_HALF * half, _HALF)]
        return out + jnp.dot(left, values, preferred_element_type=jnp.float32)

    def fill(
        self,
        rows: Any,
        pools: tuple[Any, ...],
        first: jax.Array,
        pairs: jax.Array,
        tiles: tuple[jax.Array, jax.Array],
    ) -> None:
        """The producer's whole work, out of pools of numbers."""
        source = self.source
        if source.layout is not None:
            raise NotImplementedError("the interpreter reads pools of numbers, these hold bytes")
        width = self.keys.shape[2]

        def pair(step, carry):
            for tile in (0, 1):
                number = 2 * (first + step) + tile
                listed = rows[pl.ds(tile_start(number, tiles, source.starts), KEYS)]
                for half, columns in enumerate((pl.ds(0, _HALF), pl.ds(_HALF, width - _HALF))):
                    slot = 2 * tile + half

                    @pl.when(step > 0)
                    def _(slot=slot):
                        plgpu.barrier_wait(self.freed.at[slot])

                    found = [jnp.take(p[:, columns], jnp.maximum(listed, 0), 0) for p in pools]
                    keys = found[0]
                    if len(pools) == 2:
                        keys = jnp.where(number < tiles[0], keys, found[1])
                    keys = jnp.where(listed[:, None] >= 0, keys, jnp.zeros_like(keys))
                    self.keys[tile, :, columns] = keys
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(self.ready.at[slot])
            return carry

        lax.fori_loop(0, pairs, pair, 0)

        # The interpreter wants to see every phase of a barrier observed.
        @pl.when(pairs > 0)
        def _():
            for slot in range(SLOTS):
                plgpu.barrier_wait(self.freed.at[slot])
