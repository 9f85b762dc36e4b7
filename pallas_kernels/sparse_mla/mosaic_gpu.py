"""Sparse MLA on Hopper GPUs: one block attends with 64 heads of one token.

Three warpgroups. The third copies the listed rows, a pair of 64-key tiles at a time. The first
two compute the scores and softmax of one tile each, then add both tiles to their own 256 of the
512 value columns, because 64 x 512 sums in fp32 would fill the registers of one warpgroup. They
trade weights and running maxima through shared memory, tile 0 before tile 1.

Why nothing is overwritten too early: warpgroup c owns half c of both tiles, and frees a half
once it has weighed it, which needs the weights of that tile, hence its finished scores. Scores
wait for both halves of a refilled tile, so weights and maxima of a tile, published after its
scores, replace those that the other warpgroup has used already.

With 128 heads and keys that are bytes, two blocks of a cluster attend with 2 x 64 heads of a token,
and each dequantises half of its keys for both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_quant import V4
from pallas_kernels.sparse_mla import hopper_tiles, interpreted_tiles
from pallas_kernels.sparse_mla.hopper_cluster import BLOCKS
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.tiling import KEYS, Source, layout, tile_start

HEADS = 64
"""Heads of a block: the height of one wgmma product."""

WIDTHS = (512, 576)
"""Key widths that fit shared memory with two tiles and whose values are 512 wide."""

VALUE_WIDTH = 512
_BOXES = VALUE_WIDTH // 64

_MATRIX = plgpu.Layout.WGMMA
_PER_HEAD = plgpu.Layout.WGMMA.reduce(1)
_PER_KEY = plgpu.Layout.WGMMA.reduce(0)
_SWIZZLED = hopper_tiles.SWIZZLED
# Registers of a thread that computes and of one that copies: 65536 in all, and hardly a spill.
_REGISTERS = {"numbers": (232, 40), "bytes": (216, 72)}
_LOG2_E = math.log2(math.e)
# Below any score, yet finite: the difference of two of them is 0 and not NaN.
_LOWEST = -1e30
# Blocks a launch should have before it stops splitting the keys: one for each multiprocessor.
_ENOUGH_BLOCKS = 132


def unsupported(
    query: jax.Array | jax.ShapeDtypeStruct,
    selections: Sequence[Selection],
    value_width: int,
) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    tokens, heads, width = query.shape
    if query.dtype != jnp.bfloat16:
        return f"the dtype of query is {query.dtype}, wanted bfloat16"
    if len({selection.layout for selection in selections}) > 1:
        return "one pool holds bytes and the other numbers, wanted the same of both"
    for selection in selections:
        stride = selection.pool.shape[1]
        if selection.layout is V4 and stride % 16:
            return f"pages have {stride} bytes, wanted a multiple of 16"
    if tokens == 0:
        return "query has 0 tokens, wanted at least 1"
    if heads == 0 or heads % HEADS:
        return f"H is {heads}, wanted a multiple of {HEADS}"
    if width not in WIDTHS:
        return f"W is {width}, wanted one of {WIDTHS}"
    if value_width != VALUE_WIDTH:
        return f"value_width is {value_width}, wanted {VALUE_WIDTH}"
    return None


def split_count(blocks: int, tiles: int) -> int:
    """Blocks that share the keys of one token and 64 heads, when ``blocks`` would do without.

    More than one only where the launch would leave multiprocessors idle, and never so many that
    full lists give any less than a pair of tiles.
    """
    return max(1, min(_ENOUGH_BLOCKS // blocks, -(-tiles // 2)))


@functools.partial(
    jax.jit,
    static_argnames=("sm_scale", "value_width", "splits", "share_keys", "ring", "interpret"),
)
def sparse_mla(
    query: Float[Array, "T H W"],
    selections: Sequence[Selection],
    sinks: Float[Array, "H"] | None,
    sm_scale: float,
    value_width: int = VALUE_WIDTH,
    *,
    splits: int | None = None,
    share_keys: bool | None = None,
    ring: bool | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """The operation of `reference.sparse_mla` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once. Not differentiable.

    Args:
        query: bf16 query rows.
        selections: one or two, both of bf16 pools or both of the same bytes.
        sinks: logits of keys without values.
        sm_scale: factor of the scores.
        value_width: 512.
        splits: blocks that share the keys of one token and 64 heads; None picks by the shape.
        share_keys: whether two blocks of 64 heads each dequantise half of the keys for both, if
            keys are bytes; wants H a multiple of 128. None does wherever that can be.
        ring: whether bytes wait in shared memory to be converted, and not in registers; wants the
            layout of V4, beside whose tiles there is room, and keys that are not shared. None does
            wherever that can be.
        interpret: GPU interpreter parameters, to run the kernel on a CPU.

    Raises:
        ValueError: heads do not fill the blocks, two by two with ``share_keys``; or there can be
            no ``ring``.
    """
    del value_width
    tokens, heads, _ = query.shape
    byte_layout = selections[0].layout
    if share_keys is None:
        share_keys = byte_layout is not None and heads % (BLOCKS * HEADS) == 0
    members = BLOCKS if share_keys else 1
    if heads % (members * HEADS):
        raise ValueError(
            f"H is {heads}, wanted a multiple of {members * HEADS} with share_keys={share_keys}"
        )
    may_ring = byte_layout is V4 and not share_keys
    if ring and not may_ring:
        raise ValueError("ring is True, wanted False if keys are shared or not in V4's bytes")
    ring = may_ring if ring is None else ring
    rows, tiles, starts = layout(selections)
    pools = tuple(s.pool.reshape(-1, s.pool.shape[-1]) for s in selections)
    splits = splits or split_count(tokens * heads // HEADS, rows.shape[1] // KEYS - 1)
    source = Source(
        starts,
        byte_layout,
        tuple(s.stride for s in selections),
        shared=share_keys and byte_layout is not None,
        ring=ring,
    )
    launch = _Launch(sm_scale * _LOG2_E, splits, members, source, interpret)
    sinks = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32) * _LOG2_E
    out, lse = launch(query, pools, rows, tiles, sinks)
    return (out, lse) if splits == 1 else _combine(out, lse, sinks, query.dtype)


def _combine(
    partial: Float[Array, "P T H V"],
    lse: Float[Array, "P T H"],
    sinks: Float[Array, "H"],
    dtype: Any,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Joins the results of P splits of the keys, weighed by their sums of exponentials.

    ``lse`` and ``sinks`` are base-2 logarithms; a split that saw no key has `_LOWEST` and result 0.
    """
    top = lse.max(axis=0)
    weight = jnp.exp2(lse - top)
    total = weight.sum(axis=0)
    empty = top <= _LOWEST
    scale = jnp.where(empty, 0, weight / (total + jnp.exp2(sinks - top)))
    out = (partial * scale[..., None]).sum(axis=0)
    return out.astype(dtype), jnp.where(empty, jnp.inf, (top + jnp.log2(total)) / _LOG2_E)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A call of the kernel.

    Attributes:
        log2_scale: factor that makes scores base-2 logarithms of weights.
        splits: blocks that share the keys of one token and 64 heads.
        members: blocks of a cluster, each with 64 heads of one token.
        source: where the keys come from.
        interpret: GPU interpreter parameters, or False.
    """

    log2_scale: float
    splits: int
    members: int
    source: Source
    interpret: Any

    def __call__(
        self,
        query: Float[Array, "T H W"],
        pools: tuple[jax.Array, ...],
        rows: Int[Array, "T C"],
        tiles: Int[Array, "T 2"],
        sinks: Float[Array, "H"],
    ) -> Sequence[jax.Array]:
        """``[out, lse]``; of several splits fp32 results and base-2 lse of each, without sinks.

        ``sinks`` are base-2 logarithms.
        """
        tokens, heads, width = query.shape
        results = [(tokens, heads, VALUE_WIDTH), (tokens, heads)]
        dtypes = (query.dtype if self.splits == 1 else jnp.float32, jnp.float32)
        if self.splits > 1:
            results = [(self.splits, *shape) for shape in results]
        cluster = {}
        if self.members > 1:
            cluster = {"cluster": (self.members,), "cluster_names": ("member",)}
        kind = interpreted_tiles if self.interpret else hopper_tiles

        def kernel(*refs: Any) -> None:
            def body(query_boxes, keys, weights, stats, *barriers):
                shared = _Shared(query_boxes, weights, stats, *barriers[:4])
                self._block(refs, shared, kind.Tiles(keys, self.source, *barriers[4:]))

            pl.run_scoped(
                body,
                plgpu.SMEM((_BOXES, HEADS, 64), jnp.bfloat16, transforms=_SWIZZLED),
                plgpu.SMEM((2, KEYS, width), jnp.bfloat16, transforms=_SWIZZLED),
                plgpu.SMEM((2, HEADS, KEYS), jnp.bfloat16, transforms=_SWIZZLED),
                plgpu.SMEM((4, HEADS), jnp.float32),
                plgpu.Barrier(num_arrivals=_BOXES),
                plgpu.Barrier(num_barriers=2),
                plgpu.Barrier(num_arrivals=2),
                plgpu.Barrier(num_arrivals=3),
                *kind.scratch(self.source),
                collective_axes="warpgroup",
            )

        return plgpu.kernel(
            kernel,
            out_type=[
                jax.ShapeDtypeStruct(shape, dtype)
                for shape, dtype in zip(results, dtypes, strict=True)
            ],
            grid=(tokens * (heads // HEADS // self.members) * self.splits,),
            grid_names=("block",),
            **cluster,
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
            interpret=self.interpret,
            kernel_name="sparse_mla",
        )(query, rows, tiles, sinks, *pools)

    def _block(self, refs: tuple[Any, ...], shared: _Shared, tiles: Any) -> None:
        query, rows, counts, sinks, *pools, out, lse = refs
        compute, copy = _REGISTERS["numbers" if self.source.layout is None else "bytes"]
        warpgroup = lax.axis_index("warpgroup")
        block, split = _divide(lax.axis_index("block"), self.splits)
        token, head_block = _divide(block, query.shape[1] // HEADS // self.members)
        if self.members > 1:
            head_block = head_block * self.members + lax.axis_index("member")
        heads = pl.ds(pl.multiple_of(head_block * HEADS, HEADS), HEADS)

        parts = counts[token, 0], counts[token, 1]
        pairs = _divide(parts[0] + parts[1] + 1, 2)[0]
        share = _divide(pairs + (self.splits - 1), self.splits)[0]
        first = split * share
        pairs = jnp.clip(pairs - first, 0, share)

        @pl.when(warpgroup == 0)
        def _():
            tiles.initialise()

        plgpu.barrier_arrive(shared.everyone)
        plgpu.barrier_wait(shared.everyone)
        tiles.meet_peer()

        for me in (0, 1):

            @pl.when(warpgroup == me)
            def _(me=me):
                plgpu.set_max_registers(compute, action="increase")
                half = _Half(me, self.log2_scale, shared, tiles)

                def listed(step):
                    start = tile_start(2 * (first + step) + me, parts, self.source.starts)
                    entries = rows.at[token, pl.ds(pl.multiple_of(start, KEYS), KEYS)]
                    return plgpu.load(entries, layout=_PER_KEY, optimized=False)

                state = half.attend(query.at[token, heads], listed, pairs)
                if self.splits == 1:
                    sink = plgpu.load(sinks.at[heads], layout=_PER_HEAD, optimized=False)
                    half.store(state, sink, out.at[token, heads], lse.at[token, heads])
                else:
                    place = split, token, heads
                    half.store_partial(state, out.at[place], lse.at[place])

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(copy, action="decrease")
            tiles.fill(rows.at[token], tuple(pools), first, pairs, parts)

        tiles.meet_peer()


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory of a block besides its keys.

    Attributes:
        boxes: columns 0-511 of the queries in boxes of 64; the result on its way out.
        weights: of both tiles.
        stats: rows 0 and 1: running maxima after each tile; 2 and 3: sums of each warpgroup.
        queries_ready: that ``boxes`` are filled.
        weights_ready: per tile, that its weights and maxima are there.
        both: both computing warpgroups are done.
        everyone: all three have begun.
    """

    boxes: Any
    weights: Any
    stats: Any
    queries_ready: Any
    weights_ready: Any
    both: Any
    everyone: Any


