"""Producers of sparse MLA's key tiles, their inline MLIR run on NumPy: every tile gets its rows."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_quant import V3_2, V4, Layout, empty_pages, read, write
from pallas_kernels.sparse_mla import hopper_copy, hopper_dequantise, hopper_ring
from pallas_kernels.sparse_mla.hopper_copy import Lists
from pallas_kernels.sparse_mla.tiling import KEYS, tile_start
from tests.pallas_kernels.inline_mlir import Machine, Ref, Tape

PAGE = 12
PAGES = (7, 9)
ENTRIES = (200, 100)  # four tiles and two, neither list a whole number of them
SHARED_MEMORY = 1 << 18
KEYS_AT = 1024
SLOTS = 4


@dataclasses.dataclass
class Pools:
    """Two pools in one memory after a list at 0, and their rows as bf16 bits."""

    memory: np.ndarray
    addresses: list[int]
    shapes: list[tuple[int, ...]]
    rows: list[np.ndarray]
    listed: np.ndarray
    starts: tuple[int, int]
    tiles: tuple[int, int]

    def wanted(self, tile: int) -> np.ndarray:
        """Bits of the 64 rows of a tile of the token, zeros for none."""
        start = int(tile_start(tile, self.tiles, self.starts))
        which = int(tile >= self.tiles[0])
        ids = self.listed[start : start + KEYS]
        return np.where(ids[:, None] >= 0, self.rows[which][ids], 0)


def pools_of(layout: Layout | None) -> Pools:
    rng = np.random.default_rng(0)
    width = layout.width if layout else 512
    tiles = tuple(-(-entries // KEYS) for entries in ENTRIES)
    listed = np.full((sum(tiles) + 1) * KEYS, -1, np.int32)
    begin, parts, rows = 0, [listed.view(np.uint8)], []
    addresses, shapes = [], []
    for pages, entries, of_list in zip(PAGES, ENTRIES, tiles, strict=True):
        count = pages * PAGE
        listed[begin : begin + entries] = rng.integers(-1, count, entries)
        begin += of_list * KEYS
        size = np.repeat(2.0 ** rng.integers(-6, 3, (count, width // 64)), 64, axis=1)
        numbers = jnp.asarray(rng.standard_normal((count, width)) * size, jnp.bfloat16)
        pool = numbers
        if layout:
            pool = jax.jit(write, static_argnums=(3, 4))(
                empty_pages(pages, PAGE, layout), jnp.arange(count), numbers, layout, PAGE
            )
            numbers = jax.jit(read, static_argnums=(2, 3))(pool, jnp.arange(count), layout, PAGE)
        pool = np.asarray(pool)
        shapes.append(pool.reshape(-1, pool.shape[-1]).shape)
        addresses.append(-(-sum(map(len, parts)) // 256) * 256)
        parts.append(np.zeros(addresses[-1] - sum(map(len, parts)), np.uint8))
        parts.append(pool.view(np.uint8).reshape(-1))
        rows.append(np.asarray(numbers).view(np.uint16))
    starts = tiles[0] * KEYS, sum(tiles) * KEYS
    return Pools(np.concatenate(parts), addresses, shapes, rows, listed, starts, tiles)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """In the place of MLIR, wherever the producers use it."""
    tape = Tape()
    for name in ("bytes", "cluster", "copy", "dequantise", "ptx", "ring"):
        module = importlib.import_module(f"pallas_kernels.sparse_mla.hopper_{name}")
        for part in ("arith", "ir", "llvm", "mlir", "nvvm", "scf"):
            if hasattr(module, part):
                monkeypatch.setattr(module, part, getattr(tape, part))
    return tape


@pytest.mark.parametrize(
    ("producer", "layout", "shared"),
    [
        (hopper_copy, None, False),
        (hopper_dequantise, V3_2, True),
        (hopper_dequantise, V3_2, False),
        (hopper_dequantise, V4, True),
        (hopper_ring, V4, False),
    ],
)
@pytest.mark.parametrize(("first", "pairs"), [(0, 4), (1, 2), (2, 0)])
def test_tiles_get_the_rows_that_are_listed(tape, producer, layout, shared, first, pairs):
    pools = pools_of(layout)
    width = pools.rows[0].shape[1]
    words_at = KEYS_AT + 2 * KEYS * width * 2
    memories = [np.full(SHARED_MEMORY, 0xAA, np.uint8) for _ in range(2)]
    for rank in range(1 + shared):
        own, peer = memories[rank], memories[1 - rank]
        machine = Machine(pools.memory, own, peer, rank)
        waited, filled = [0] * SLOTS, [0] * SLOTS

        def on_wait(at, parity, waited=waited, filled=filled):
            slot = (at - words_at) // 8 - SLOTS
            assert parity == 1 - waited[slot] % 2
            assert waited[slot] == filled[slot]
            waited[slot] += 1

        def on_arrival(at, waited=waited, filled=filled, rank=rank, own=own, peer=peer):
            slot = (at - words_at) // 8
            assert waited[slot] > filled[slot], "a slot is filled before it is free"
            tile, half = divmod(slot, 2)
            wanted = pools.wanted(2 * (first + filled[slot]) + tile)
            filled[slot] += 1
            rows = slice(32 * rank, 32 * rank + 32) if shared else slice(0, KEYS)
            columns = slice(256 * half, 256 if half == 0 else width)
            for memory in (own, peer)[: 1 + shared]:
                tile_at = KEYS_AT + tile * KEYS * width * 2
                found = memory[tile_at:][: KEYS * width * 2]
                keys = unswizzled(found.view(np.uint16), width)
                assert_same(keys[rows, columns], wanted[rows, columns])
                keys[rows, columns] = 0xAAAA  # read, and to be filled anew
                found[:] = swizzled(keys).view(np.uint8)

        machine.on_wait, machine.on_arrival = on_wait, on_arrival
        tape.blocks[0].clear()
        lists = Lists(Ref(0), pools.starts, *(tape.constant("i32", n) for n in pools.tiles))
        refs = [Ref(at, shape) for at, shape in zip(pools.addresses, pools.shapes, strict=True)]
        operands = [lists, refs, Ref(KEYS_AT), Ref(words_at)]
        if producer is hopper_ring:
            operands.append(Ref(words_at + 1024))
        operands += [tape.constant("i32", number) for number in (first, pairs)]
        options = {} if layout is None else {"layout": layout, "page_sizes": (PAGE, PAGE)}
        if layout is not None:
            options |= {} if producer is hopper_ring else {"shared": shared}
        producer.run(*operands, **options)
        machine.run(tape.blocks[0])
        assert filled == [pairs] * SLOTS


def unswizzled(tile: np.ndarray, width: int) -> np.ndarray:
    """``[64, width]`` of boxes of 8 rows and 64 columns, whose 16-byte columns are permuted."""
    boxes = tile.reshape(KEYS // 8, width // 64, 8, 8, 8)
    row = np.arange(8)[:, None]
    return boxes[:, :, row, row ^ np.arange(8)].transpose(0, 2, 1, 3, 4).reshape(KEYS, width)


def swizzled(keys: np.ndarray) -> np.ndarray:
    boxes = keys.reshape(KEYS // 8, 8, -1, 8, 8).transpose(0, 2, 1, 3, 4)
    row = np.arange(8)[:, None]
    return boxes[:, :, row, row ^ np.arange(8)].reshape(-1)


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same bits, but that a zero may have either sign."""
    both_zero = (found | wanted) & 0x7FFF == 0
    assert ((found == wanted) | both_zero).all()
