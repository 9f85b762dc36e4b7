"""The DeepSeek-V4 drafter behind the drafter protocol.

Every stage is a layer like the target's, with mHC and experts. Context comes from the taps: one
projection and norm of them feeds the key-value matrix of every stage, and only committed tokens
are ever written, so the ring needs no room for rejected ones. The block sees the whole ring and
all of itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafter import heads
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights, RingContext
from dspark_jax.models.deepseek_rope import Phases
from dspark_jax.models.deepseek_v4 import hyper_connections as mhc
from dspark_jax.models.deepseek_v4.attention import project_out, project_query, project_row
from dspark_jax.models.deepseek_v4.moe import moe
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.deepseek_v4.weights import Layer
from dspark_jax.models.layers import linear, rms_norm
from dspark_jax.models.pages import PagePool, contiguous, locate
from pallas_kernels.best_linear import best_linear
from pallas_kernels.sparse_mla import Selection, sparse_mla

BESIDE_PAGES = "rings of context rows"


def init_context(
    config: DeepseekV4DrafterConfig, slots: int, capacity: int, dtype: Any
) -> RingContext:
    """Empty rings of ``sliding_window`` rows, whatever the ``capacity`` of a request."""
    shape = (slots, config.target.sliding_window, config.target.head_dim)
    return RingContext(
        rings=tuple(jnp.zeros(shape, dtype) for _ in range(config.stages)),
        ring_table=contiguous(slots, 1, 1),
    )


def init_context_pages(
    config: DeepseekV4DrafterConfig, slots: int, pool: PagePool, dtype: Any
) -> RingContext:
    """The same: nothing of it lies in pages."""
    return init_context(config, slots, pool.size, dtype)


def commit_context(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    context: RingContext,
    taps: Float[Array, "T nD"],
    slot: Int[Array, "T"],
    position: Int[Array, "T"],
) -> RingContext:
    """Project taps and write one row a stage for each; an out-of-range slot writes nothing.

    Of more rows of one slot than its ring holds, the last ones are written.
    """
    slots, length = context.ring_table.shape[0], context.rings[0].shape[1]
    known = (slot >= 0) & (slot < slots) & (position >= 0)
    slot = jnp.where(known, slot, slots)
    end = jnp.zeros(slots, jnp.int32).at[slot].max(position + 1, mode="drop")
    kept = known & (position >= jnp.take(end, slot, mode="fill", fill_value=0) - length)
    ring, offset = locate(context.ring_table, jnp.where(kept, slot, -1), position % length, length)
    main = context_features(config, weights, taps)
    turn = phases(config.target, position, compressed=False)
    rings = []
    for stage, pool in zip(weights.stages, context.rings, strict=True):
        row = project_row(config.target, stage.attention, main, turn)
        rings.append(pool.at[ring, offset].set(row.astype(pool.dtype), mode="drop"))
    return context.replace(rings=tuple(rings))


def context_features(
    config: DeepseekV4DrafterConfig, weights: DeepseekV4DrafterWeights, taps: Float[Array, "*B nD"]
) -> Float[Array, "*B D"]:
    """Taps side by side to what every stage makes its context rows of."""
    projected = linear(taps.astype(weights.main_proj.dtype), weights.main_proj)
    return rms_norm(projected, weights.main_norm, config.target.rms_norm_eps)


def block_hidden(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    embed: Float[Array, "V D"],
    context: RingContext,
    anchor: Int[Array, "S"],
    start: Int[Array, "S"],
) -> Float[Array, "S G D"]:
    """Hidden states, *before* the final norm, of the block [anchor, mask, ...] at ``start ..``.

    The last ``sliding_window`` committed rows are visible to every position of the block, and
    the whole block in both directions.
    """
    slots, width = anchor.shape[0], config.block_size
    masks = jnp.full((slots, width - 1), config.mask_token_id, anchor.dtype)
    tokens = jnp.concatenate([anchor[:, None], masks], axis=1).reshape(-1)
    position = (start[:, None] + jnp.arange(width, dtype=start.dtype)).reshape(-1)
    turn = phases(config.target, position, compressed=False)
    past = _past(context, start, width)
    streams = mhc.spread(
        config.target, jnp.take(embed, tokens, axis=0).astype(weights.main_proj.dtype)
    )
    for stage, pool in zip(weights.stages, context.rings, strict=True):
        seen, gates = mhc.read(config.target, stage.attention_mix, streams)
        normed = rms_norm(seen, stage.attention_norm, config.target.rms_norm_eps)
        attended = _attend(config, stage, Selection(pool, *past), normed, turn)
        streams = mhc.write(gates, streams, attended)
        seen, gates = mhc.read(config.target, stage.moe_mix, streams)
        normed = rms_norm(seen, stage.moe_norm, config.target.rms_norm_eps)
        real = jnp.ones(tokens.shape, bool)
        streams = mhc.write(gates, streams, moe(config.target, stage.moe, normed, tokens, real))
    joined = mhc.joined(config.target, weights.stream_head, streams)
    return joined.reshape(slots, width, -1)


def base_logits(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    head: Float[Array, "V D"],
    hidden: Float[Array, "S C D"],
) -> Float[Array, "S C V"]:
    """fp32 logits of the backbone through the final norm and the target's head."""
    return linear(_normed(config, weights, head, hidden), head, jnp.float32)


