"""Lists of two tokens made one: consecutive tokens of a request mostly list the same rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.sparse_mla.selection import Selection

_LAST = jnp.iinfo(jnp.int32).max
"""In the place of an entry that names no row: past all others."""

_RUN = 64
"""Entries that are counted in one product; whole tiles of them."""


def pair_tokens(requests: Int[Array, "T"], runs: int | None = None) -> Int[Array, "P 2"]:
    """Consecutive tokens of a request two by two, for `pallas_kernels.sparse_mla.sparse_mla`.

    The last token of an odd number is alone, and T stands for nobody.

    Args:
        requests: whose each token is; tokens of one request stand side by side.
        runs: how many requests there are at most, counting whoever owns padding; P is the
            number of pairs that they can make, (T + runs) // 2. None: T.
    """
    tokens = requests.shape[0]
    count = (tokens + min(tokens if runs is None else runs, tokens)) // 2
    place = jnp.arange(tokens, dtype=jnp.int32)
    begins = (place == 0) | (requests != jnp.roll(requests, 1))
    within = (place - jax.lax.cummax(jnp.where(begins, place, 0))) % 2
    pair = jnp.cumsum(within == 0, dtype=jnp.int32) - 1
    nobody = jnp.full((count, 2), tokens, jnp.int32)
    return nobody.at[pair, within].set(place, mode="drop")


def merge(
    selection: Selection, pairs: Int[Array, "P 2"]
) -> tuple[Int[Array, "P 2 C"], Int[Array, "P"]]:
    """The lists of each pair's tokens, what both name in the same place, and their common length.

    A place holds the row in the list of a token that names it and -1 in that of one that does
    not; C is twice K, rounded up. A row that a list names twice stands there twice. Lists that
    ascend by ``selection.order`` cost two binary searches and a scatter, others a sort more.
    """
    rows, order = _ascending(selection)

    def of_member(values: Array, member: int) -> Array:
        return jnp.take(values, pairs[:, member], axis=0, mode="fill", fill_value=_LAST)

    strictly = selection.order is not None
    first, second = of_member(order, 0), of_member(order, 1)
    first_there, second_there = first != _LAST, second != _LAST
    before, both = _matched(first, second, strictly)
    up_to, too = _matched(second, first, strictly, after=True)
    new = second_there & ~too
    new_before = _count_before(new)

    entries = order.shape[1]
    nowhere = 2 * entries
    index = jnp.arange(entries, dtype=jnp.int32)
    place = index + jnp.take_along_axis(new_before, before, axis=1)
    place_of_new = new_before[:, :-1] + up_to
    places = [
        jnp.where(first_there, place, nowhere),
        jnp.where(first_there & both, place, nowhere),
        jnp.where(new, place_of_new, nowhere),
    ]
    listed = [of_member(rows, 0), of_member(rows, 0), of_member(rows, 1)]
    member = jnp.repeat(jnp.asarray([0, 1, 1], jnp.int32), entries)
    pair = jnp.arange(pairs.shape[0], dtype=jnp.int32)[:, None]
    merged = jnp.full((pairs.shape[0], 2, 2 * entries), -1, jnp.int32)
    merged = merged.at[pair, member, jnp.concatenate(places, axis=1)].set(
        jnp.concatenate(listed, axis=1), mode="drop", unique_indices=True
    )
    return merged, first_there.sum(axis=1, dtype=jnp.int32) + new_before[:, -1]


def _ascending(selection: Selection) -> tuple[Int[Array, "T C"], Int[Array, "T C"]]:
    """Rows, -1 for none, and numbers they ascend by, `_LAST` past the end; C whole runs of K."""
    rows, order = selection.rows(), selection.order
    padding = ((0, 0), (0, -rows.shape[1] % _RUN))
    if order is None:
        order = jnp.sort(jnp.where(rows < 0, _LAST, rows), axis=1)
        order = jnp.pad(order, padding, constant_values=_LAST)
        return jnp.where(order == _LAST, -1, order), order
    there = order >= 0
    if selection.lengths is not None:
        there &= jnp.arange(order.shape[1], dtype=jnp.int32) < selection.lengths[:, None]
    order = jnp.where(there, order.astype(jnp.int32), _LAST)
    return (
        jnp.pad(rows, padding, constant_values=-1),
        jnp.pad(order, padding, constant_values=_LAST),
    )


def _matched(
    values: Int[Array, "P C"], among: Int[Array, "P C"], strictly: bool, *, after: bool = False
) -> tuple[Int[Array, "P C"], Bool[Array, "P C"]]:
    """How many of ``among`` are below each value, or up to it; and whether it is one of them.

    Of equal values the n-th is matched with the n-th.
    """
    below = _search(among, values, "left")
    if strictly:
        last = jnp.int32(among.shape[1] - 1)
        equal = jnp.take_along_axis(among, jnp.minimum(below, last), axis=1) == values
        return below + equal if after else below, equal
    up_to = _search(among, values, "right")
    nth = jnp.arange(values.shape[1], dtype=jnp.int32) - _search(values, values, "left")
    return up_to if after else below, nth < up_to - below


def _search(
    ascending: Int[Array, "P C"], values: Int[Array, "P C"], side: str
) -> Int[Array, "P C"]:
    search = functools.partial(jnp.searchsorted, side=side, method="scan_unrolled")
    return jax.vmap(search)(ascending, values).astype(jnp.int32)


def _count_before(flags: Bool[Array, "P C"]) -> Int[Array, "P C+1"]:
    """How many flags stand before each place, and in all.

    As products with a triangle of ones, exact in fp32: a running sum takes many launches.
    """
    runs = flags.reshape(flags.shape[0], -1, _RUN).astype(jnp.bfloat16)
    triangle = jnp.tri(_RUN, k=-1, dtype=jnp.bfloat16)
    inside = jnp.einsum("prc,dc->prd", runs, triangle, preferred_element_type=jnp.float32)
    totals = runs.sum(axis=2, dtype=jnp.float32)
    earlier = jnp.tri(totals.shape[1], k=-1, dtype=jnp.float32)
    # Whole numbers below 2^24: fp32 products must not be rounded to TF32.
    before = jnp.einsum("pr,sr->ps", totals, earlier, precision="highest")
    counts = (inside + before[:, :, None]).reshape(flags.shape[0], -1)
    counts = jnp.concatenate([counts, totals.sum(axis=1, keepdims=True)], axis=1)
    return counts.astype(jnp.int32)
