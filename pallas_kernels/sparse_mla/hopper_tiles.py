"""Key tiles on Hopper: copied row by row, multiplied by ``wgmma``.

The hardware's row gather (TMA) begins with Blackwell, and a row copied by TMA cannot land swizzled
as the tensor cores want it. So the producer computes swizzled addresses itself, in inline MLIR
(`hopper_copy`), as CUDA kernels for this job do. Barrier references cannot enter such code: the
barriers between producer and consumers lie in words of their own.

Two tiles of 64 keys are in shared memory, each in two halves (columns 0-255, and the rest). Slot
``2 * tile + half`` is ready once its 128 copying threads are done, and free again once the four
warps of the warpgroup that owns its value columns have arrived. Where two blocks share their keys
(`hopper_cluster`), slots are ready and free in both.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mlir
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import hopper_cluster, hopper_copy, hopper_dequantise, hopper_ring
from pallas_kernels.sparse_mla.hopper_copy import Lists
from pallas_kernels.sparse_mla.hopper_ptx import (
    COPYING_THREADS,
    FIRST_BOXES,
    I32,
    SLOTS,
    barrier,
    i32,
    lane_0,
    ptx,
    wait,
)
from pallas_kernels.sparse_mla.tiling import KEYS, Source

SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

_WARPS = 4  # of a computing warpgroup
_REF, _SCALAR = plgpu.RefType, plgpu.Layout.WG_SPLAT
_inline: Any = plgpu.inline_mgpu  # changes the signature of what it decorates


def scratch(source: Source) -> tuple[Any, ...]:
    """Shared memory of the barriers (ready slots, then free slots), and of a ring if there is."""
    words = plgpu.SMEM((2 * 2 * SLOTS,), jnp.int32)
    return (words, plgpu.SMEM((hopper_ring.BYTES // 4,), jnp.int32)) if source.ring else (words,)


class Tiles:
    """The two key tiles of a block, and the barriers that pass them around."""

    def __init__(self, keys: Any, source: Source, words: Any, *ring: Any) -> None:
        self.keys, self.source, self.words, self.ring = keys, source, words, ring

    def initialise(self) -> None:
        """By one warpgroup, before a barrier of the whole block."""
        readers = _WARPS * (hopper_cluster.BLOCKS if self.source.shared else 1)

        @_inline(arg_types=(_REF(),))
        def body(_, words):
            first = arith.cmpi(arith.CmpIPredicate.eq, mlir.thread_idx(), i32(0))
            with mlir.when(first):
                for index in range(2 * SLOTS):
                    count = COPYING_THREADS if index < SLOTS else readers
                    ptx(f"mbarrier.init.shared::cta.b64 [$0], {count};", barrier(words, index))
                ptx("fence.mbarrier_init.release.cluster;")

        body(self.words)

    def wait(self, slot: int, parity: jax.Array) -> None:
        """Until the copies of ``slot`` have landed and the tensor cores may read them."""

        @_inline(arg_types=(_REF(), _SCALAR))
        def body(_, words, parity):
            wait(words, slot, _scalar(parity))
            ptx("bar.warp.sync 0xffffffff;")
            # The copies went through the generic proxy; wgmma reads through the asynchronous one.
            ptx("fence.proxy.async.shared::cta;")

        body(self.words, parity)

    def free(self, slot: int) -> None:
        """Says that the calling warpgroup has read ``slot`` for the last time."""

        @_inline(arg_types=(_REF(),))
        def body(_, words):
            ptx("bar.warp.sync 0xffffffff;")
            arrive = "mbarrier.arrive.shared::cta.b64 _, [$0];"
            ptx(arrive, barrier(words, SLOTS + slot), predicate=lane_0())
            if self.source.shared:
                hopper_cluster.arrive_at_peer(words, SLOTS + slot)

        body(self.words)

    def meet_peer(self) -> None:
        """All threads of blocks that share their keys wait for one another.

        Before the first copy, because barriers must be there; and at the end, because a block that
        is gone takes its own along.
        """
        if self.source.shared:
            _inline(arg_types=())(lambda _: hopper_cluster.meet())()

    def scores(self, query: Any, tail: jax.Array | None, tile: int, parity: jax.Array) -> jax.Array:
        """fp32 products of 64 query rows with the keys of ``tile``, once they are there.

        ``query`` holds columns 0-511 in boxes of 64, ``tail`` the others if there are any.
        """

        def product(accumulator: Any) -> Any:
            zero = _opaque_zero()

            def key(box):
                return self.keys.at[tile + zero, :, pl.ds(64 * box, 64)].transpose((1, 0))

            self.wait(2 * tile, parity)
            for box in range(FIRST_BOXES):
                plgpu.wgmma(accumulator, query.at[box + zero], key(box))
            self.wait(2 * tile + 1, parity)
            for box in range(FIRST_BOXES, 8):
                plgpu.wgmma(accumulator, query.at[box + zero], key(box))
            if tail is not None:
                plgpu.wgmma(accumulator, tail, key(8))
            return accumulator[...]

        return pl.run_scoped(product, plgpu.ACC((64, KEYS), jnp.float32))

    def weigh(self, out: jax.Array, weights: Any, tile: int, half: int) -> jax.Array:
        """``out`` plus the 256 value columns of ``half`` of ``tile``, weighed.

        ``weights`` is an array, or a reference to ``[2, 64, 64]`` whose entry ``tile`` is meant.
        """

        def product(accumulator):
            zero = _opaque_zero()
            left = weights if isinstance(weights, jax.Array) else weights.at[tile + zero]
            plgpu.wgmma(accumulator, left, self.keys.at[tile + zero, :, pl.ds(256 * half, 256)])

        return cast(Any, pl.run_state(product)(plgpu.ACC.init(out)))

    def fill(
        self,
        rows: Any,
        pools: tuple[Any, ...],
        first: jax.Array,
        pairs: jax.Array,
        tiles: tuple[jax.Array, jax.Array],
    ) -> None:
        """The producer warpgroup's whole work: ``pairs`` pairs of tiles from pair ``first`` on.

        A row below 0 is not read, and leaves zeros.

        Args:
            rows: the token's list.
            pools: one or two.
            first: number of the first pair.
            pairs: how many.
            tiles: see `tiling.layout`.
        """
        refs, rings = (_REF(),) * len(pools), (_REF(),) * len(self.ring)
        source = self.source

        @_inline(arg_types=(_REF(), _REF(SWIZZLED), _REF(), rings, refs, (_SCALAR,) * 4))
        def body(_, rows, keys, words, rings, pools, scalars):
            first, pairs, *tiles = map(_scalar, scalars)
            lists = Lists(rows, source.starts, *tiles)
            if source.layout is None:
                hopper_copy.run(lists, pools, keys, words, first, pairs)
            elif source.ring:
                hopper_ring.run(
                    *(lists, pools, keys, words, rings[0], first, pairs),
                    *(source.layout, source.page_sizes),
                )
            else:
                hopper_dequantise.run(
                    *(lists, pools, keys, words, first, pairs),
                    *(source.layout, source.page_sizes),
                    shared=source.shared,
                )

        body(rows, self.keys, self.words, self.ring, pools, (first, pairs, *tiles))


def _opaque_zero() -> jax.Array:
    """A zero the compiler cannot see through, read where it stands.

    With constant buffer numbers LLVM hoists every wgmma descriptor out of the loop, and ptxas
    spills them (a zero made by arithmetic does not help).
    """

    @_inline(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
    def read(_):
        value = mlir.inline_ptx(
            "mov.u32 $0, %ctaid.z;",
            result_types=I32(),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read()


def _scalar(value: Any) -> Any:
    return value.registers.item() if isinstance(value, mgpu.FragmentedArray) else value
