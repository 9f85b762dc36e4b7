"""Words of PTX and MLIR that the inline parts of the kernel are written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm
from jax.experimental.mosaic.gpu import utils as mlir

SLOTS = 4
"""Half tiles in shared memory."""

COPYING_THREADS = 128
BOX = 8 * 128
"""Bytes of a swizzled box of 8 rows and 64 bf16 columns."""

FIRST_BOXES = 4
"""Boxes of a key in the first half of its tile."""

_PATIENCE = 10_000_000  # nanoseconds that one try to pass a barrier may sleep


def I32() -> Any:
    """Of 32-bit values."""
    return ir.IntegerType.get_signless(32)


def I64() -> Any:
    """Of addresses in global memory."""
    return ir.IntegerType.get_signless(64)


def i32(value: int) -> Any:
    """A constant."""
    return arith.constant(I32(), value)


def add(a: Any, b: Any) -> Any:
    """Their sum; ``b`` may be a number."""
    return arith.addi(a, arith.constant(a.type, b) if isinstance(b, int) else b)


def times(a: Any, number: int) -> Any:
    """A multiple."""
    return arith.muli(a, arith.constant(a.type, number))


def below(a: Any, b: Any) -> Any:
    """Whether ``a < b``, signed; ``b`` may be a number."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, i32(b) if isinstance(b, int) else b)


def wide(value: Any) -> Any:
    """A 32-bit value that is not negative, as one of 64."""
    return arith.extui(I64(), value)


def shared(ref: Any) -> Any:
    """Address in shared memory."""
    return llvm.ptrtoint(I32(), mlir.memref_ptr(ref))


def globally(ref: Any) -> Any:
    """Address in global memory."""
    return llvm.ptrtoint(I64(), mlir.memref_ptr(ref))


def barrier(words: Any, index: int) -> Any:
    """Address of one of the barriers that lie in ``words``."""
    return add(shared(words), 8 * index)


def wait(words: Any, index: int, parity: Any) -> None:
    """Until the phase of that parity is over."""
    pointer = llvm.inttoptr(llvm.PointerType.get(3), barrier(words, index))
    nvvm.mbarrier_try_wait_parity(pointer, parity, i32(_PATIENCE))


def lane_0() -> Any:
    """Whether the thread is the first of its warp."""
    return arith.cmpi(arith.CmpIPredicate.eq, arith.andi(mlir.thread_idx(), i32(31)), i32(0))


def ptx(text: str, *operands: Any, predicate: Any = None) -> None:
    """An instruction without a result, in its place."""
    mlir.inline_ptx(text, *operands, predicate=predicate, has_side_effects=True)


def value(text: str, *operands: Any) -> Any:
    """A 32-bit result of an instruction that may be moved."""
    return mlir.inline_ptx(text, *operands, result_types=I32(), has_side_effects=False)


def values(count: int, text: str, *operands: Any) -> Sequence[Any]:
    """32-bit results of an instruction that stays in its place."""
    types = [I32()] * count
    found = mlir.inline_ptx(text, *operands, result_types=types, has_side_effects=True)
    return found if isinstance(found, Sequence) else [found]
