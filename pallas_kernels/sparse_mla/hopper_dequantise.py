"""Key tiles on Hopper out of pools of bytes: the producer dequantises on the way.

The seven low bits of an e4m3 number, four to the left, are a bf16 number that is 2^120 times too
small, subnormal ones included. So a shift, two masks and a product with 2^120 times the scale
make two bf16 numbers of two bytes; conversion instructions run at a fraction of that rate. Exact
for power-of-two scales up to 2^7. The code of NaN comes out as 480 scales.

A tile is copied in units: half of the columns of 32 of its rows. While the numbers of one unit
are converted, piece by piece, those of the next are loaded into the registers that become free;
the rows of the next pair of tiles are on their way into the L2 meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf

from pallas_kernels.kv_quant import Layout
from pallas_kernels.sparse_mla.hopper_copy import ROWS, Lists, thread_place, thread_target
from pallas_kernels.sparse_mla.hopper_ptx import (
    BOX,
    FIRST_BOXES,
    SLOTS,
    add,
    barrier,
    below,
    globally,
    i32,
    ptx,
    times,
    value,
    values,
    wait,
    wide,
)

_BIAS = 120  # of bf16 exponents over e4m3 ones
_LINE = 128  # bytes that one prefetch brings into the L2
_UNITS = tuple(itertools.product((0, 1), (0, 1), (0, 1)))  # tile, half, which 32 rows


@dataclasses.dataclass(frozen=True)
class _Row:
    """A listed row: its number, -1 for none, and where its numbers and scales are."""

    number: Any
    numbers: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class _Pools:
    """One or two pools of one layout."""

    lists: Lists
    refs: Sequence[Any]
    layout: Layout
    page_sizes: Sequence[int]

    def row(self, pair: Any, tile: int, number: Any) -> _Row:
        """Where row ``number`` of the pool of ``tile`` is; somewhere harmless for -1."""
        safe = arith.select(below(number, 0), i32(0), number)
        places = [self._place(safe, *pool) for pool in zip(self.refs, self.page_sizes, strict=True)]
        numbers, scales = (
            self.lists.choose(pair, tile, of_pools) for of_pools in zip(*places, strict=True)
        )
        return _Row(number, numbers, scales)

    def _place(self, row: Any, pool: Any, page_size: int) -> tuple[Any, Any]:
        layout = self.layout
        if not layout.exponents:
            numbers = add(globally(pool), times(wide(row), layout.row_bytes))
            return numbers, add(numbers, layout.quantised)
        size = i32(page_size)
        page_bytes = ir.MemRefType(pool.type).shape[1]
        page = add(globally(pool), times(wide(arith.divui(row, size)), page_bytes))
        offset = wide(arith.remui(row, size))
        scales = add(page, page_size * layout.number_bytes)
        return (
            add(page, times(offset, layout.number_bytes)),
            add(scales, times(offset, layout.scale_bytes)),
        )

    @property
    def plain_at(self) -> int:
        """Byte of a row's first bf16 number."""
        layout = self.layout
        return layout.quantised + (0 if layout.exponents else layout.scale_bytes)

    def boxes(self, half: int) -> range:
        """Boxes of e4m3 numbers in a half."""
        return range(FIRST_BOXES * half, (FIRST_BOXES, self.layout.quantised // 64)[half])


def run(
    lists: Lists,
    refs: Sequence[Any],
    keys: Any,
    words: Any,
    first: Any,
    pairs: Any,
    layout: Layout,
    page_sizes: Sequence[int],
) -> None:
    """`hopper_tiles.Tiles.fill` out of pools of bytes.

    A thread converts the same 8 numbers of every box of its rows, and copies the same 8 bf16 ones.
    """
    pools = _Pools(lists, refs, layout, page_sizes)
    group = layout.width // 64 * BOX
    target = thread_target(keys, group)
    last = add(pairs, -1)

    def pair_at(step: Any) -> Any:
        return add(first, arith.minsi(step, last))

    def loads(pair: Any, rows: Sequence[Any], unit: tuple[int, int, int]) -> list[Callable]:
        """Loads of a unit, each for a list of registers."""
        tile, half, part = unit
        mine = rows[ROWS * tile + 2 * part : ROWS * tile + 2 * part + 2]
        places = [pools.row(pair, tile, number) for number in mine]
        return [load for place in places for load in _loads(pools, place, half)]

    rows, following = lists.of_pair(pair_at(i32(0))), lists.of_pair(pair_at(i32(1)))
    unit = [load() for load in loads(pair_at(i32(0)), rows, _UNITS[0])]
    shapes = [len(piece) for piece in unit]
    loop = scf.ForOp(i32(0), pairs, i32(1), [*rows, *following, *itertools.chain(*unit)])
    with ir.InsertionPoint(loop.body):
        step, carried = loop.induction_variable, iter(loop.inner_iter_args)
        rows = list(itertools.islice(carried, 2 * ROWS))
        following = list(itertools.islice(carried, 2 * ROWS))
        unit = [list(itertools.islice(carried, count)) for count in shapes]
        pair, next_pair = pair_at(step), pair_at(add(step, 1))
        after = lists.of_pair(pair_at(add(step, 2)))
        _prefetch(pools, next_pair, following)
        parity = arith.xori(arith.andi(step, i32(1)), i32(1))
        for number, (tile, half, part) in enumerate(_UNITS):
            slot = 2 * tile + half
            if part == 0:
                wait(words, SLOTS + slot, parity)
            if number + 1 < len(_UNITS):
                upcoming = loads(pair, rows, _UNITS[number + 1])
            else:
                upcoming = loads(next_pair, following, _UNITS[0])
            loaded = []
            place = add(target, (8 * tile + 4 * part) * group)
            for store in _stores(pools, unit, half, place, group):
                store()
                if upcoming:
                    loaded.append(upcoming.pop(0)())
            unit = loaded + [load() for load in upcoming]
            if part == 1:
                # The numbers were written through the generic proxy; wgmma reads through the
                # asynchronous one.
                ptx("fence.proxy.async.shared::cta;")
                ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier(words, slot))
        scf.yield_([*following, *after, *itertools.chain(*unit)])


def _loads(pools: _Pools, row: _Row, half: int) -> list[Callable[[], Sequence[Any]]]:
    """Scales, e4m3 numbers box by box and bf16 numbers of a half of a row; zeros for none."""
    piece, _ = thread_place()
    eights = add(row.numbers, wide(times(piece, 8)))
    sixteens = add(row.numbers, wide(times(piece, 16)))
    words = 1 if pools.layout.exponents else 2

    def load(count: int, address: Any, offset: int) -> Callable[[], Sequence[Any]]:
        return lambda: _load(count, row.number, address, offset)

    found = [load(words, row.scales, 4 * words * half)]
    found += [load(2, eights, 64 * box) for box in pools.boxes(half)]
    if half == 1:
        found.append(load(4, sixteens, pools.plain_at))
    return found


def _load(count: int, number: Any, address: Any, offset: int) -> Sequence[Any]:
    """32-bit words at an address, zeros if ``number`` is negative."""
    results = [f"${i}" for i in range(count)]
    vector = "" if count == 1 else f".v{count}"
    target = results[0] if count == 1 else "{" + ", ".join(results) + "}"
    zeros = " ".join(f"mov.b32 {result}, 0;" for result in results)
    return values(
        count,
        f"{{ .reg .pred named; setp.ge.s32 named, ${count + 1}, 0; {zeros} "
        f"@named ld.global.nc{vector}.b32 {target}, [${count}+{offset}]; }}",
        *(address, number),
    )


def _stores(
    pools: _Pools, unit: Sequence[Sequence[Any]], half: int, place: Any, group: int
) -> list[Callable[[], None]]:
    """One step for each of a unit's `_loads`: converts and stores it."""
    boxes = pools.boxes(half)
    per_row = len(unit) // 2
    steps: list[Callable[[], None]] = []
    for row in (0, 1):
        scales, *pieces = unit[per_row * row : per_row * (row + 1)]
        at = add(place, 2 * row * group)
        factors: dict[int, Any] = {}

        def scale(scales=scales, factors=factors) -> None:
            count = FIRST_BOXES * 64 // pools.layout.block
            factors.update({i: _factor(pools.layout, scales, i) for i in range(count)})

        steps.append(scale)
        for box, piece in zip(boxes, pieces, strict=False):

            def convert(box=box, piece=piece, at=at, factors=factors) -> None:
                factor = factors[(box - boxes[0]) * 64 // pools.layout.block]
                _store(at, box, [word for two in piece for word in _numbers(two, factor)])

            steps.append(convert)
        if half == 1:
            steps.append(lambda at=at, plain=pieces[-1]: _store(at, boxes[-1] + 1, plain))
    return steps


def _store(place: Any, box: int, words: Sequence[Any]) -> None:
    ptx(f"st.shared.v4.b32 [$0+{box * BOX}], {{$1, $2, $3, $4}};", place, *words)


def _factor(layout: Layout, scales: Sequence[Any], index: int) -> Any:
    """2^120 times a scale, in both halves of a word."""
    if not layout.exponents:
        scaled = value(f"mul.f32 $0, $1, 0f{(_BIAS + 127) << 23:08X};", scales[index])
        return value("cvt.rn.bf16x2.f32 $0, $1, $1;", scaled)
    exponent = value(f"bfe.u32 $0, $1, {8 * index}, 8;", scales[0])
    return times(add(exponent, _BIAS), 0x00800080)


def _numbers(word: Any, factor: Any) -> list[Any]:
    """Two words of bf16 numbers from one of e4m3 numbers."""
    found = []
    for selector in ("0x1404", "0x3424"):  # a zero byte before each number
        spread = value(f"prmt.b32 $0, $1, 0, {selector};", word)
        sign = arith.andi(spread, i32(-0x7FFF8000))  # 0x80008000
        rest = arith.andi(arith.shrui(spread, i32(4)), i32(0x07F007F0))
        small = arith.ori(sign, rest)
        found.append(value("mul.rn.bf16x2 $0, $1, $2;", small, factor))
    return found


def _prefetch(pools: _Pools, pair: Any, rows: Sequence[Any]) -> None:
    """Brings a pair's rows towards the L2; of eight threads, each one line of a row."""
    piece, _ = thread_place()
    layout = pools.layout
    lines = -(-(layout.number_bytes if layout.exponents else layout.row_bytes) // _LINE)
    for index, number in enumerate(rows):
        row = pools.row(pair, index // ROWS, number)
        line = add(row.numbers, wide(times(piece, _LINE)))
        line = arith.select(below(piece, lines), line, row.scales)
        wanted = arith.andi(below(i32(-1), number), below(piece, lines + 1))
        ptx("prefetch.global.L2 [$0];", line, predicate=wanted)
