"""Exact top-k of long rows in three launches, which read a row once.

1. A program a row draws a sample of the row and takes from it a threshold that some two to four
   times ``count`` entries should reach.
2. Programs share the row's entries and keep the positions of those that reach the threshold, in
   order.
3. A program a row finds the exact threshold among the kept, by bisection on the bits of their
   scores, and writes the positions above it in order.

Should too few or too many entries have reached the first threshold (the sample misled, or scores
are all alike), the third launch bisects over the row itself: slower, and exact as well. Pallas'
Triton lowering is deprecated in JAX; the body could move to jax_triton as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

MOST_COUNT = 4096
_PROGRAMS = 132 * 4
_MOST_SPLITS = 32

_NOTHING = -(1 << 31)
"""Key of what is not there: below that of every score."""
_LEAST = -0x7F800000
"""Key of the least finite number, which stands for -inf as well."""
_INFINITY = 0x7F800000


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How rows are cut; all numbers are powers of two.

    Attributes:
        tile: entries of a row that a program reads at once.
        sample: entries drawn for the first threshold.
        least_kept: entries of a row that can be kept, at least; four times ``count`` if that is
            more.
        warps: warps of a program in the second launch.
    """

    tile: int = 4096
    sample: int = 2048
    least_kept: int = 4096
    warps: int = 8

    def kept(self, count: int) -> int:
        """Entries of a row that can be kept."""
        return max(self.least_kept, pl.next_power_of_2(4 * count))


DEFAULT = Tuning()


def unsupported(scores: jax.Array | jax.ShapeDtypeStruct, count: int) -> str | None:
    """Why the kernel cannot take these operands, naming the value found and wanted, or None."""
    if scores.dtype != jnp.float32:
        return f"the dtype of scores is {scores.dtype}, wanted float32"
    if not 0 < count <= MOST_COUNT:
        return f"count is {count}, wanted 1 to {MOST_COUNT}"
    if 0 in scores.shape:
        return f"scores have shape {scores.shape}, wanted no empty axis"
    return None


