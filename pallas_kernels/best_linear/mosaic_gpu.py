"""The best output of a linear layer on Hopper GPUs: logits live and die in registers.

A block takes tiles of rows by vocabulary columns, one after another. Its third warpgroup copies
both operands by TMA, 64 numbers of the inner dimension at a time, through a ring of buffers; the
first two multiply, reduce their part of a finished tile to one (logit, id) a row, and write that.
While one of them reduces, the other one multiplies. A small XLA reduction joins the parts.

Tiles go rows first: those that are computed at the same time read the same few matrix rows, which
come from memory once, and inputs that stay in the L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.lowered_once import lowered_once

INNER = 64
"""Numbers of the inner dimension in a buffer: the 128 bytes of a swizzled row."""

_HEIGHT = 64  # rows of a wgmma product
_CHUNK = 16  # columns that are compared side by side
_COMPUTING = 2  # warpgroups
_BLOCKS = 132  # one for each multiprocessor
_SHARED_BYTES = 200 * 2**10  # for the ring
_COLUMNS = (128, 192, 256)
# What a tile costs beside its columns, in columns: its rows' copies and its reduction.
_TILE_COST = 32
# Registers of a thread that computes and of one that copies.
_REGISTERS = (232, 40)
# A copy begins at a multiple of these, also that of a last tile which V does not fill.
_SWIZZLED_ROWS = 8
_SWIZZLED = (
    plgpu.TilingTransform((_SWIZZLED_ROWS, INNER)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_MATRIX = plgpu.Layout.WGMMA

LowRank = tuple[Float[Array, "T R"], Float[Array, "V R"]]
Operand = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut.

    Attributes:
        rows: of a tile: 128, which the two computing warpgroups share, or 64, whose columns they
            share.
        columns: of a tile: outputs.
        stages: buffers of the ring.
        blocks: that share the tiles.
    """

    rows: int
    columns: int
    stages: int
    blocks: int = _BLOCKS

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a warpgroup's part of a tile."""
        return _HEIGHT, self.columns if self.rows > _HEIGHT else self.columns // _COMPUTING


