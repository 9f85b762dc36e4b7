"""Inline MLIR of a Hopper kernel on NumPy: what one warpgroup of 128 threads does to memory.

`Tape` stands in for the parts of MLIR's Python that producers of key tiles are written with, and
writes down what they ask for; `Machine` does it, all threads in step. Of PTX it knows what they
use. Copies on their way land as late as they may.
"""

from __future__ import annotations

import contextlib
import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

THREADS = 128
PEER = 1 << 24
"""Where a block sees the shared memory of its peer."""

_BITS = {"i1": 1, "i32": 32, "i64": 63}
_ROW_OF_BANKS = 8  # 16-byte columns

Numbers = np.ndarray


class Value:
    """One number a thread."""

    def __init__(self, type_: str) -> None:
        self.type = type_


class Ref:
    """Memory: its first address and its shape."""

    def __init__(self, address: int, shape: Sequence[int] = ()) -> None:
        self.address, self.type = address, tuple(shape)


class Block(list):
    """Operations in order, and what the block yields."""

    yields: Sequence[Value] = ()


class Tape:
    """Writes down operations; its attributes have the names of MLIR's modules."""

    def __init__(self) -> None:
        self.blocks = [Block()]
        self.arith, self.ir, self.mlir = self._arith(), self._ir(), self._mlir()
        self.scf = types.SimpleNamespace(ForOp=self._for, yield_=self._yield)
        self.llvm = types.SimpleNamespace(
            ptrtoint=lambda type_, ref: self.constant(type_, ref.address),
            inttoptr=lambda _, value: value,
            PointerType=types.SimpleNamespace(get=lambda space: space),
        )
        self.nvvm = types.SimpleNamespace(
            mbarrier_try_wait_parity=lambda at, parity, _: self.write("wait", [at, parity])
        )

    def write(self, what: Any, operands: Sequence[Value], types_: Sequence[str] = ()) -> list:
        results = [Value(type_) for type_ in types_]
        self.blocks[-1].append((what, list(operands), results))
        return results

    def constant(self, type_: str, number: int) -> Value:
        numbers = np.full(THREADS, number & (1 << _BITS[type_]) - 1, np.int64)
        return self.write(lambda: numbers, [], [type_])[0]

    def _arith(self) -> Any:
        def of_two(function: Callable, result: str | None = None) -> Callable:
            def write(a: Value, b: Value) -> Value:
                assert a.type == b.type
                kept = (1 << _BITS[a.type]) - 1
                return self.write(
                    lambda x, y: np.asarray(function(x, y), np.int64) & kept,
                    [a, b],
                    [result or a.type],
                )[0]

            return write

        def signed(function: Callable) -> Callable:
            return lambda x, y: function(_signed(x), _signed(y))

        compare = {"slt": of_two(signed(operator.lt), "i1"), "eq": of_two(operator.eq, "i1")}
        return types.SimpleNamespace(
            CmpIPredicate=types.SimpleNamespace(slt="slt", eq="eq"),
            constant=self.constant,
            addi=of_two(operator.add),
            subi=of_two(operator.sub),
            muli=of_two(operator.mul),
            andi=of_two(operator.and_),
            ori=of_two(operator.or_),
            xori=of_two(operator.xor),
            shrui=of_two(operator.rshift),
            divui=of_two(operator.floordiv),
            remui=of_two(operator.mod),
            minsi=of_two(signed(np.minimum)),
            maxsi=of_two(signed(np.maximum)),
            cmpi=lambda predicate, a, b: compare[predicate](a, b),
            select=lambda c, a, b: self.write(
                lambda c, x, y: np.where(c, x, y), [c, a, b], [a.type]
            )[0],
            extui=lambda type_, a: self.write(lambda x: x, [a], [type_])[0],
        )

    def _ir(self) -> Any:
        @contextlib.contextmanager
        def insertion_point(block: Block) -> Iterator[None]:
            self.blocks.append(block)
            yield
            self.blocks.pop()

        return types.SimpleNamespace(
            IntegerType=types.SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
            MemRefType=lambda shape: types.SimpleNamespace(shape=shape),
            InsertionPoint=insertion_point,
        )

    def _mlir(self) -> Any:
        def inline_ptx(text, *operands, predicate=None, result_types=None, **_):
            several = isinstance(result_types, list)
            types_ = result_types if several else [result_types] if result_types else []
            predicates = [] if predicate is None else [predicate]
            found = self.write((text, bool(predicates)), [*operands, *predicates], types_)
            return found if len(found) > 1 else found[0] if found else None

        return types.SimpleNamespace(
            inline_ptx=inline_ptx,
            memref_ptr=lambda ref: ref,
            # The third warpgroup.
            thread_idx=lambda: self.write(lambda: np.arange(2 * THREADS, 3 * THREADS), [], ["i32"])[
                0
            ],
        )

    def _for(self, begin: Value, end: Value, by: Value, start: Sequence[Value]) -> Any:
        loop = types.SimpleNamespace(
            induction_variable=Value("i32"),
            inner_iter_args=[Value(value.type) for value in start],
            body=Block(),
        )
        self.write(loop, [begin, end, by, *start])
        return loop

    def _yield(self, values: Sequence[Value]) -> None:
        self.blocks[-1].yields = values


