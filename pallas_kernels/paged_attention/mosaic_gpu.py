"""Paged attention on Hopper GPUs: one warpgroup streams one request's rows of one key/value head.

A block reads its tiles of keys and values through a ring of TMA buffers and keeps a running
softmax in registers. Several blocks share a multiprocessor, and their loads together cover the
memory latency; the tensor cores work on 64 query rows, most of them padding, because reading
the cache costs more than the wasted products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import empty
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.paged_attention.packing import together

ROWS = 64
"""Query rows of a block: the height of one wgmma product."""

HEAD_DIMS = (64, 128)
"""Head widths the kernel knows: multiples of the 128-byte swizzle that registers can hold."""

_MATRIX = plgpu.Layout.WGMMA
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# Below any score, yet finite: the difference of two of them is 0 and not NaN.
_LOWEST = -1e30
# Blocks a launch should have before it stops splitting the keys: one for each multiprocessor.
_ENOUGH_BLOCKS = 132
# Key tiles that make a split worth its share of the final combination.
_LEAST_TILES = 4


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a block walks over the keys.

    Attributes:
        tile: keys of a tile; the rows of a page must be a multiple of it.
        stages: tiles of keys and of values in flight per block.
        splits: blocks that share one request and key/value head; None picks by the shape.
    """

    tile: int = 64
    stages: int = 3
    splits: int | None = None


DEFAULT = Tuning()


