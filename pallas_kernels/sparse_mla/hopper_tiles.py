"""Key tiles on Hopper: copied row by row with ``cp.async``, multiplied by ``wgmma``.

The hardware's row gather (TMA) begins with Blackwell, and a row copied by TMA cannot land swizzled
as the tensor cores want it. So the producer computes swizzled addresses itself, in inline MLIR,
as CUDA kernels for this job do. Barrier references cannot enter such code: the barriers between
producer and consumers lie in words of their own.

Two tiles of 64 keys are in shared memory, each in two halves (columns 0-255, and the rest). Slot
``2 * tile + half`` is ready once its 128 copying threads are done, and free again once the four
warps of the warpgroup that owns its value columns have arrived.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, scf
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mlir
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla.tiling import KEYS, Starts

SLOTS = 4
"""Half tiles in shared memory."""

SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

_THREADS, _WARPS = 128, 4
_BOX = 8 * 128  # bytes of a swizzled box of 8 rows and 64 bf16 columns
_FIRST_BOXES = 4  # boxes of a key in the first half
_PATIENCE = 10_000_000  # nanoseconds that one try to pass a barrier may sleep
_REF, _SCALAR = plgpu.RefType, plgpu.Layout.WG_SPLAT


def scratch() -> tuple[Any, ...]:
    """Shared memory of the barriers: ready slots, then free slots."""
    return (plgpu.SMEM((2 * 2 * SLOTS,), jnp.int32),)


class Tiles:
    """The two key tiles of a block, and the barriers that pass them around."""

    def __init__(self, keys: Any, words: Any) -> None:
        self.keys, self.words = keys, words

    def initialise(self) -> None:
        """By one warpgroup, before a barrier of the whole block."""

        @plgpu.inline_mgpu(arg_types=(_REF(),))
        def body(_, words):
            first = arith.cmpi(arith.CmpIPredicate.eq, mlir.thread_idx(), _i32(0))
            with mlir.when(first):
                for index in range(2 * SLOTS):
                    count = _THREADS if index < SLOTS else _WARPS
                    _ptx(f"mbarrier.init.shared::cta.b64 [$0], {count};", _barrier(words, index))
                _ptx("fence.mbarrier_init.release.cluster;")

        body(self.words)

    def wait(self, slot: int, parity: jax.Array) -> None:
        """Until the copies of ``slot`` have landed and the tensor cores may read them."""

        @plgpu.inline_mgpu(arg_types=(_REF(), _SCALAR))
        def body(_, words, parity):
            _wait(words, slot, _scalar(parity))
            _ptx("bar.warp.sync 0xffffffff;")
            # The copies went through the generic proxy; wgmma reads through the asynchronous one.
            _ptx("fence.proxy.async.shared::cta;")

        body(self.words, parity)

    def free(self, slot: int) -> None:
        """Says that the calling warpgroup has read ``slot`` for the last time."""

        @plgpu.inline_mgpu(arg_types=(_REF(),))
        def body(_, words):
            _ptx("bar.warp.sync 0xffffffff;")
            lane = arith.andi(mlir.thread_idx(), _i32(31))
            mlir.inline_ptx(
                "mbarrier.arrive.shared::cta.b64 _, [$0];",
                _barrier(words, SLOTS + slot),
                predicate=arith.cmpi(arith.CmpIPredicate.eq, lane, _i32(0)),
                has_side_effects=True,
            )

        body(self.words)

    def scores(self, query: Any, tail: jax.Array | None, tile: int, parity: jax.Array) -> jax.Array:
        """fp32 products of 64 query rows with the keys of ``tile``, once they are there.

        ``query`` holds columns 0-511 in boxes of 64, ``tail`` the others if there are any.
        """

        def product(accumulator):
            zero = _opaque_zero()

            def key(box):
                return self.keys.at[tile + zero, :, pl.ds(64 * box, 64)].transpose((1, 0))

            self.wait(2 * tile, parity)
            for box in range(_FIRST_BOXES):
                plgpu.wgmma(accumulator, query.at[box + zero], key(box))
            self.wait(2 * tile + 1, parity)
            for box in range(_FIRST_BOXES, 8):
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

        return pl.run_state(product)(plgpu.ACC.init(out))

    def fill(
        self,
        rows: Any,
        pools: tuple[Any, ...],
        first: jax.Array,
        pairs: jax.Array,
        tiles: tuple[jax.Array, jax.Array],
        starts: Starts,
    ) -> None:
        """The producer warpgroup's whole work: ``pairs`` pairs of tiles from pair ``first`` on.

        Thread t copies the 16-byte piece t % 8 of every box of rows t // 8, +16, +32 and +48. A
        row below 0 is not read, and leaves zeros.

        Args:
            rows: the token's list.
            pools: one or two pools, seen as ``[rows, W]``.
            first: number of the first pair.
            pairs: how many.
            tiles: see `tiling.layout`.
            starts: see `tiling.layout`.
        """
        refs = (_REF(),) * len(pools)

        @plgpu.inline_mgpu(arg_types=(_REF(), _REF(SWIZZLED), _REF(), refs, (_SCALAR,) * 4))
        def body(_, rows, keys, words, pools, scalars):
            _copy_pairs(rows, keys, words, pools, *map(_scalar, scalars), starts)

        body(rows, self.keys, self.words, pools, (first, pairs, *tiles))


def _copy_pairs(rows, keys, words, pools, first, pairs, tiles, extra_tiles, starts) -> None:
    """`Tiles.fill` on MLIR values."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    width = ir.MemRefType(pools[0].type).shape[1]
    boxes = width // 64
    group = boxes * _BOX  # bytes of 8 keys

    def add(a, b):
        return arith.addi(a, b)

    def times(a, k):
        return arith.muli(a, _i32(k))

    def below(a, b):
        return arith.cmpi(arith.CmpIPredicate.slt, a, b)

    thread = arith.remui(mlir.thread_idx(), _i32(_THREADS))
    piece, row = arith.andi(thread, _i32(7)), arith.shrui(thread, _i32(3))
    row_in_box = arith.andi(row, _i32(7))
    swizzled = add(times(arith.xori(piece, row_in_box), 16), times(row_in_box, 128))
    target = add(add(_shared(keys), times(arith.shrui(row, _i32(3)), group)), swizzled)
    sources = [add(_global(pool), arith.extui(i64, times(piece, 16))) for pool in pools]
    listed = add(_global(rows), arith.extui(i64, times(row, 4)))
    policy = mlir.inline_ptx(
        "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", result_types=i64
    )
    all_tiles = add(tiles, extra_tiles)

    def listed_rows(pair):
        found = []
        for tile in (0, 1):
            number = add(times(pair, 2), _i32(tile))
            extra = add(arith.subi(times(number, KEYS), times(tiles, KEYS)), _i32(starts[0]))
            start = arith.select(below(number, all_tiles), extra, _i32(starts[1]))
            start = arith.select(below(number, tiles), times(number, KEYS), start)
            at = add(listed, arith.extui(i64, times(start, 4)))
            found += [
                mlir.inline_ptx(
                    f"ld.global.nc.b32 $0, [$1+{4 * 16 * j}];",
                    at,
                    result_types=i32,
                    has_side_effects=False,
                )
                for j in range(4)
            ]
        return found

    last = arith.subi(pairs, _i32(1))
    loop = scf.ForOp(_i32(0), pairs, _i32(1), listed_rows(first))
    with ir.InsertionPoint(loop.body):
        step, found = loop.induction_variable, list(loop.inner_iter_args)
        pair = add(first, step)
        following = listed_rows(add(first, arith.minsi(add(step, _i32(1)), last)))
        parity = arith.xori(arith.andi(step, _i32(1)), _i32(1))
        for tile in (0, 1):
            source = sources[0]
            if len(pools) == 2:
                number = add(times(pair, 2), _i32(tile))
                source = arith.select(below(number, tiles), sources[0], sources[1])
            copies = []
            for j in range(4):
                named = arith.cmpi(arith.CmpIPredicate.sge, found[4 * tile + j], _i32(0))
                safe = arith.select(named, found[4 * tile + j], _i32(0))
                offset = arith.muli(arith.extui(i64, safe), arith.constant(i64, 2 * width))
                size = arith.select(named, _i32(16), _i32(0))
                copies.append((add(source, offset), size))
            for half in (0, 1):
                slot = 2 * tile + half
                _wait(words, SLOTS + slot, parity)
                for j, (origin, size) in enumerate(copies):
                    place = add(target, _i32(8 * tile * group + 2 * j * group))
                    for box in range(_FIRST_BOXES * half, (_FIRST_BOXES, boxes)[half]):
                        _ptx(
                            "cp.async.cg.shared.global.L2::cache_hint.L2::256B "
                            f"[$0+{box * _BOX}], [$1+{box * 128}], 16, $2, $3;",
                            place,
                            origin,
                            size,
                            policy,
                        )
                _ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", _barrier(words, slot))
        scf.yield_(following)


def _opaque_zero() -> jax.Array:
    """A zero the compiler cannot see through, read where it stands.

    With constant buffer numbers LLVM hoists every wgmma descriptor out of the loop, and ptxas
    spills them (a zero made by arithmetic does not help).
    """

    @plgpu.inline_mgpu(
        arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def read(_):
        value = mlir.inline_ptx(
            "mov.u32 $0, %ctaid.z;",
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read()


def _i32(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _scalar(value: Any) -> Any:
    return value.registers.item() if isinstance(value, mgpu.FragmentedArray) else value


def _shared(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mlir.memref_ptr(ref))


def _global(ref: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mlir.memref_ptr(ref))


def _barrier(words: Any, index: int) -> Any:
    return arith.addi(_shared(words), _i32(8 * index))


def _wait(words: Any, index: int, parity: Any) -> None:
    pointer = llvm.inttoptr(llvm.PointerType.get(3), _barrier(words, index))
    nvvm.mbarrier_try_wait_parity(pointer, parity, _i32(_PATIENCE))


def _ptx(text: str, *operands: Any) -> None:
    mlir.inline_ptx(text, *operands, has_side_effects=True)