@functools.partial(jax.jit, static_argnames=("count", "tuning", "interpret"))
def top_k(
    scores: Float[Array, "T K"],
    seen: Int[Array, "T"],
    count: int,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Int[Array, "T k"]:
    """The operation of `reference.top_k` for operands that `unsupported` passes.

    Jitted, so that a model of many layers traces and lowers it once.
    """
    rows, total = scores.shape
    count = min(count, total)
    seen = jnp.clip(seen.astype(jnp.int32), 0, total)
    launch = functools.partial(pl.pallas_call, interpret=interpret)
    tiles = pl.cdiv(total, tuning.tile)
    splits = max(1, min(pl.cdiv(_PROGRAMS, rows), tiles, _MOST_SPLITS))
    share = pl.cdiv(tiles, splits) * tuning.tile
    splits = pl.cdiv(total, share)
    kept = tuning.kept(count)

    threshold = launch(
        functools.partial(_threshold, count=count, kept=kept, tuning=tuning),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="top_k_threshold",
    )(scores, seen)
    positions, counts = launch(
        functools.partial(_keep, count=count, share=share, tuning=tuning),
        out_shape=(
            jax.ShapeDtypeStruct((rows, splits, min(kept, share)), jnp.int32),
            jax.ShapeDtypeStruct((rows, splits), jnp.int32),
        ),
        grid=(splits, rows),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        name="top_k_keep",
    )(scores, seen, threshold)
    return launch(
        functools.partial(_choose, count=count, kept=kept, tuning=tuning),
        out_shape=jax.ShapeDtypeStruct((rows, count), jnp.int32),
        grid=(rows,),
        compiler_params=plt.CompilerParams(num_warps=min(16, max(4, kept // 512)), num_stages=1),
        name="top_k_choose",
    )(scores, seen, threshold, positions, counts)


def _keys(scores: jax.Array) -> jax.Array:
    """int32 in the order of the scores; NaN counts as +inf, -inf as the least finite number."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(scores != scores, _INFINITY, jnp.maximum(keys, _LEAST))


def _tile(ref: Any, row: jax.Array, at: jax.Array, end: jax.Array) -> jax.Array:
    """Keys of consecutive entries ``at`` of a row; `_NOTHING` at or past ``end``."""
    # Triton reads in wide words only under a mask that it can see through: that of the array.
    inside = at < ref.shape[1]
    scores = plt.load(ref.at[jnp.full(at.shape, row), at], mask=inside, other=0.0)
    return jnp.where(at < end, _keys(scores), _NOTHING)


def _bisect(
    reach: Callable[[jax.Array], jax.Array], wanted: Any, low: jax.Array, high: jax.Array
) -> jax.Array:
    """The largest key that ``wanted`` entries reach, or a lower one that exactly so many reach.

    ``reach`` counts the entries that reach a key: at least ``wanted`` for ``low``, fewer for
    ``high``.
    """

    def unsettled(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        low, high, found = state
        # The difference wraps around where it is large; it is never 0.
        return (found != wanted) & (high - low != 1)

    def halve(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, found = state
        middle = (low & high) + ((low ^ high) >> 1)  # without overflow
        reaching = reach(middle)
        enough = reaching >= wanted
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, reaching, found),
        )

    return lax.while_loop(unsettled, halve, (low, high, jnp.int32(-1)))[0]


def _total(mask: jax.Array) -> jax.Array:
    return mask.astype(jnp.int32).sum()


def _threshold(
    scores_ref: Any, seen_ref: Any, out_ref: Any, *, count: int, kept: int, tuning: Tuning
) -> None:
    row = pl.program_id(0)
    seen = seen_ref[row]

    @pl.when(seen <= kept)
    def _() -> None:
        out_ref[row] = jnp.int32(_LEAST)

    @pl.when(seen > kept)
    def _() -> None:
        draw = jnp.arange(tuning.sample)
        # draw * seen / sample, without overflow
        at = draw * (seen // tuning.sample) + draw * (seen % tuning.sample) // tuning.sample
        keys = _keys(plt.load(scores_ref.at[jnp.full(at.shape, row), at]))
        wanted = jnp.maximum((kept // 2) * tuning.sample // seen, 1)
        out_ref[row] = _bisect(lambda key: _total(keys >= key), wanted, keys.min(), keys.max() + 1)


def _keep(
    scores_ref: Any,
    seen_ref: Any,
    threshold_ref: Any,
    positions_ref: Any,
    counts_ref: Any,
    *,
    count: int,
    share: int,
    tuning: Tuning,
) -> None:
    split, row = pl.program_id(0), pl.program_id(1)
    seen, threshold = seen_ref[row], threshold_ref[row]
    room = positions_ref.shape[2]
    start = split * share
    # A row that sees no more than it may choose needs no scores.
    end = jnp.where(seen <= count, start, jnp.minimum(start + share, seen))

    def look(tile: jax.Array, found: jax.Array) -> jax.Array:
        at = start + tile * tuning.tile + jnp.arange(tuning.tile)
        reaches = _tile(scores_ref, row, at, end) >= threshold
        place = found + jnp.cumsum(reaches.astype(jnp.int32)) - 1
        fits = reaches & (place < room)
        slot = positions_ref.at[
            jnp.full(at.shape, row), jnp.full(at.shape, split), jnp.where(fits, place, room)
        ]
        plt.store(slot, at, mask=fits)
        return found + _total(reaches)

    tiles = pl.cdiv(jnp.maximum(end - start, 0), tuning.tile)
    counts_ref[row, split] = lax.fori_loop(0, tiles, look, jnp.int32(0))


def _choose(
    scores_ref: Any,
    seen_ref: Any,
    threshold_ref: Any,
    positions_ref: Any,
    counts_ref: Any,
    out_ref: Any,
    *,
    count: int,
    kept: int,
    tuning: Tuning,
) -> None:
    row = pl.program_id(0)
    seen, threshold = seen_ref[row], threshold_ref[row]
    splits, room = positions_ref.shape[1:]

    @pl.when(seen <= count)
    def _() -> None:
        place = jnp.arange(pl.next_power_of_2(count))
        at = out_ref.at[jnp.full(place.shape, row), place]
        plt.store(at, jnp.where(place < seen, place, -1), mask=place < count)

    def locate(split: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Split and offset of each place, in the order of the splits."""
        owner, offset, begin = state
        found = counts_ref[row, split]
        mine = (place >= begin) & (place < begin + found)
        return jnp.where(mine, split, owner), jnp.where(mine, place - begin, offset), begin + found

    place = jnp.arange(kept)
    nowhere = jnp.zeros(kept, jnp.int32)
    owner, offset, found = lax.fori_loop(0, splits, locate, (nowhere, nowhere, jnp.int32(0)))
    trusted = (found >= count) & (found <= kept)

    @pl.when((seen > count) & trusted)
    def _() -> None:
        inside = place < found
        at = positions_ref.at[jnp.full(place.shape, row), owner, jnp.minimum(offset, room - 1)]
        at = plt.load(at, mask=inside, other=0)
        scores = plt.load(scores_ref.at[jnp.full(at.shape, row), at], mask=inside, other=0.0)
        keys = jnp.where(inside, _keys(scores), _NOTHING)
        lowest = jnp.where(inside, keys, _INFINITY).min()
        lowest = _bisect(lambda key: _total(keys >= key), count, lowest, keys.max() + 1)
        ties = count - _total(keys > lowest)
        _write(out_ref, row, keys, at, lowest, ties, _total(keys == lowest), jnp.int32(0))

    @pl.when((seen > count) & ~trusted)
    def _() -> None:
        tiles = pl.cdiv(seen, tuning.tile)

        def tile_of(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = tile * tuning.tile + jnp.arange(tuning.tile)
            return _tile(scores_ref, row, at, seen), at

        def reach(key: jax.Array) -> jax.Array:
            return lax.fori_loop(
                0, tiles, lambda tile, total: total + _total(tile_of(tile)[0] >= key), jnp.int32(0)
            )

        # Where scores are all alike, the threshold of the sample is the wanted one.
        enough = reach(threshold) >= count
        few = enough & (reach(threshold + 1) < count)
        low = jnp.where(enough, threshold, _LEAST)
        high = jnp.where(few, threshold + 1, jnp.where(enough, _INFINITY + 1, threshold))
        lowest = _bisect(reach, count, low, high)
        above, equal = reach(lowest + 1), reach(lowest)
        ties, equal = count - above, equal - above

        def write(tile: jax.Array, state: tuple[jax.Array, jax.Array]) -> Any:
            written, left = state
            keys, at = tile_of(tile)
            written = _write(out_ref, row, keys, at, lowest, ties, left, written)
            return written, left - _total(keys == lowest)

        lax.fori_loop(0, tiles, write, (jnp.int32(0), equal))


def _write(
    out_ref: Any,
    row: jax.Array,
    keys: jax.Array,
    at: jax.Array,
    lowest: jax.Array,
    ties: jax.Array,
    left: jax.Array,
    written: jax.Array,
) -> jax.Array:
    """Write the positions above ``lowest`` and the last ``ties`` of those equal to it.

    Args:
        left: entries equal to ``lowest`` from here to the end of the row.
        written: positions written before.

    Returns:
        Positions written by now.
    """
    equal = keys == lowest
    after = left - jnp.cumsum(equal.astype(jnp.int32))
    taken = (keys > lowest) | (equal & (after < ties))
    place = written + jnp.cumsum(taken.astype(jnp.int32)) - 1
    # An index past the end, so that the interpreter drops what the mask hides.
    slot = out_ref.at[jnp.full(at.shape, row), jnp.where(taken, place, out_ref.shape[1])]
    plt.store(slot, at, mask=taken)
    return written + _total(taken)
