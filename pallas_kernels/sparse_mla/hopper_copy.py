"""Key tiles on Hopper out of bf16 pools, with ``cp.async``; how a token's lists are walked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf
from jax.experimental.mosaic.gpu import utils as mlir

from pallas_kernels.sparse_mla.hopper_ptx import (
    BOX,
    COPYING_THREADS,
    FIRST_BOXES,
    I64,
    SLOTS,
    add,
    barrier,
    below,
    globally,
    i32,
    ptx,
    shared,
    times,
    value,
    wait,
    wide,
)
from pallas_kernels.sparse_mla.tiling import KEYS, Starts

ROWS = 4
"""Rows of a tile that a thread works on: its number over 8, and 16, 32 and 48 more."""


@dataclasses.dataclass(frozen=True)
class Lists:
    """A token's rows as MLIR values.

    Attributes:
        rows: the list.
        starts: see `tiling.layout`.
        tiles: tiles of the first selection.
        extra_tiles: of the second.
    """

    rows: Any
    starts: Starts
    tiles: Any
    extra_tiles: Any

    def of_pair(self, pair: Any, per_tile: int = ROWS, skipped: Any = 0) -> list[Any]:
        """The calling thread's rows of both tiles, from global memory.

        ``per_tile`` of each, those past the first ``skipped``.
        """
        _, row = thread_place()
        tiles = [add(times(pair, 2), tile) for tile in (0, 1)]
        found = [self.of_tile(tile, add(row, skipped), per_tile, 16) for tile in tiles]
        return [row for of_tile in found for row in of_tile]

    def of_tile(self, number: Any, first: Any, count: int, apart: int) -> list[Any]:
        """``count`` rows of a tile from its row ``first`` on, ``apart`` from each other."""
        both = add(self.tiles, self.extra_tiles)
        extra = add(times(arith.subi(number, self.tiles), KEYS), self.starts[0])
        start = arith.select(below(number, both), extra, i32(self.starts[1]))
        start = arith.select(below(number, self.tiles), times(number, KEYS), start)
        at = add(globally(self.rows), wide(times(add(start, first), 4)))
        return [value(f"ld.global.nc.b32 $0, [$1+{4 * apart * j}];", at) for j in range(count)]

    def choose(self, number: Any, of_selections: Sequence[Any]) -> Any:
        """The one of one or two values that belongs to the selection that a tile is from."""
        if len(of_selections) == 1:
            return of_selections[0]
        return arith.select(below(number, self.tiles), *of_selections)


def thread_place() -> tuple[Any, Any]:
    """Of eight threads that share a row, which one this is, and the row."""
    thread = arith.remui(mlir.thread_idx(), i32(COPYING_THREADS))
    return arith.andi(thread, i32(7)), arith.shrui(thread, i32(3))


def target(keys: Any, group: int, piece: Any, row: Any) -> Any:
    """Where 16 bytes go, the ``piece``-th of a row's first box, swizzled.

    Eight keys take ``group`` bytes.
    """
    row_in_box = arith.andi(row, i32(7))
    swizzled = add(times(arith.xori(piece, row_in_box), 16), times(row_in_box, 128))
    of_row = add(times(arith.shrui(row, i32(3)), group), swizzled)
    return add(shared(keys), of_row)


def run(lists: Lists, pools: Sequence[Any], keys: Any, words: Any, first: Any, pairs: Any) -> None:
    """`hopper_tiles.Tiles.fill` out of bf16 pools.

    A thread copies the same 16 bytes of every box of its rows.
    """
    width = ir.MemRefType(pools[0].type).shape[1]
    group = width // 64 * BOX
    piece, row = thread_place()
    place_of_row = target(keys, group, piece, row)
    sources = [add(globally(pool), wide(times(piece, 16))) for pool in pools]
    policy = mlir.inline_ptx(
        "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", result_types=I64()
    )
    last = add(pairs, -1)
    loop = scf.ForOp(i32(0), pairs, i32(1), lists.of_pair(first))
    with ir.InsertionPoint(loop.body):
        step, rows = loop.induction_variable, list(loop.inner_iter_args)
        pair = add(first, step)
        following = lists.of_pair(add(first, arith.minsi(add(step, 1), last)))
        parity = arith.xori(arith.andi(step, i32(1)), i32(1))
        for tile in (0, 1):
            source = lists.choose(add(times(pair, 2), tile), sources)
            copies = []
            for row in rows[ROWS * tile : ROWS * (tile + 1)]:
                absent = below(row, 0)
                offset = times(wide(arith.select(absent, i32(0), row)), 2 * width)
                copies.append((add(source, offset), arith.select(absent, i32(0), i32(16))))
            for half in (0, 1):
                slot = 2 * tile + half
                wait(words, SLOTS + slot, parity)
                for j, (origin, size) in enumerate(copies):
                    place = add(place_of_row, (8 * tile + 2 * j) * group)
                    for box in range(FIRST_BOXES * half, (FIRST_BOXES, width // 64)[half]):
                        ptx(
                            "cp.async.cg.shared.global.L2::cache_hint.L2::256B "
                            f"[$0+{box * BOX}], [$1+{box * 128}], 16, $2, $3;",
                            *(place, origin, size, policy),
                        )
                ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier(words, slot))
        scf.yield_(following)
