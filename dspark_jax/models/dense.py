"""Dense decoders (Llama family, Qwen3) behind the target protocol."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.config import DenseConfig
from dspark_jax.models.layers import linear, rms_norm, rope_phases
from dspark_jax.models.pages import PagePool, place
from dspark_jax.models.ragged import Mixed, Packed
from dspark_jax.models.taps import check_taps
from dspark_jax.models.weights import DenseCache, DenseLayer, DenseWeights
from pallas_kernels.best_linear import best_linear
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_write import rope_write
from pallas_kernels.row_linear import linear_add, rms_linear


def init_cache(config: DenseConfig, slots: int, capacity: int, dtype: Any) -> DenseCache:
    """An empty cache for ``slots`` requests of ``capacity`` rows each."""
    return _empty_cache(config, slots, capacity, dtype, jnp.zeros(slots, jnp.int32))


def init_pages(config: DenseConfig, slots: int, pool: PagePool, dtype: Any) -> DenseCache:
    """An empty paged cache: no slot has a page."""
    length = jnp.zeros(slots, jnp.int32)
    cache = _empty_cache(config, pool.count, pool.size, dtype, length)
    return dataclasses.replace(cache, table=pool.empty_table(slots))


def _empty_cache(
    config: DenseConfig, pages: int, rows: int, dtype: Any, length: Int[Array, "S"]
) -> DenseCache:
    shape = (pages, config.num_key_value_heads, rows, config.head_dim)
    layers = range(config.num_hidden_layers)
    return DenseCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=length,
    )


def forward(
    config: DenseConfig,
    weights: DenseWeights,
    cache: DenseCache,
    packed: Packed | Mixed,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "T D"], Float[Array, "T n*D"], DenseCache]:
    """Run packed rows through the decoder and write their cache rows.

    Args:
        packed: the query rows; their positions must continue what their slots hold.
        taps: layers whose output is wanted: -1 the embedding, i the residual stream after
            layer i, before any norm.

    Returns:
        Hidden states after the final norm, the taps side by side in the order asked, and the
        cache with the rows written and ``length`` unchanged. Padding rows hold finite values
        that mean nothing.

    Raises:
        ValueError: a tap outside -1..L-1.
    """
    check_taps(taps, config.num_hidden_layers)
    slot_count = cache.length.shape[0]
    slot = packed.slot_of_row(slot_count)
    page, offset = place(cache.table, slot, packed.position, cache.keys[0].shape[2])
    real = (slot >= 0) & (slot < slot_count)
    limits = packed.split(jnp.where(real, packed.position, -1))
    limits = [part.unpack(limit, -1) for part, limit in zip(packed.parts, limits, strict=True)]
    phases = rope_phases(packed.position, config.head_dim, config.rope_theta, config.rope_scaling)
    hidden = jnp.take(weights.embed, packed.tokens, axis=0)
    outputs = {-1: hidden} if -1 in taps else {}
    keys, values = list(cache.keys), list(cache.values)
    places = [part.places() for part in packed.parts]
    tables = [_table_of(part, cache.table) for part in packed.parts]
    rows = _Rows(packed, phases, page, offset, limits, places, tables)
    for index, layer in enumerate(weights.layers):
        hidden, keys[index], values[index] = _layer(
            layer, hidden, keys[index], values[index], rows, eps=config.rms_norm_eps
        )
        if index in taps:
            outputs[index] = hidden
    tapped = (
        jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
        if taps
        else jnp.zeros((hidden.shape[0], 0), hidden.dtype)
    )
    final = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return final, tapped, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))


@flax.struct.dataclass
class _Rows:
    """Where the rows of a call stand; the same for every layer."""

    packed: Packed | Mixed
    phases: tuple[Array, Array]
    page: Int[Array, "T"]
    offset: Int[Array, "T"]
    limits: list[Array]
    places: list[Array | None]
    tables: list[Array | None]


def _table_of(part: Packed, table: Int[Array, "S C"] | None) -> Int[Array, "A C"] | None:
    """Pages of each request of a part: a kernel that is given them knows nothing of slots."""
    if table is None or part.slots is None:
        return table
    return jnp.take(table, part.slots, axis=0, mode="fill", fill_value=-1)


# jitted so that layers of one shape are traced once; XLA sees them unrolled all the same
@functools.partial(jax.jit, static_argnames="eps")
def _layer(
    layer: DenseLayer,
    hidden: Float[Array, "T D"],
    keys: Array,
    values: Array,
    rows: _Rows,
    eps: float,
) -> tuple[Float[Array, "T D"], Array, Array]:
    """One decoder layer: its output, and its cache with the rows written."""
    query, keys, values = rope_write(
        rms_linear(hidden, layer.input_norm, layer.qkv, eps=eps),
        *rows.phases,
        keys,
        values,
        rows.page,
        rows.offset,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        eps=eps,
    )
    packed = rows.packed
    queries = packed.split(query)

    def attend(
        part: Packed, own: Array, limit: Array, places: Array | None, table: Array | None
    ) -> Array:
        if places is None:
            own = part.unpack(own)
        slots = part.slots if table is None else None
        out = paged_attention(own, keys, values, limit, slots, table, rows=places)
        return part.pack(out) if places is None else out

    attended = packed.join(
        map(attend, packed.parts, queries, rows.limits, rows.places, rows.tables)
    )
    hidden = linear_add(attended.reshape(hidden.shape[0], -1), layer.out, hidden)
    gated = rms_linear(hidden, layer.post_norm, layer.gate_up, eps=eps, gated=True)
    return linear_add(gated, layer.down, hidden), keys, values


def unembed(
    config: DenseConfig, weights: DenseWeights, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """fp32 logits of final hidden states."""
    return linear(hidden, weights.head, out_dtype=jnp.float32)


def best_tokens(
    config: DenseConfig, weights: DenseWeights, hidden: Float[Array, "T D"]
) -> Int[Array, "T"]:
    """The most likely token of each row."""
    return best_linear(hidden, weights.head)[0]


def commit(config: DenseConfig, cache: DenseCache, length: Int[Array, "S"]) -> DenseCache:
    """Set the committed length of every slot; rows past it become scratch."""
    return dataclasses.replace(cache, length=length.astype(jnp.int32))


def output_embedding(weights: DenseWeights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its head (the embedding itself when tied)."""
    return weights.head


def input_embedding(weights: DenseWeights) -> Float[Array, "V D"]:
    """The matrix a drafter borrows as its embedding."""
    return weights.embed