def unsupported(
    query: jax.Array | jax.ShapeDtypeStruct,
    keys: jax.Array | jax.ShapeDtypeStruct,
    values: jax.Array | jax.ShapeDtypeStruct,
    position: jax.Array | jax.ShapeDtypeStruct,
    table: jax.Array | jax.ShapeDtypeStruct | None = None,
    tuning: Tuning = DEFAULT,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    heads, head_dim = query.shape[-2:]
    kv_heads, page_size = keys.shape[1:3]
    nothing = empty(query=query, keys=keys, position=position, table=table)
    if nothing is not None:
        return nothing
    rows = position.shape[1] * heads // kv_heads
    for name, operand in (("query", query), ("keys", keys), ("values", values)):
        if operand.dtype != jnp.bfloat16:
            return f"the dtype of {name} is {operand.dtype}, wanted bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"head width E is {head_dim}, wanted one of {HEAD_DIMS}"
    if rows > ROWS:
        return f"query rows per key/value head W*H/N are {rows}, wanted at most {ROWS}"
    if page_size % tuning.tile:
        return f"rows of a page P are {page_size}, wanted a multiple of {tuning.tile}"
    return None


def split_count(blocks: int, capacity: int, tile: int) -> int:
    """Blocks that share one request and head, when there are ``blocks`` requests times heads.

    More than one only where the launch would leave most of the GPU idle, and never so many
    that a full cache gives each fewer than four tiles.
    """
    return max(1, min(_ENOUGH_BLOCKS // blocks, capacity // tile // _LEAST_TILES))


@lowered_once("tuning", "interpret")
def paged_attention(
    query: Float[Array, "A W H E"] | Float[Array, "T H E"],
    keys: Float[Array, "B N P E"],
    values: Float[Array, "B N P E"],
    position: Int[Array, "A W"],
    slots: Int[Array, "A"] | None,
    table: Int[Array, "S C"] | None = None,
    rows: Int[Array, "A W"] | None = None,
    *,
    tuning: Tuning = DEFAULT,
    interpret: Any = False,
) -> Float[Array, "A W H E"] | Float[Array, "T H E"]:
    """The operation of `api.paged_attention` for operands that `unsupported` passes.

    Not differentiable.

    Args:
        query: bf16 query rows.
        keys: bf16 cached keys.
        values: bf16 cached values.
        position: absolute position of each query row, -1 in padding rows.
        slots: cache slot of each request, or None for slot a of request a.
        table: pages of each slot, or None for page s of slot s.
        rows: where in ``query`` each query is, if they are packed.
        tuning: see `Tuning`.
        interpret: GPU interpreter parameters, to run the kernel on a CPU.
    """
    requests, width = position.shape
    heads = query.shape[-2]
    pages, kv_heads, page_size, _ = keys.shape
    slot_count, columns = (pages, 1) if table is None else table.shape
    capacity = columns * page_size
    group = heads // kv_heads
    limit = jnp.minimum(position, capacity - 1).astype(jnp.int32)
    if slots is not None:
        present = (slots >= 0) & (slots < slot_count)
        limit = jnp.where(present[:, None], limit, -1)
        slots = jnp.where(present, slots, 0).astype(jnp.int32)
    length = jnp.maximum(limit.max(axis=1) + 1, 0)
    row_limit = jnp.repeat(limit, group, axis=1)
    row_limit = jnp.pad(row_limit, ((0, 0), (0, ROWS - width * group)), constant_values=-1)

    splits = tuning.splits or split_count(requests * kv_heads, capacity, tuning.tile)
    lookups = {"slots": slots, "table": table, "rows": rows}
    results = _launch(
        query.reshape(-1, *query.shape[-2:]),
        keys,
        values,
        length,
        row_limit,
        width,
        {name: found for name, found in lookups.items() if found is not None},
        tuning,
        splits,
        interpret,
    )
    if splits == 1:
        return results[0].reshape(query.shape)
    partial, lse = results
    # by query: a row of a request is its W queries times the heads of a group
    lse = lse[..., : width * group].reshape(splits, requests, kv_heads, width, group)
    lse = lse.transpose(1, 3, 0, 2, 4).reshape(requests, width, splits, heads)
    lse = lse.reshape(-1, splits, heads) if rows is None else together(lse, rows, len(query))
    return _combine(partial, lse.swapaxes(0, 1)).astype(query.dtype).reshape(query.shape)


def _product(left: Any, right: Any) -> jax.Array:
    """fp32 product of two matrices in shared memory, on the tensor cores.

    The left one stays out of registers: with it there, results on an H200 were wrong as soon as a
    request had more than one tile (jax 0.11.2; the cause is not isolated).
    """

    def run(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def _interpreted_product(left: Any, right: Any) -> jax.Array:
    """`_product` for the interpreter, which has no wgmma on a transposed operand."""
    result = jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    # The tensor cores read through the asynchronous proxy, as the copy that refills the buffer
    # does; this plain read has to be ordered before it.
    plgpu.commit_smem()
    return result


def _combine(partial: Float[Array, "P T H E"], lse: Float[Array, "P T H"]) -> Float[Array, "T H E"]:
    """Joins the results of ``P`` splits of the keys, weighed by their sums of exponentials.

    ``lse`` holds base-2 logarithms; a split that saw no key has a very low one and result 0.
    """
    weight = jnp.exp2(lse - lse.max(axis=0))
    weight = weight / weight.sum(axis=0)
    return (partial * weight[..., None]).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Tiles of one cache on their way through a ring of shared-memory buffers.

    ``locate`` maps the block's ``step``-th tile to its index in the cache: page lookups go there.
    """

    cache: Any
    ring: Any
    ready: Any
    stages: int
    locate: Callable[[jax.Array], tuple[Any, ...]]

    def load(self, step: jax.Array) -> None:
        """Starts the copy of tile ``step``; its buffer must not be in use any more."""
        place = lax.rem(step, jnp.int32(self.stages))
        plgpu.copy_gmem_to_smem(
            self.cache.at[self.locate(step)], self.ring.at[place], self.ready.at[place]
        )

    def wait(self, step: jax.Array) -> Any:
        """The buffer of tile ``step``, once its copy has landed."""
        place = lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.ready.at[place])
        return self.ring.at[place]


def _across(per_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(per_row, shape, [0])


def _attend(
    query: Any,
    limit: jax.Array,
    keys: _Stream,
    values: _Stream,
    weights_tile: Any,
    *,
    first_key: jax.Array,
    end: jax.Array,
    count: jax.Array,
    tile: int,
    product: Callable[[Any, Any], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Running softmax of ``ROWS`` query rows over ``count`` tiles from ``first_key`` on.

    Row r sees the keys up to ``limit[r]``; cache rows from ``end`` on may hold anything.
    Returns the unnormalised output ``[ROWS, E]``, and per row the highest scaled score (base 2)
    and the sum of the weights.
    """
    head_dim = query.shape[1]
    log2_scale = math.log2(math.e) / math.sqrt(head_dim)

    def refill(stream: _Stream, step: jax.Array) -> None:
        @pl.when(step + stream.stages < count)
        def _():
            stream.load(step + stream.stages)

    def body(step, carry):
        out, top, total = carry
        start = first_key + step * tile

        scores = product(query, keys.wait(step).transpose((1, 0)))
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_MATRIX)
        scores = jnp.where(key <= _across(limit - start, scores.shape), scores, -jnp.inf)
        higher = jnp.maximum(top, scores.max(axis=1) * log2_scale)
        shrink = jnp.exp2(top - higher)
        weights = jnp.exp2(scores * log2_scale - _across(higher, scores.shape))
        total = total * shrink + weights.sum(axis=1)
        weights_tile[...] = weights.astype(jnp.bfloat16)
        # Publishes the weights, and with its barrier says that every warp is done with the keys.
        plgpu.commit_smem()
        refill(keys, step)

        tile_values = values.wait(step)

        # A weight of zero does not silence a NaN: rows past the end are zeroed themselves.
        @pl.when(start + tile > end)
        def _():
            value = plgpu.load(tile_values, layout=_MATRIX)
            row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_MATRIX)
            tile_values[...] = jnp.where(row < end - start, value, jnp.zeros_like(value))
            plgpu.commit_smem()

        out = out * _across(shrink, out.shape)
        out = out + product(weights_tile, tile_values)
        # Every warp is done with values and weights before either is overwritten.
        plgpu.commit_smem()
        refill(values, step)
        return out, higher, total

    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), _MATRIX),
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _PER_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _PER_ROW),
    )
    return lax.fori_loop(0, count, body, start)


