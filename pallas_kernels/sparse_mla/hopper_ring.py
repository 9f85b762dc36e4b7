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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf
from jax.experimental.mosaic.gpu import utils as mlir

from pallas_kernels.kv_quant import Layout
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
_PARTS = 2  # rows of a thread in a tile
_APART = 32  # rows
_QUARTERS = 4  # threads of a row


class _Piece(NamedTuple):
    """16 bytes of each thread.

    Attributes:
        half: of the columns.
        part: which of the thread's rows.
        box: of 64 columns.
        plain: which of two pieces of bf16 numbers; None for e4m3 numbers.
    """

    half: int
    part: int
    box: int
    plain: int | None = None


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
) -> None:
    """`hopper_tiles.Tiles.fill` out of pools of V4's bytes, through ``ring``."""
    pools = Pools(lists, refs, layout, page_sizes)
    group = layout.width // 64 * BOX
    thread = arith.remui(mlir.thread_idx(), i32(COPYING_THREADS))
    quarter, row = arith.andi(thread, i32(_QUARTERS - 1)), arith.shrui(thread, i32(2))
    targets = [Target(target(keys, group, add(times(quarter, 2), piece), row)) for piece in (0, 1)]
    places = _Ring(add(shared(ring), times(thread, 16)), quarter, tuple(_pieces(pools)), pools)
    end = times(add(first, pairs), 2)

    def listed(tile: Any) -> list[Any]:
        found = lists.of_tile(tile, row, _PARTS, _APART)
        return [arith.select(below(tile, end), number, i32(-1)) for number in found]

    tile = times(first, 2)
    sources = [_source(pools, quarter, tile, number) for number in listed(tile)]
    rows = listed(add(tile, 1))
    for number in range(_AHEAD):
        places.fetch(i32(0), number, (sources,))
    held = places.read(i32(0), 0, behind=_AHEAD - 1)

    start = [i32(0), *held, *rows, *itertools.chain.from_iterable(sources)]
    loop = scf.ForOp(i32(0), pairs, i32(1), start)
    with ir.InsertionPoint(loop.body):
        step, carried = loop.induction_variable, iter(loop.inner_iter_args)
        turn, held = next(carried), list(itertools.islice(carried, len(held)))
        rows = list(itertools.islice(carried, _PARTS))
        fields = len(_Source._fields)
        sources = [_Source(*itertools.islice(carried, fields)) for _ in range(_PARTS)]
        parity = arith.xori(arith.andi(step, i32(1)), i32(1))
        for tile_of_pair in (0, 1):
            tile = add(times(add(first, step), 2), tile_of_pair)
            coming = [_source(pools, quarter, add(tile, 1), number) for number in rows]
            rows = listed(add(tile, 2))
            for number, piece in enumerate(places.pieces):
                slot = 2 * tile_of_pair + piece.half
                if number == 0 or piece.half != places.pieces[number - 1].half:
                    wait(words, SLOTS + slot, parity)
                following = places.read(turn, number + 1, behind=_AHEAD - 2)
                offset = (8 * tile_of_pair + _APART // 8 * piece.part) * group
                moved = [place.moved(offset, words, slot) for place in targets]
                _store(pools, piece, sources[piece.part], held, moved)
                places.fetch(turn, number + _AHEAD, (sources, coming))
                held = following
                if number in (places.pieces_of_first_half - 1, len(places.pieces) - 1):
                    # Who waits for this fences, too: numbers are written through the generic proxy.
                    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier(words, slot))
            turn = add(turn, len(places.pieces) * _PIECE)
            sources = coming
        scf.yield_([turn, *held, *rows, *itertools.chain.from_iterable(sources)])
    ptx("cp.async.wait_all;")


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The calling thread's pieces of the ring.

    Attributes:
        begin: where the first one is.
        quarter: of a row, which is the thread's.
        pieces: of a tile, in the order in which they are converted.
        pools: where they come from.
    """

    begin: Any
    quarter: Any
    pieces: tuple[_Piece, ...]
    pools: Pools

    @property
    def pieces_of_first_half(self) -> int:
        return sum(piece.half == 0 for piece in self.pieces)

    def fetch(self, turn: Any, number: int, tiles: Sequence[Sequence[_Source]]) -> None:
        """Begins to copy a piece of the first of two tiles, or of the second past its end.

        ``turn`` is where in the ring the first tile begins, in bytes.
        """
        piece = self.pieces[number % len(self.pieces)]
        source = tiles[number // len(self.pieces)][piece.part]
        origin, offset = source.numbers, 64 * piece.box
        if piece.plain is not None:
            origin = add(origin, wide(times(self.quarter, 16)))
            offset = self.pools.plain_at + 16 * piece.plain
        ptx(
            "{ .reg .pred none; setp.lt.s32 none, $2, 0; "
            f"cp.async.cg.shared.global.L2::128B [$0], [$1+{offset}], 16, none; }}",
            *(self._place(turn, number), origin, source.number),
        )
        ptx("cp.async.commit_group;")

    def read(self, turn: Any, number: int, behind: int) -> list[Any]:
        """A piece that has come once all but the last ``behind`` copies have."""
        ptx(f"cp.async.wait_group {behind};")
        place = self._place(turn, number)
        return list(values(4, "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", place))

    def _place(self, turn: Any, number: int) -> Any:
        return add(self.begin, arith.andi(add(turn, number * _PIECE), i32(BYTES - 1)))


def _pieces(pools: Pools) -> Iterator[_Piece]:
    """Those of a tile: half by half, and in it 32 rows by 32 rows."""
    for half, part in itertools.product((0, 1), range(_PARTS)):
        boxes = pools.boxes(half)
        yield from (_Piece(half, part, box) for box in boxes)
        if half == 1:
            yield from (_Piece(half, part, boxes[-1] + 1, plain) for plain in (0, 1))


def _source(pools: Pools, quarter: Any, tile: Any, number: Any) -> _Source:
    """Where a listed row's bytes are, on their way into the L2 from now on; and its scales."""
    row = pools.row(tile, number)
    named = below(i32(-1), number)
    line = add(row.numbers, wide(times(quarter, _LINE)))
    ptx("prefetch.global.L2 [$0];", line, predicate=named)
    one_more = arith.andi(named, below(quarter, 1))
    ptx(f"prefetch.global.L2 [$0+{_QUARTERS * _LINE}];", line, predicate=one_more)
    scales, more_scales = words_at(2, number, row.scales, 0)
    return _Source(number, add(row.numbers, wide(times(quarter, 16))), scales, more_scales)


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
