"""Pools of bytes on Hopper: where their rows are, and how their numbers become bf16.

The seven low bits of an e4m3 number, four to the left, are a bf16 number that is 2^120 times too
small, subnormal ones included. So a few integer operations and a product with 2^120 times the scale
make two bf16 numbers of two bytes; conversion instructions run at a fraction of that rate. Integer
products share the work with masks and shifts, which run on other units. Exact for power-of-two
scales up to 2^7. The code of NaN comes out as 480 scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.kv_quant import Layout
from pallas_kernels.sparse_mla import hopper_cluster
from pallas_kernels.sparse_mla.hopper_copy import Lists
from pallas_kernels.sparse_mla.hopper_ptx import (
    FIRST_BOXES,
    add,
    barrier,
    below,
    globally,
    i32,
    ptx,
    times,
    value,
    values,
    wide,
)

_BIAS = 120  # of bf16 exponents over e4m3 ones


@dataclasses.dataclass(frozen=True)
class Row:
    """A listed row: its number, -1 for none, and where its numbers and scales are."""

    number: Any
    numbers: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class Pools:
    """One or two pools of one layout."""

    lists: Lists
    refs: Sequence[Any]
    layout: Layout
    page_sizes: Sequence[int]

    def row(self, tile: Any, number: Any) -> Row:
        """Where row ``number`` of the pool of a token's ``tile`` is; somewhere harmless for -1."""
        safe = arith.select(below(number, 0), i32(0), number)
        places = [self._place(safe, *pool) for pool in zip(self.refs, self.page_sizes, strict=True)]
        numbers, scales = (
            self.lists.choose(tile, of_pools) for of_pools in zip(*places, strict=True)
        )
        return Row(number, numbers, scales)

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


@dataclasses.dataclass(frozen=True)
class Target:
    """Where numbers go.

    Attributes:
        own: address in shared memory.
        peer: the same in the peer's, where it gets them too.
        landing: the peer's barrier that counts its bytes.
    """

    own: Any
    peer: Any = None
    landing: Any = None

    def moved(self, offset: int, words: Any, slot: int) -> Target:
        """Further on, in a slot."""
        if self.peer is None:
            return Target(add(self.own, offset))
        landing = hopper_cluster.at_peer(barrier(words, slot))
        return Target(add(self.own, offset), add(self.peer, offset), landing)

    def store(self, offset: int, words: Sequence[Any]) -> None:
        """16 bytes."""
        ptx(f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", self.own, *words)
        if self.peer is not None:
            hopper_cluster.store_at_peer(self.peer, offset, words, self.landing)


def words_at(count: int, number: Any, address: Any, offset: int) -> Sequence[Any]:
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


def factor_of(layout: Layout, scales: Sequence[Any], index: int) -> Any:
    """2^120 times a scale, in both halves of a word."""
    if not layout.exponents:
        scaled = value(f"mul.f32 $0, $1, 0f{(_BIAS + 127) << 23:08X};", scales[index])
        return value("cvt.rn.bf16x2.f32 $0, $1, $1;", scaled)
    exponent = value(f"bfe.u32 $0, $1, {8 * index}, 8;", scales[0])
    return times(add(exponent, _BIAS), 0x00800080)


def converted(word: Any, factor: Any) -> list[Any]:
    """Two words of bf16 numbers from one of e4m3 numbers."""
    found = []
    for selector in ("0x4140", "0x4342"):  # a zero byte after each number
        spread = value(f"prmt.b32 $0, $1, 0, {selector};", word)
        sign = arith.andi(spread, i32(0x00800080))
        # 16 times all eight bits leaves the sign in bit 11; 240 times the sign adds up to bit 15.
        small = value("mad.lo.u32 $0, $1, 240, $2;", sign, value("mul.lo.u32 $0, $1, 16;", spread))
        found.append(value("mul.rn.bf16x2 $0, $1, $2;", small, factor))
    return found
