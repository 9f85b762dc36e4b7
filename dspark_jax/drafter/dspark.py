"""The DSpark drafter behind the drafter protocol (DFlash is the same with rank 0)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafter import heads
from dspark_jax.drafter.backbone import (
    block_hidden_from_context,
    phases_at,
)
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import ContextCache, DrafterLayer, DrafterWeights
from dspark_jax.models.layers import linear
from dspark_jax.models.pages import PagePool, place
from pallas_kernels.paged_attention.reference import rows_of
from pallas_kernels.rope_write import rope_write
from pallas_kernels.row_linear import rms_linear


def init_context(config: DrafterConfig, slots: int, capacity: int, dtype: Any) -> ContextCache:
    """An empty context cache for ``slots`` requests of ``capacity`` rows."""
    return _empty_context(config, slots, capacity, dtype)


def init_context_pages(
    config: DrafterConfig, slots: int, pool: PagePool, dtype: Any
) -> ContextCache:
    """An empty paged context cache: no slot has a page."""
    context = _empty_context(config, pool.count, pool.size, dtype)
    return dataclasses.replace(context, table=pool.empty_table(slots))


def _empty_context(config: DrafterConfig, pages: int, rows: int, dtype: Any) -> ContextCache:
    shape = (pages, config.num_key_value_heads, rows, config.head_dim)
    layers = range(config.num_hidden_layers)
    return ContextCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def commit_context(
    config: DrafterConfig,
    weights: DrafterWeights,
    context: ContextCache,
    taps: Float[Array, "T nDt"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
) -> ContextCache:
    """Project taps and write one context row each at (slot, position).

    Rows whose slot or position lies outside the cache, on either side, write nothing.
    """
    projected = linear(taps.astype(weights.fc.dtype), weights.fc)
    phases = phases_at(config, position)
    page, offset = place(context.table, slot, position, context.keys[0].shape[2])
    rows = projected, weights.hidden_norm, phases, page, offset
    written = [
        _write(layer, keys, values, *rows, eps=config.rms_norm_eps)
        for layer, keys, values in zip(weights.layers, context.keys, context.values, strict=True)
    ]
    return dataclasses.replace(
        context,
        keys=tuple(keys for keys, _ in written),
        values=tuple(values for _, values in written),
    )


# jitted so that layers of one shape are traced and lowered once
@functools.partial(jax.jit, static_argnames="eps")
def _write(
    layer: DrafterLayer,
    keys: Array,
    values: Array,
    projected: Float[Array, "T D"],
    norm: Float[Array, "D"],
    phases: tuple[Array, Array],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    eps: float,
) -> tuple[Array, Array]:
    """Keys and values of a layer with the rows written."""
    fused = rms_linear(projected, norm, layer.kv, eps=eps)
    # A row that is masked out still meets a zero weight in attention, which does not hide a NaN:
    # a broken request must not reach the next owner of its slot.
    _, keys, values = rope_write(
        fused, *phases, keys, values, page, offset, k_norm=layer.k_norm, eps=eps, finite=True
    )
    return keys, values


def block_hidden(
    config: DrafterConfig,
    weights: DrafterWeights,
    embed: Float[Array, "V D"],
    context: ContextCache,
    anchor: Int[Array, "S"],
    start: Int[Array, "S"],
) -> Float[Array, "S G D"]:
    """Final-normed hidden states of the block [anchor, mask, ...] at positions ``start ..``.

    Context rows 0..start-1 of each slot are visible, and the whole block in both directions.
    """
    masks = jnp.full((anchor.shape[0], config.block_size - 1), config.mask_token_id, anchor.dtype)
    tokens = jnp.concatenate([anchor[:, None], masks], axis=1)
    embeddings = embed_tokens(weights, embed, tokens)
    keys, values = context.keys, context.values
    if context.table is not None:
        keys, values = (
            tuple(rows_of(pool, context.table) for pool in pools) for pools in (keys, values)
        )
    kv = tuple(zip(keys, values, strict=True))
    hidden = block_hidden_from_context(config, weights, embeddings[:, None], kv, start[:, None])
    return hidden[:, 0]


def embed_tokens(
    weights: DrafterWeights, embed: Float[Array, "V D"], tokens: Int[Array, "..."]
) -> Float[Array, "... D"]:
    """Input embeddings from the drafter's own table, or from the target's ``embed``."""
    table = embed if weights.embed is None else weights.embed
    return jnp.take(table, tokens, axis=0).astype(weights.fc.dtype)


def base_logits(
    config: DrafterConfig,
    weights: DrafterWeights,
    head: Float[Array, "V D"],
    hidden: Float[Array, "... D"],
) -> Float[Array, "... Vd"]:
    """fp32 logits of the parallel backbone, from the drafter's own head or the target's."""
    matrix = _head(weights, head)
    return heads.vocabulary_logits(hidden.astype(matrix.dtype), matrix)


def _head(weights: DrafterWeights, head: Float[Array, "V D"]) -> Float[Array, "Vd D"]:
    return head if weights.lm_head is None else weights.lm_head


def start_walk(
    config: DrafterConfig, weights: DrafterWeights, slots: int
) -> Float[Array, "S R"] | None:
    """State of the sequential head before the first position of a block."""
    return heads.start_state(config, weights, (slots,))


def walk(
    config: DrafterConfig,
    weights: DrafterWeights,
    state: Float[Array, "S R"] | None,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Float[Array, "S Vd"] | None, Float[Array, "S R"] | None]:
    """One position: fp32 logit bias (None = no head), and the next state."""
    return heads.walk_position(config, weights, state, hidden, previous)


def confidences(
    config: DrafterConfig,
    weights: DrafterWeights,
    hidden: Float[Array, "S C D"],
    previous: Int[Array, "S C"],
) -> Float[Array, "S C"] | None:
    """fp32 confidence logits of the walked positions; None without a head."""
    return heads.confidences(config, weights, hidden, previous)


def walks_without_logits(weights: DrafterWeights, head: Float[Array, "V D"], slots: int) -> bool:
    """Whether greedy requests are walked by `best_position`."""
    w2 = None if weights.markov is None else weights.markov.w2
    return heads.walks_without_logits(_head(weights, head), w2, slots)


def best_position(
    config: DrafterConfig,
    weights: DrafterWeights,
    head: Float[Array, "V D"],
    state: Float[Array, "S R"] | None,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Int[Array, "S"], Float[Array, "S R"] | None]:
    """One position of greedy requests: best column, and the next state."""
    return heads.best_position(config, weights, _head(weights, head), state, hidden, previous)


def to_target_ids(weights: DrafterWeights, draft_ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Draft-vocabulary columns to target token ids."""
    if weights.draft_to_target is None:
        return draft_ids
    return jnp.take(weights.draft_to_target, draft_ids, axis=0)