def tuning_of(rows: int, outputs: int) -> Tuning:
    """The cut for T ``rows`` and V ``outputs`` whose slowest block ends first."""
    height = _HEIGHT if rows <= _HEIGHT else _COMPUTING * _HEIGHT

    def cost(columns: int) -> int:
        turns = -(-_tiles(rows, height) * _tiles(outputs, columns) // _BLOCKS)
        return turns * (columns + _TILE_COST)

    columns = min(reversed(_COLUMNS), key=cost)
    return Tuning(height, columns, _SHARED_BYTES // ((height + columns) * INNER * 2))


def unsupported(
    x: Operand, weight: Operand, low_rank: tuple[Operand, Operand] | None = None
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    operands = {"x": x, "weight": weight}
    if low_rank is not None:
        operands |= dict(zip(("y", "weight2"), low_rank, strict=True))
    for name, operand in operands.items():
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
        if operand.shape[1] == 0 or operand.shape[1] % INNER:
            return f"{name} has {operand.shape[1]} columns, wanted a multiple of {INNER}"
    if x.shape[0] == 0:
        return "x has 0 rows, wanted at least 1"
    outputs = weight.shape[0]
    if outputs < max(_COLUMNS) or outputs % _SWIZZLED_ROWS:
        return (
            f"weight has {outputs} rows, wanted a multiple of {_SWIZZLED_ROWS}, "
            f"at least {max(_COLUMNS)}"
        )
    return None


@lowered_once("tuning", "interpret")
def best_linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "V I"],
    low_rank: LowRank | None = None,
    *,
    tuning: Tuning | None = None,
    interpret: Any = False,
) -> tuple[Int[Array, "T"], Float[Array, "T"]]:
    """The operation of `api.best_linear` for operands that `unsupported` passes.

    Not differentiable.

    Args:
        x: bf16 input rows.
        weight: bf16 matrix.
        low_rank: bf16 rows and matrix of a second product that is added, or None.
        tuning: see `Tuning`; None picks by the shape.
        interpret: GPU interpreter parameters, to run the kernel on a CPU.
    """
    rows = x.shape[0]
    tuning = tuning or tuning_of(rows, weight.shape[0])
    products = [(x, weight)] if low_rank is None else [(x, weight), low_rank]
    padding = (0, -rows % tuning.rows), (0, 0)
    operands = [operand for left, right in products for operand in (jnp.pad(left, padding), right)]
    logits, ids = _launch(operands, tuning, interpret)
    token, logit = _join(ids, logits)
    # rows of NaN have no best token, but still one that exists
    return jnp.minimum(token, len(weight) - 1)[:rows], logit[:rows]


def _join(
    ids: Int[Array, "P T"], logits: Float[Array, "P T"]
) -> tuple[Int[Array, "T"], Float[Array, "T"]]:
    """The best of P parts, the lowest id among equals."""

    def better(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        keep = (one[1] > other[1]) | ((one[1] == other[1]) & (one[0] < other[0]))
        return jnp.where(keep, one[0], other[0]), jnp.where(keep, one[1], other[1])

    none = jnp.int32(jnp.iinfo(jnp.int32).max), jnp.float32(-jnp.inf)
    return lax.reduce((ids, logits), none, better, (0,))


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _launch(operands: list[jax.Array], tuning: Tuning, interpret: Any) -> list[jax.Array]:
    """Best logit and its id of every part and row, ``[P, T]`` each.

    ``operands`` are the left and the right one of each product, T a multiple of ``tuning.rows``.
    """
    rows, outputs = len(operands[0]), len(operands[1])
    row_tiles, column_tiles = rows // tuning.rows, _tiles(outputs, tuning.columns)
    blocks = min(tuning.blocks, row_tiles * column_tiles)
    height, width = tuning.part
    beside = tuning.columns // width
    parts = (column_tiles * beside, rows)
    steps = sum(left.shape[1] for left in operands[::2]) // INNER
    multiply = _interpreted_product if interpret else _product

    def kernel(*refs: Any, left: Any, right: Any, ready: Any, free: Any, best: Any, name: Any):
        pairs = list(zip(refs[:-2:2], refs[1:-2:2], strict=True))
        logits, ids = refs[-2:]
        ring = _Ring(left, right, ready, free, tuning.stages)
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(row_tiles * column_tiles - block + (blocks - 1), jnp.int32(blocks))

        def place(turn):
            number = block + turn * blocks
            return lax.rem(number, jnp.int32(row_tiles)), lax.div(number, jnp.int32(row_tiles))

        def begin(column):
            # The last tile begins earlier where columns do not fill it: some are seen twice.
            return jnp.minimum(column * tuning.columns, outputs - tuning.columns)

        @pl.when(warpgroup < _COMPUTING)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            own_row, own_column = (0, warpgroup) if beside > 1 else (warpgroup, 0)

            def wait(step):
                return ring.wait(step, own_row * height, own_column * width, tuning.part)

            def tile(turn, carry):
                row, column = place(turn)
                logit, at = _best_of(multiply(wait, ring.release, turn * steps, steps, tuning.part))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                best[warpgroup] = logit
                name[warpgroup] = at + (begin(column) + own_column * width)
                plgpu.commit_smem()
                target = (
                    column * beside + own_column,
                    pl.ds(row * tuning.rows + own_row * height, height),
                )
                plgpu.copy_smem_to_gmem(best.at[warpgroup], logits.at[target])
                plgpu.copy_smem_to_gmem(name.at[warpgroup], ids.at[target])
                return carry

            lax.fori_loop(0, count, tile, 0)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _COMPUTING)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")

            def tile(turn, step):
                row, column = place(turn)
                for lefts, rights in pairs:

                    def copy(inner, step, lefts=lefts, rights=rights):
                        columns = pl.ds(inner * INNER, INNER)
                        ring.fill(
                            step,
                            lefts.at[pl.ds(row * tuning.rows, tuning.rows), columns],
                            rights.at[pl.ds(begin(column), tuning.columns), columns],
                        )
                        return step + 1

                    step = lax.fori_loop(0, lefts.shape[1] // INNER, copy, step)
                return step

            lax.fori_loop(0, count, tile, jnp.int32(0))
            ring.drain(count * steps)

    def buffers(size: int) -> Any:
        return plgpu.SMEM((tuning.stages, size, INNER), jnp.bfloat16, transforms=_SWIZZLED)

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
        ],
        scratch_types={
            "left": buffers(tuning.rows),
            "right": buffers(tuning.columns),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.stages),
            "free": plgpu.Barrier(num_arrivals=_COMPUTING, num_barriers=tuning.stages),
            "best": plgpu.SMEM((_COMPUTING, height), jnp.float32),
            "name": plgpu.SMEM((_COMPUTING, height), jnp.int32),
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
        kernel_name="best_linear",
    )(*operands)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Buffers that pass 64 inner columns of both operands from the producer to the consumers.

    ``step`` counts them over all tiles of a block.
    """

    left: Any
    right: Any
    ready: Any
    free: Any
    stages: int

    def fill(self, step: jax.Array, left: Any, right: Any) -> None:
        """Starts the copies of ``step`` once its buffer has been read."""
        place = self._place(step)

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.free.at[place])

        plgpu.copy_gmem_to_smem(left, self.left.at[place], self.ready.at[place])
        plgpu.copy_gmem_to_smem(right, self.right.at[place], self.ready.at[place])

    def drain(self, steps: jax.Array) -> None:
        """Waits until the buffers of all ``steps`` have been read."""
        for place in range(self.stages):

            @pl.when(place < steps)
            def _(place=place):
                plgpu.barrier_wait(self.free.at[place])

    def wait(self, step: jax.Array, row: Any, column: Any, part: tuple[int, int]) -> Any:
        """Both operands of a warpgroup's ``part`` that begins there, once they have landed."""
        place = self._place(step)
        plgpu.barrier_wait(self.ready.at[place])
        left = self.left.at[place, pl.ds(row, part[0])]
        return left, self.right.at[place, pl.ds(column, part[1])].transpose((1, 0))

    def release(self, step: jax.Array) -> None:
        """Says that the calling warpgroup has read the buffer of ``step`` for the last time."""
        plgpu.barrier_arrive(self.free.at[self._place(step)])

    def _place(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))