class Machine:
    """Does what a tape says.

    Attributes:
        memory: global memory.
        shared: of the block; addresses from `PEER` on mean ``peer``.
        rank: of the block in its cluster.
        on_wait: called with the address and the parity of a barrier waited for.
        on_arrival: called with the address of a barrier arrived at.
    """

    def __init__(self, memory: Numbers, shared: Numbers, peer: Numbers, rank: int = 0) -> None:
        self.memory, self.shared, self.peer, self.rank = memory, shared, peer, rank
        self.on_wait: Callable[[int, int], None] = lambda at, parity: None
        self.on_arrival: Callable[[int], None] = lambda at: None
        self.open: list[Any] = []
        self.groups: list[list[Any]] = []
        self._known = [
            (re.compile(pattern), getattr(self, name)) for pattern, name in _INSTRUCTIONS
        ]

    def run(self, block: Block, values: dict[Value, Numbers] | None = None) -> None:
        """Runs a block with the values of operands that others have made."""
        values = {} if values is None else values
        for what, operands, results in block:
            given = [values[operand] for operand in operands]
            if what == "wait":
                self._wait(None, *given)
            elif isinstance(what, tuple):
                for result, numbers in zip(results, self._ptx(*what, given), strict=True):
                    values[result] = numbers
            elif callable(what):
                values[results[0]] = what(*given)
            else:
                begin, end, by, *carried = given
                for step in range(int(begin[0]), int(_signed(end)[0]), int(by[0])):
                    values[what.induction_variable] = np.full(THREADS, step)
                    values |= dict(zip(what.inner_iter_args, carried, strict=True))
                    self.run(what.body, values)
                    carried = [values[value] for value in what.body.yields]

    def _ptx(self, text: str, predicated: bool, operands: list[Numbers]) -> Sequence[Numbers]:
        predicate = operands.pop() != 0 if predicated else np.ones(THREADS, bool)
        for pattern, do in self._known:
            if match := pattern.search(text):
                if do == self._prefetch:
                    operands.append(predicate)
                elif predicated:
                    assert do in (self._arrive, self._nothing)
                return do(match, *operands) or ()
        raise NotImplementedError(text)

    def _wait(self, _: Any, at: Numbers, parity: Numbers) -> None:
        self.on_wait(_one(at), _one(parity))

    def _arrive(self, _: Any, at: Numbers) -> None:
        self.on_arrival(_one(at))

    def _nothing(self, *_: Any) -> None:
        pass

    def _copy(self, match: re.Match, to: Numbers, at: Numbers, which: Numbers, *_: Any) -> None:
        # Either the number of a row, which is copied unless below 0, or how many bytes count.
        copied = _signed(which) >= 0 if match[3] == "none" else which > 0
        self.open.append((to + int(match[1] or 0), at + int(match[2] or 0), copied))

    def _commit(self, _: Any) -> None:
        self.groups.append(self.open)
        self.open = []

    def _finish(self, match: re.Match) -> None:
        self._land(int(match[1]))

    def _finish_all(self, match: re.Match) -> None:
        self._commit(match)
        self._land(0)

    def _arrive_later(self, match: re.Match, at: Numbers) -> None:
        self._finish_all(match)
        self.on_arrival(_one(at))

    def _land(self, behind: int) -> None:
        while len(self.groups) > behind:
            for to, at, copied in self.groups.pop(0):
                self.shared[_bytes(to, 16)] = 0
                self.shared[_bytes(to[copied], 16)] = self.memory[_bytes(at[copied], 16)]

    def _load(self, match: re.Match, at: Numbers, number: Numbers | None = None) -> list[Numbers]:
        count = int(match[1] or 1)
        named = np.ones(THREADS, bool) if number is None else _signed(number) >= 0
        found = _words(self.memory, np.where(named, at + int(match[2] or 0), 0), count)
        return [np.where(named, word, 0) for word in found]

    def _prefetch(self, match: re.Match, at: Numbers, predicate: Numbers) -> None:
        at = at[predicate] + int(match[1] or 0)
        assert ((at >= 0) & (at < len(self.memory))).all()

    def _read(self, match: re.Match, at: Numbers) -> list[Numbers]:
        return _words(self.shared, at + int(match[1] or 0), 4)

    def _store(self, match: re.Match, at: Numbers, *words: Numbers) -> None:
        self._put(self.shared, at + int(match[1]), words[:4])

    def _store_at_peer(self, match: re.Match, at: Numbers, *words: Numbers) -> None:
        self._put(self.peer, at + int(match[1]) - PEER, words[:4])

    def _put(self, memory: Numbers, at: Numbers, words: Sequence[Numbers]) -> None:
        memory[_bytes(at, 16)] = np.stack(words, 1).astype(np.uint32).view(np.uint8)
        # Eight threads at a time fill a row of banks, or the store takes longer.
        columns = (at // 16 % _ROW_OF_BANKS).reshape(-1, _ROW_OF_BANKS)
        assert (np.sort(columns) == np.arange(_ROW_OF_BANKS)).all(), "a bank conflict"

    def _at_peer(self, _: Any, at: Numbers, rank: Numbers) -> list[Numbers]:
        assert _one(rank) == 1 - self.rank
        return [at + PEER]

    def _rank(self, _: Any) -> list[Numbers]:
        return [np.full(THREADS, self.rank)]

    def _permute(self, match: re.Match, word: Numbers) -> list[Numbers]:
        selector = int(match[1], 16)
        picked = [selector >> 4 * i & 7 for i in range(4)]
        return [sum((word >> 8 * b & 255 if b < 4 else 0) << 8 * i for i, b in enumerate(picked))]

    def _extract(self, match: re.Match, word: Numbers) -> list[Numbers]:
        return [word >> int(match[1]) & 255]

    def _multiply(self, match: re.Match, *operands: Numbers) -> list[Numbers]:
        found = operands[0] * int(match[1]) + (operands[1] if len(operands) > 1 else 0)
        return [found & 0xFFFFFFFF]

    def _scale(self, match: re.Match, number: Numbers) -> list[Numbers]:
        factor = np.array(int(match[1], 16), np.uint32).view(np.float32)
        return [(_floats(number) * factor).view(np.uint32).astype(np.int64)]

    def _round(self, _: Any, number: Numbers) -> list[Numbers]:
        assert (number & 0xFFFF == 0).all(), "not a bf16 number"
        return [(number >> 16) * 0x10001]

    def _multiply_pairs(self, _: Any, a: Numbers, b: Numbers) -> list[Numbers]:
        found = np.zeros(THREADS, np.int64)
        for shift in (0, 16):
            one, other = ((x >> shift & 0xFFFF) << 16 for x in (a, b))
            bits = (_floats(one) * _floats(other)).view(np.uint32).astype(np.int64)
            assert (bits & 0xFFFF == 0).all(), "an inexact product"
            found |= bits >> 16 << shift
        return [found]


_INSTRUCTIONS = (
    (r"cp\.async\.cg\S* \[\$0(?:\+(\d+))?\], \[\$1(?:\+(\d+))?\], 16, (none|\$2)", "_copy"),
    (r"cp\.async\.commit_group", "_commit"),
    (r"cp\.async\.wait_group (\d+)", "_finish"),
    (r"cp\.async\.wait_all", "_finish_all"),
    (r"cp\.async\.mbarrier\.arrive\.noinc", "_arrive_later"),
    (r"createpolicy", "_rank"),
    (r"ld\.global\.nc(?:\.v(\d))?\.b32 [^\[]*\[\$\d(?:\+(\d+))?\]", "_load"),
    (r"prefetch\.global\.L2 \[\$0(?:\+(\d+))?\]", "_prefetch"),
    (r"ld\.shared\.v4\.b32 [^\[]*\[\$4(?:\+(\d+))?\]", "_read"),
    (r"st\.shared\.v4\.b32 \[\$0\+(\d+)\]", "_store"),
    (r"st\.async\S* \[\$0\+(\d+)\]", "_store_at_peer"),
    (r"mapa\.", "_at_peer"),
    (r"%cluster_ctarank", "_rank"),
    (r"prmt\.b32 \$0, \$1, 0, (0x\d+)", "_permute"),
    (r"bfe\.u32 \$0, \$1, (\d+), 8", "_extract"),
    (r"(?:mul|mad)\.lo\.u32 \$0, \$1, (\d+)", "_multiply"),
    (r"mul\.f32 \$0, \$1, 0f([0-9A-F]+)", "_scale"),
    (r"cvt\.rn\.bf16x2\.f32 \$0, \$1, \$1", "_round"),
    (r"mul\.rn\.bf16x2", "_multiply_pairs"),
    (r"mbarrier\.try_wait", "_wait"),
    (r"mbarrier\.arrive\.expect_tx", "_nothing"),
    (r"mbarrier\.arrive", "_arrive"),
    (r"fence\.proxy\.async", "_nothing"),
)


def _one(numbers: Numbers) -> int:
    assert (numbers == numbers[0]).all(), "threads differ"
    return int(numbers[0])


def _signed(numbers: Numbers) -> Numbers:
    return np.where(numbers >= 1 << 31, numbers - (1 << 32), numbers)


def _floats(bits: Numbers) -> Numbers:
    return bits.astype(np.uint32).view(np.float32)


def _bytes(at: Numbers, count: int) -> Numbers:
    assert (at % count == 0).all(), f"an address that is no multiple of {count}"
    return at[:, None] + np.arange(count)


def _words(memory: Numbers, at: Numbers, count: int) -> list[Numbers]:
    words = memory[_bytes(at, 4 * count)].view(np.uint32).astype(np.int64)
    return list(words.T)