def _normed(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    head: Float[Array, "V D"],
    hidden: Float[Array, "*B D"],
) -> Float[Array, "*B D"]:
    """What the head is applied to."""
    return rms_norm(hidden, weights.norm, config.target.rms_norm_eps).astype(head.dtype)


def start_walk(
    config: DeepseekV4DrafterConfig, weights: DeepseekV4DrafterWeights, slots: int
) -> None:
    """A Markov head remembers nothing."""
    return None


def walk(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    state: None,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Float[Array, "S V"], None]:
    """One position: fp32 logit bias W2 W1[previous]."""
    embedding = jnp.take(weights.markov_w1, previous, axis=0)
    return linear(embedding, weights.markov_w2, jnp.float32), None


def confidences(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    hidden: Float[Array, "S C D"],
    previous: Int[Array, "S C"],
) -> Float[Array, "S C"]:
    """fp32 confidence logits w . [hidden; e] of the walked positions, e = W1[previous]."""
    embedding = jnp.take(weights.markov_w1, previous, axis=0)
    seen = jnp.concatenate([hidden.astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1)
    return jnp.sum(seen * weights.confidence, axis=-1)


def walks_without_logits(
    weights: DeepseekV4DrafterWeights, head: Float[Array, "V D"], slots: int
) -> bool:
    """Whether greedy requests are walked by `best_position`."""
    return heads.walks_without_logits(head, weights.markov_w2, slots)


def best_position(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    head: Float[Array, "V D"],
    state: None,
    hidden: Float[Array, "S D"],
    previous: Int[Array, "S"],
) -> tuple[Int[Array, "S"], None]:
    """One position of greedy requests: best column."""
    embedding = jnp.take(weights.markov_w1, previous, axis=0)
    normed = _normed(config, weights, head, hidden)
    column, _ = best_linear(normed, head, (embedding, weights.markov_w2))
    return column, None


def to_target_ids(
    weights: DeepseekV4DrafterWeights, draft_ids: Int[Array, "..."]
) -> Int[Array, "..."]:
    """The vocabularies are the same."""
    return draft_ids


def _past(
    context: RingContext, start: Int[Array, "S"], width: int
) -> tuple[Int[Array, "S*G R"], Int[Array, "S*G"]]:
    """Rows of the rings that a block sees, the same for each of its positions, and how many."""
    pool = context.rings[0]
    rings, length = pool.shape[:2]
    slot = jnp.arange(start.shape[0], dtype=jnp.int32)
    ring, _ = locate(context.ring_table, slot, jnp.zeros_like(slot), length)
    count = jnp.minimum(start, length)
    nth = jnp.arange(length, dtype=jnp.int32)
    row = ring[:, None] * length + (start[:, None] - count[:, None] + nth) % length
    row = jnp.where((nth < count[:, None]) & (ring < rings)[:, None], row, -1)
    return jnp.repeat(row, width, axis=0), jnp.repeat(count, width)


def _attend(
    config: DeepseekV4DrafterConfig,
    stage: Layer,
    past: Selection,
    x: Float[Array, "S*G D"],
    turn: Phases,
) -> Float[Array, "S*G D"]:
    """Attention of all blocks over their rings and themselves."""
    target, width = config.target, config.block_size
    _, query = project_query(target, stage.attention, x, turn)
    own = project_row(target, stage.attention, x, turn).astype(past.pool.dtype)
    block = jnp.arange(x.shape[0], dtype=jnp.int32).reshape(-1, width)
    with jax.named_scope("sparse_attention"):
        attended, _ = sparse_mla(
            query,
            past,
            Selection(own.reshape(-1, width, own.shape[-1]), jnp.repeat(block, width, axis=0)),
            sm_scale=target.head_dim**-0.5,
            sinks=stage.attention.sink,
            value_width=target.head_dim,
        )
    return project_out(target, stage.attention, attended, turn)