def _launch(
    query: Float[Array, "T H E"],
    keys: Float[Array, "B N P E"],
    values: Float[Array, "B N P E"],
    length: Int[Array, "A"],
    row_limit: Int[Array, "A R"],
    width: int,
    lookups: dict[str, jax.Array],
    tuning: Tuning,
    splits: int,
    interpret: Any,
) -> list[jax.Array]:
    """One block per (request, key/value head, split): ``[out]``, or ``[partial, lse]`` if split.

    ``lookups`` are those of slots, page table and rows that are not the identity.
    """
    query_rows, heads, head_dim = query.shape
    requests = len(length)
    kv_heads, page_size = keys.shape[1:3]
    group = heads // kv_heads
    tile, stages = tuning.tile, tuning.stages
    product = _interpreted_product if interpret else _product

    ring = plgpu.SMEM((stages, tile, head_dim), jnp.bfloat16, transforms=_SWIZZLED)
    scratch = {
        "query_rows": plgpu.SMEM((ROWS, head_dim), jnp.bfloat16),
        "query_tile": plgpu.SMEM((ROWS, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        "weights_tile": plgpu.SMEM((ROWS, tile), jnp.bfloat16, transforms=_SWIZZLED),
        "query_ready": plgpu.Barrier(num_arrivals=width),
        "key_ring": ring,
        "key_ready": plgpu.Barrier(num_barriers=stages),
        "value_ring": ring,
        "value_ready": plgpu.Barrier(num_barriers=stages),
    }
    if splits == 1:
        out_type = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    else:
        out_type = [
            jax.ShapeDtypeStruct((splits, *query.shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, requests, kv_heads, ROWS), jnp.float32),
        ]
        scratch["partial_rows"] = plgpu.SMEM((ROWS, head_dim), jnp.float32)
        scratch["lse_rows"] = plgpu.SMEM((ROWS,), jnp.float32)

    def kernel(query_gmem, keys_gmem, values_gmem, length_gmem, limit_gmem, *rest, **smem):
        request, head = lax.axis_index("request"), lax.axis_index("head")
        split = lax.axis_index("split")
        given = dict(zip(lookups, rest, strict=False))
        outputs = rest[len(lookups) :]
        cache_slot = given["slots"][request] if "slots" in given else request
        end = length_gmem[request]

        tiles = pl.cdiv(end, jnp.int32(tile))
        share = pl.cdiv(tiles, jnp.int32(splits))
        first = split * share
        count = jnp.clip(tiles - first, 0, share)

        def locate(step):
            row = (first + step) * tile
            if "table" not in given:
                return cache_slot, head, pl.ds(row, tile)
            page = given["table"][cache_slot, row // page_size]
            return page, head, pl.ds(row % page_size, tile)

        key_tiles = _Stream(keys_gmem, smem["key_ring"], smem["key_ready"], stages, locate)
        value_tiles = _Stream(values_gmem, smem["value_ring"], smem["value_ready"], stages, locate)

        places = [given["rows"][request, w] if "rows" in given else None for w in range(width)]

        def heads_of(row):
            return row, pl.ds(head * group, group)

        def rows_of(w):
            return pl.ds(w * group, group)

        staged, ready = smem["query_rows"], smem["query_ready"]
        for w, place in enumerate(places):
            # an absent query shows the last one: its limit is -1
            row = request * width + w if place is None else jnp.minimum(place, query_rows - 1)
            plgpu.copy_gmem_to_smem(query_gmem.at[heads_of(row)], staged.at[rows_of(w)], ready)
        for step in range(stages):

            @pl.when(step < count)
            def _(step=step):
                key_tiles.load(jnp.int32(step))
                value_tiles.load(jnp.int32(step))

        limit = plgpu.load(limit_gmem.at[request], layout=_PER_ROW, optimized=False)
        plgpu.barrier_wait(ready)
        # Rows past W*H/N were never written: rows do not mix, and nobody reads their results.
        smem["query_tile"][...] = plgpu.load(staged, layout=_MATRIX, optimized=False)
        plgpu.commit_smem()
        out, top, total = _attend(
            smem["query_tile"],
            limit,
            key_tiles,
            value_tiles,
            smem["weights_tile"],
            first_key=first * tile,
            end=end,
            count=count,
            tile=tile,
            product=product,
        )
        total = jnp.where(total > 0, total, 1.0)
        out = out * _across(1.0 / total, out.shape)
        if splits == 1:
            target = outputs[0]
            staged[...] = out.astype(query.dtype)
            plgpu.commit_smem()
        else:
            target, staged = outputs[0].at[split], smem["partial_rows"]
            staged[...] = out
            smem["lse_rows"][...] = top + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["lse_rows"], outputs[1].at[split, request, head])
        for w, place in enumerate(places):

            def write(w=w, row=request * width + w if place is None else place):
                plgpu.copy_smem_to_gmem(staged.at[rows_of(w)], target.at[heads_of(row)])

            if place is None:
                write()
            else:
                pl.when(place < query_rows)(write)
        plgpu.wait_smem_to_gmem(0)

    operands = [query, keys, values, length, row_limit, *lookups.values()]
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(requests, kv_heads, splits),
        grid_names=("request", "head", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="paged_attention",
    )(*operands)
