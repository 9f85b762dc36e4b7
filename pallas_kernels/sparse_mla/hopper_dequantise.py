"""Key tiles on Hopper out of pools of bytes: the producer dequantises on the way.

A tile is copied in units: half of the columns of 32 of its rows. While the numbers of one unit
are converted, piece by piece, those of the next are loaded into the registers that become free;
the rows of the next pair of tiles are on their way into the L2 meanwhile. Of two blocks that share
their keys each converts 32 rows of every tile, for both (`hopper_cluster`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf

from pallas_kernels.kv_quant import Layout
from pallas_kernels.sparse_mla import hopper_cluster
from pallas_kernels.sparse_mla.hopper_bytes import (
    Pools,
    Row,
    Target,
    converted,
    factor_of,
    words_at,
)
from pallas_kernels.sparse_mla.hopper_copy import Lists, target, thread_place
from pallas_kernels.sparse_mla.hopper_ptx import (
    BOX,
    FIRST_BOXES,
    SLOTS,
    add,
    barrier,
    below,
    i32,
    ptx,
    times,
    wait,
    wide,
)

_LINE = 128  # bytes that one prefetch brings into the L2
_PER_UNIT = 2  # rows of a thread, 16 apart
_UNIT_ROWS = 32


def run(
    lists: Lists,
    refs: Sequence[Any],
    keys: Any,
    words: Any,
    first: Any,
    pairs: Any,
    layout: Layout,
    page_sizes: Sequence[int],
    *,
    shared: bool,
) -> None:
    """`hopper_tiles.Tiles.fill` out of pools of bytes.

    A thread converts the same 8 numbers of every box of its rows, and copies the same 8 bf16 ones.
    """
    pools = Pools(lists, refs, layout, page_sizes)
    group = layout.width // 64 * BOX
    targets = Target(target(keys, group, *thread_place()))
    parts, skipped = (0, 1), 0
    if shared:
        parts, skipped = (0,), times(hopper_cluster.rank(), _UNIT_ROWS)
        mine = add(targets.own, times(hopper_cluster.rank(), _UNIT_ROWS // 8 * group))
        targets = Target(mine, hopper_cluster.at_peer(mine))
    units = tuple(itertools.product((0, 1), (0, 1), parts))  # tile, half, which 32 rows
    per_tile = _PER_UNIT * len(parts)
    last = arith.maxsi(add(pairs, -1), i32(0))

    def pair_at(step: Any) -> Any:
        return add(first, arith.minsi(step, last))

    def listed(step: Any) -> list[Any]:
        return lists.of_pair(pair_at(step), per_tile, skipped)

    def loads(pair: Any, rows: Sequence[Any], unit: tuple[int, int, int]) -> list[Callable]:
        """Loads of a unit, each for a list of registers."""
        tile, half, part = unit
        mine = rows[per_tile * tile :][_PER_UNIT * part : _PER_UNIT * (part + 1)]
        places = [pools.row(add(times(pair, 2), tile), number) for number in mine]
        return [load for place in places for load in _loads(pools, place, half)]

    rows, following = listed(i32(0)), listed(i32(1))
    loaded = [load() for load in loads(pair_at(i32(0)), rows, units[0])]
    shape = [len(piece) for piece in loaded]
    flat = itertools.chain.from_iterable
    loop = scf.ForOp(i32(0), pairs, i32(1), [*rows, *following, *flat(loaded)])
    with ir.InsertionPoint(loop.body):
        step, carried = loop.induction_variable, iter(loop.inner_iter_args)
        rows = list(itertools.islice(carried, 2 * per_tile))
        following = list(itertools.islice(carried, 2 * per_tile))
        loaded = [list(itertools.islice(carried, count)) for count in shape]
        pair, next_pair = pair_at(step), pair_at(add(step, 1))
        after = listed(add(step, 2))
        _prefetch(pools, next_pair, following, per_tile)
        parity = arith.xori(arith.andi(step, i32(1)), i32(1))
        for number, (tile, half, part) in enumerate(units):
            slot = 2 * tile + half
            if part == 0:
                (hopper_cluster.wait if shared else wait)(words, SLOTS + slot, parity)
            if number + 1 < len(units):
                upcoming = loads(pair, rows, units[number + 1])
            else:
                upcoming = loads(next_pair, following, units[0])
            arriving = []
            place = targets.moved((8 * tile + 4 * part) * group, words, slot)
            for store in _stores(pools, loaded, half, place, group):
                store()
                if upcoming:
                    arriving.append(upcoming.pop(0)())
            loaded = arriving + [load() for load in upcoming]
            if part == parts[-1]:
                # The numbers were written through the generic proxy; wgmma reads through the
                # asynchronous one.
                ptx("fence.proxy.async.shared::cta;")
                if shared:
                    columns = (FIRST_BOXES, layout.width // 64 - FIRST_BOXES)[half] * 64
                    hopper_cluster.arrive_expecting(words, slot, _UNIT_ROWS * columns * 2)
                else:
                    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier(words, slot))
        scf.yield_([*following, *after, *flat(loaded)])


def _loads(pools: Pools, row: Row, half: int) -> list[Callable[[], Sequence[Any]]]:
    """Scales, e4m3 numbers box by box and bf16 numbers of a half of a row; zeros for none."""
    piece, _ = thread_place()
    eights = add(row.numbers, wide(times(piece, 8)))
    sixteens = add(row.numbers, wide(times(piece, 16)))
    words = 1 if pools.layout.exponents else 2

    def load(count: int, address: Any, offset: int) -> Callable[[], Sequence[Any]]:
        return lambda: words_at(count, row.number, address, offset)

    found = [load(words, row.scales, 4 * words * half)]
    found += [load(2, eights, 64 * box) for box in pools.boxes(half)]
    if half == 1:
        found.append(load(4, sixteens, pools.plain_at))
    return found


def _stores(
    pools: Pools, unit: Sequence[Sequence[Any]], half: int, place: Target, group: int
) -> list[Callable[[], None]]:
    """One step for each of a unit's `_loads`: converts and stores it."""
    boxes = pools.boxes(half)
    per_row = len(unit) // 2
    steps: list[Callable[[], None]] = []
    for row in (0, 1):
        scales, *pieces = unit[per_row * row : per_row * (row + 1)]
        at = 2 * row * group
        factors: dict[int, Any] = {}

        def scale(scales=scales, factors=factors) -> None:
            count = FIRST_BOXES * 64 // pools.layout.block
            factors.update({i: factor_of(pools.layout, scales, i) for i in range(count)})

        steps.append(scale)
        for box, piece in zip(boxes, pieces, strict=False):

            def convert(box=box, piece=piece, at=at, factors=factors) -> None:
                factor = factors[(box - boxes[0]) * 64 // pools.layout.block]
                words = [word for two in piece for word in converted(two, factor)]
                place.store(at + box * BOX, words)

            steps.append(convert)
        if half == 1:
            plain_at = at + (boxes[-1] + 1) * BOX
            steps.append(lambda at=plain_at, plain=pieces[-1]: place.store(at, plain))
    return steps


def _prefetch(pools: Pools, pair: Any, rows: Sequence[Any], per_tile: int) -> None:
    """Brings a pair's rows towards the L2; of eight threads, each one line of a row."""
    piece, _ = thread_place()
    layout = pools.layout
    lines = -(-(layout.number_bytes if layout.exponents else layout.row_bytes) // _LINE)
    for index, number in enumerate(rows):
        row = pools.row(add(times(pair, 2), index // per_tile), number)
        line = add(row.numbers, wide(times(piece, _LINE)))
        line = arith.select(below(piece, lines), line, row.scales)
        wanted = arith.andi(below(i32(-1), number), below(piece, lines + 1))
        ptx("prefetch.global.L2 [$0];", line, predicate=wanted)