Wait = Callable[[jax.Array], tuple[Any, Any]]
Release = Callable[[jax.Array], None]


def _product(
    wait: Wait, release: Release, first: jax.Array, steps: int, shape: tuple[int, int]
) -> jax.Array:
    """fp32 sum of the products of ``steps`` pairs of buffers, on the tensor cores.

    One product is under way while the next one's operands are waited for.
    """

    def run(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, *wait(first))

        def body(step, carry):
            plgpu.wgmma(accumulator, *wait(step))
            plgpu.wgmma_wait(1)
            release(step - 1)
            return carry

        lax.fori_loop(first + 1, first + steps, body, 0)
        products = accumulator[...]
        release(first + (steps - 1))
        return products

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _interpreted_product(
    wait: Wait, release: Release, first: jax.Array, steps: int, shape: tuple[int, int]
) -> jax.Array:
    """`_product` for the interpreter, which has no wgmma on a transposed operand."""

    def body(step, products):
        left, right = wait(step)
        products += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
        # The tensor cores read through the asynchronous proxy, as the copy that refills the buffer
        # does; this plain read has to be ordered before it.
        plgpu.commit_smem()
        release(step)
        return products

    return lax.fori_loop(first, first + steps, body, jnp.zeros(shape, jnp.float32))


def _best_of(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per row the highest logit and its column, the lowest among equals.

    A thread holds the same few columns of every chunk: it compares chunk by chunk, with the
    chunk's number as the id, and columns are compared only once, at the end.
    """
    best = logits[:, :_CHUNK]
    chunk = jnp.zeros(best.shape, jnp.int32)
    for number in range(1, logits.shape[1] // _CHUNK):
        piece = logits[:, _CHUNK * number : _CHUNK * (number + 1)]
        better = piece > best
        best = jnp.where(better, piece, best)
        chunk = jnp.where(better, number, chunk)
    column = plgpu.broadcasted_iota(jnp.int32, best.shape, 1, layout=_MATRIX)
    top = best.max(axis=1)
    reached = best == lax.broadcast_in_dim(top, best.shape, [0])
    at = jnp.where(reached, chunk * _CHUNK + column, jnp.iinfo(jnp.int32).max // 2)
    return top, at.min(axis=1)