State = tuple[jax.Array, jax.Array, jax.Array]
"""Sums over value columns, per head the running maximum (base 2) and the sum of weights."""


@dataclasses.dataclass(frozen=True)
class _Half:
    """A computing warpgroup: scores of tile ``me`` of each pair, and half ``me`` of the values."""

    me: int
    log2_scale: float
    shared: _Shared
    tiles: Any

    def attend(self, query: Any, listed: Callable[[jax.Array], jax.Array], pairs: Any) -> State:
        """Running softmax over ``pairs`` pairs of tiles; ``listed`` gives the rows of its tile."""
        boxes, ready = self.shared.boxes, self.shared.queries_ready
        if self.me == 0:
            for box in range(_BOXES):
                plgpu.copy_gmem_to_smem(query.at[:, pl.ds(64 * box, 64)], boxes.at[box], ready)
        tail = None
        if query.shape[1] > VALUE_WIDTH:
            columns = query.at[:, pl.ds(VALUE_WIDTH, 64)]
            tail = plgpu.load(columns, layout=_MATRIX, optimized=False)
        plgpu.barrier_wait(ready)

        def scores(step):
            named = listed(step) >= 0
            parity = lax.rem(step, jnp.int32(2))
            scores = self.tiles.scores(boxes, tail, self.me, parity)
            return jnp.where(lax.broadcast_in_dim(named, scores.shape, [1]), scores, -jnp.inf)

        start = (
            plgpu.layout_cast(jnp.zeros((HEADS, VALUE_WIDTH // 2), jnp.float32), _MATRIX),
            plgpu.layout_cast(jnp.full((HEADS,), _LOWEST, jnp.float32), _PER_HEAD),
            plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _PER_HEAD),
        )
        body = (self._first_tile, self._second_tile)[self.me]
        out, top, total = lax.fori_loop(0, pairs, lambda step, s: body(scores(step), s), start)

        self.shared.stats[2 + self.me] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.both)
        plgpu.barrier_wait(self.shared.both)
        return out, top, total + self._stats(3 - self.me)

    def _first_tile(self, scores: jax.Array, state: State) -> State:
        out, top, total = state
        higher = jnp.maximum(top, scores.max(axis=1) * self.log2_scale)
        shrink = jnp.exp2(top - higher)
        weights = jnp.exp2(scores * self.log2_scale - _across(higher, scores.shape))
        self._publish(weights, higher)
        total = total * shrink + weights.sum(axis=1)
        out = self._weigh(out * _across(shrink, out.shape), weights.astype(jnp.bfloat16), 0)
        plgpu.barrier_wait(self.shared.weights_ready.at[1])
        highest = self._stats(1)
        shrink = jnp.exp2(higher - highest)
        out = self._weigh(out * _across(shrink, out.shape), self.shared.weights, 1)
        return out, highest, total * shrink

    def _second_tile(self, scores: jax.Array, state: State) -> State:
        out, top, total = state
        mine = scores.max(axis=1) * self.log2_scale
        plgpu.barrier_wait(self.shared.weights_ready.at[0])
        higher = self._stats(0)
        highest = jnp.maximum(higher, mine)
        shrink, shrink_again = jnp.exp2(top - higher), jnp.exp2(higher - highest)
        weights = jnp.exp2(scores * self.log2_scale - _across(highest, scores.shape))
        self._publish(weights, highest)
        total = total * (shrink * shrink_again) + weights.sum(axis=1)
        out = self._weigh(out * _across(shrink, out.shape), self.shared.weights, 0)
        out = out * _across(shrink_again, out.shape)
        out = self._weigh(out, weights.astype(jnp.bfloat16), 1)
        return out, highest, total

    def _weigh(self, out: jax.Array, weights: Any, tile: int) -> jax.Array:
        out = self.tiles.weigh(out, weights, tile, self.me)
        self.tiles.free(2 * tile + self.me)
        return out

    def _publish(self, weights: jax.Array, top: jax.Array) -> None:
        self.shared.weights[self.me] = weights.astype(jnp.bfloat16)
        self.shared.stats[self.me] = top
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.weights_ready.at[self.me])

    def _stats(self, row: int) -> jax.Array:
        return plgpu.load(self.shared.stats.at[row], layout=_PER_HEAD, optimized=False)

    def store(self, state: State, sink: jax.Array, out_ref: Any, lse_ref: Any) -> None:
        """Writes the result and, from one of the two warpgroups, the natural lse."""
        out, top, total = state
        # Not "above 0": NaN has to come out as NaN.
        scale = jnp.where(total != 0, 1.0 / (total + jnp.exp2(sink - top)), 0.0)
        out = (out * _across(scale, out.shape)).astype(jnp.bfloat16)
        boxes = [_BOXES // 2 * self.me + box for box in range(_BOXES // 2)]
        for i, box in enumerate(boxes):
            self.shared.boxes[box] = out[:, 64 * i : 64 * i + 64]
        if self.me == 0:
            lse = (top + jnp.log2(total)) * (1 / _LOG2_E)
            self.shared.stats[0] = jnp.where(total != 0, lse, jnp.inf)
        plgpu.commit_smem()
        for box in boxes:
            columns = pl.ds(64 * box, 64)
            plgpu.copy_smem_to_gmem(self.shared.boxes.at[box], out_ref.at[:, columns])
        if self.me == 0:
            plgpu.copy_smem_to_gmem(self.shared.stats.at[0], lse_ref)
        plgpu.wait_smem_to_gmem(0)

    def store_partial(self, state: State, out_ref: Any, lse_ref: Any) -> None:
        """Writes the fp32 result of a split and its base-2 lse, `_LOWEST` if it saw no key."""
        out, top, total = state
        total = jnp.where(total != 0, total, 1.0)
        out = out * _across(1.0 / total, out.shape)
        out_ref.at[:, pl.ds(VALUE_WIDTH // 2 * self.me, VALUE_WIDTH // 2)][...] = out
        if self.me == 0:
            self.shared.stats[0] = top + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.shared.stats.at[0], lse_ref)
            plgpu.wait_smem_to_gmem(0)


def _across(per_head: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(per_head, shape, [0])


def _divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
