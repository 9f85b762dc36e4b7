"""Key tiles on Hopper out of V4's bytes, which wait in shared memory to be converted.

Bytes on their way into registers take registers, and ptxas, short of them, asks for bytes late
and waits for them at once. ``cp.async`` takes none: it copies pieces of 16 bytes into a ring,
from which they are read and converted eight pieces later. Every thread copies what it converts
itself, so it waits for nobody's copies but its own.

Four threads share a row, 16 numbers of each box: half of the 16-byte columns of two rows, one
even and one odd, are in different banks however they are swizzled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf
from jax.experimental.mosaic.gpu import utils as mlir

from pallas_kernels.kv_quant import Layout
from pallas_kernels.sparse_mla import hopper_cluster
from pallas_kernels.sparse_mla.hopper_bytes import (
    Pools,
    Target,
    converted,
    factor_of,
    words_at,
)
from pallas_kernels.sparse_mla.hopper_copy import Lists, target
from pallas_kernels.sparse_mla.hopper_ptx import (
    BOX,
    COPYING_THREADS,
    FIRST_BOXES,
    SLOTS,
    add,
    barrier,
    below,
    i32,
    ptx,
    shared,
    times,
    values,
    wait,
    wide,
)

_AHEAD = 8  # pieces of a thread in the ring
_PIECE = 16 * COPYING_THREADS  # bytes
BYTES = _AHEAD * _PIECE
"""Of the ring."""

_LINE = 128  # bytes that one prefetch brings into the L2
_UNIT_ROWS = 32
_QUARTERS = 4  # threads of a row


@dataclasses.dataclass(frozen=True)
class _Piece:
    """16 bytes of each thread, in the order in which they are converted.

    Attributes:
        part: which 32 rows of the tile.
        half: of the columns.
        box: of 64 columns.
        plain: which of two pieces of bf16 numbers; None for e4m3 numbers.
        first: of the pieces that fill a half.
        last: of them.
    """

    part: int
    half: int
    box: int
    plain: int | None
    first: bool
    last: bool


class _Source(NamedTuple):
    """A row of the calling thread.

    Attributes:
        number: of the row; below 0 there is none, and copies leave zeros.
        numbers: where its e4m3 numbers are, 16 of each box.
        scales: of the first half.
        more_scales: of the second.
    """

    number: Any
    numbers: Any
    scales: Any
    more_scales: Any


def run(
    lists: Lists,
    refs: Sequence[Any],
    keys: Any,
    words: Any,
    ring: Any,
    first: Any,
    pairs: Any,
    layout: Layout,
    page_sizes: Sequence[int],
    *,
    shared_keys: bool,
) -> None:
    """`hopper_tiles.Tiles.fill` out of pools of V4's bytes, through ``ring``."""
    pools = Pools(lists, refs, layout, page_sizes)
    group = layout.width // 64 * BOX
    thread = arith.remui(mlir.thread_idx(), i32(COPYING_THREADS))
    quarter, row = arith.andi(thread, i32(_QUARTERS - 1)), arith.shrui(thread, i32(2))
    parts = (0,) if shared_keys else (0, 1)
    if shared_keys:
        row = add(row, times(hopper_cluster.rank(), _UNIT_ROWS))
    targets = []
    for piece in (0, 1):
        own = target(keys, group, add(times(quarter, 2), piece), row)
        targets.append(Target(own, hopper_cluster.at_peer(own) if shared_keys else None))
    pieces = _pieces(pools, parts)
    end = times(add(first, pairs), 2)
    mine = add(shared(ring), times(thread, 16))

    def listed(tile: Any) -> list[Any]:
        found = lists.of_tile(tile, row, len(parts), _UNIT_ROWS)
        return [arith.select(below(tile, end), number, i32(-1)) for number in found]

    def slot_of(turn: Any, number: int) -> Any:
        return add(mine, arith.andi(add(turn, number * _PIECE), i32(BYTES - 1)))

    def read(place: Any) -> list[Any]:
        ptx(f"cp.async.wait_group {_AHEAD - 2};")
        return list(values(4, "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", place))

    def fetch(number: int, tiles: Sequence[Sequence[_Source]], place: Any) -> None:
        """Begins to copy a piece of the first of two tiles, or of the second past its end."""
        piece, source = pieces[number % len(pieces)], tiles[number // len(pieces)]
        of_row = source[piece.part]
        origin, offset = of_row.numbers, 64 * piece.box
        if piece.plain is not None:
            origin, offset = add(origin, wide(times(quarter, 16))), 16 * piece.plain
            offset += pools.plain_at
        ptx(
            "{ .reg .pred none; setp.lt.s32 none, $2, 0; "
            f"cp.async.cg.shared.global.L2::128B [$0], [$1+{offset}], 16, none; }}",
            *(place, origin, of_row.number),
        )
        ptx("cp.async.commit_group;")

    tile = times(first, 2)
    sources = [_source(pools, quarter, tile, number) for number in listed(tile)]
    rows = listed(add(tile, 1))
    for number in range(_AHEAD):
        fetch(number, (sources,), slot_of(i32(0), number))
    ptx(f"cp.async.wait_group {_AHEAD - 1};")
    held = list(values(4, "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", slot_of(i32(0), 0)))

    flat = itertools.chain.from_iterable(sources)
    loop = scf.ForOp(i32(0), pairs, i32(1), [i32(0), *held, *rows, *flat])
    with ir.InsertionPoint(loop.body):
        step, carried = loop.induction_variable, iter(loop.inner_iter_args)
        turn, held = next(carried), list(itertools.islice(carried, 4))
        rows = list(itertools.islice(carried, len(parts)))
        sources = [
            _Source(next(carried), next(carried), next(carried), next(carried)) for _ in parts
        ]
        parity = arith.xori(arith.andi(step, i32(1)), i32(1))
        for tile_of_pair in (0, 1):
            tile = add(times(add(first, step), 2), tile_of_pair)
            coming = [_source(pools, quarter, add(tile, 1), number) for number in rows]
            rows = listed(add(tile, 2))
            for number, piece in enumerate(pieces):
                slot = 2 * tile_of_pair + piece.half
                if piece.first:
                    (hopper_cluster.wait if shared_keys else wait)(words, SLOTS + slot, parity)
                following = read(slot_of(turn, number + 1))
                offset = (8 * tile_of_pair + 4 * piece.part) * group
                _store(
                    pools,
                    piece,
                    sources[piece.part],
                    held,
                    [t.moved(offset, words, slot) for t in targets],
                )
                fetch(number + _AHEAD, (sources, coming), slot_of(turn, number))
                held = following
                if piece.last:
                    # The numbers were written through the generic proxy; wgmma reads through the
                    # asynchronous one.
                    ptx("fence.proxy.async.shared::cta;")
                    if shared_keys:
                        columns = (FIRST_BOXES, layout.width // 64 - FIRST_BOXES)[piece.half] * 64
                        hopper_cluster.arrive_expecting(words, slot, _UNIT_ROWS * columns * 2)
                    else:
                        ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier(words, slot))
            turn = add(turn, len(pieces) * _PIECE)
            sources = coming
        flat = itertools.chain.from_iterable(sources)
        scf.yield_([turn, *held, *rows, *flat])
    ptx("cp.async.wait_all;")


def _pieces(pools: Pools, parts: Sequence[int]) -> list[_Piece]:
    """Those of a tile: half by half, and in it 32 rows by 32 rows."""
    found = []
    for half in (0, 1):
        of_half: list[tuple[int, int, int | None]] = []
        for part in parts:
            of_half += [(part, box, None) for box in pools.boxes(half)]
            if half == 1:
                of_half += [(part, pools.boxes(half)[-1] + 1, plain) for plain in (0, 1)]
        last = len(of_half) - 1
        found += [
            _Piece(part, half, box, plain, index == 0, index == last)
            for index, (part, box, plain) in enumerate(of_half)
        ]
    return found


def _source(pools: Pools, quarter: Any, tile: Any, number: Any) -> _Source:
    """Where a listed row's bytes are, on their way into the L2 from now on; and its scales."""
    row = pools.row(tile, number)
    named = below(i32(-1), number)
    line = add(row.numbers, wide(times(quarter, _LINE)))
    ptx("prefetch.global.L2 [$0];", line, predicate=named)
    one_more = arith.andi(named, below(quarter, 1))
    ptx(f"prefetch.global.L2 [$0+{_QUARTERS * _LINE}];", line, predicate=one_more)
    low, high = words_at(2, number, row.scales, 0)
    return _Source(number, add(row.numbers, wide(times(quarter, 16))), low, high)


def _store(
    pools: Pools, piece: _Piece, source: _Source, held: Sequence[Any], places: Sequence[Target]
) -> None:
    """Converts a piece out of the ring and puts it into its tile."""
    at = piece.box * BOX
    if piece.plain is not None:
        places[piece.plain].store(at, held)
        return
    scales = source.more_scales if piece.half else source.scales
    factor = factor_of(pools.layout, [scales], piece.box % FIRST_BOXES)
    words = [word for four in held for word in converted(four, factor)]
    places[0].store(at, words[:4])
    places[1].store(at, words[4:])
