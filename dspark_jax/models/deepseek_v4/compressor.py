"""Compressors: r tokens pooled into one entry by a softmax of their own.

In fp32, token by token: c = W_kv x and z = W_gate x + ape[p mod r]. An HCA entry is the sum of the
c of its window's r tokens, weighted by a softmax of their z, channel by channel. A CSA entry
pools 2r tokens: the second half of the channels of its own window and the first half of the
window before it. Then RMS norm, and RoPE at the position where the entry's window starts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_rope import Phases, rotate_tail
from dspark_jax.models.deepseek_v4 import entries, ring
from dspark_jax.models.deepseek_v4.cache import CompressorCache
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.deepseek_v4.plan import Plan
from dspark_jax.models.deepseek_v4.weights import Compressor
from dspark_jax.models.layers import linear, rms_norm


def compress(
    config: DeepseekV4Config,
    weights: Compressor,
    cache: CompressorCache,
    plan: Plan,
    x: Float[Array, "T D"],
) -> CompressorCache:
    """Store the batch's tokens and write every entry that one of them closes."""
    ratio = weights.ape.shape[0]
    mine = plan.ratios[ratio]
    pair = token_pairs(weights, x, jnp.maximum(plan.batch.position, 0))
    state, recent = ring.extend(mine.state, cache.state, plan.batch, pair)
    pooled = [
        pool_entries(ratio, rings.reshape(-1, rings.shape[-1]), rows)
        for rings, rows in zip(recent, mine.pooled, strict=True)
    ]
    every = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in pooled])
    turned = turn_entries(config, weights, every.astype(x.dtype), mine.turn)
    return CompressorCache(state, entries.write(cache.entries, mine.place, turned))


def token_pairs(
    weights: Compressor, x: Float[Array, "*B D"], position: Int[Array, "*B"]
) -> Float[Array, "*B 2C"]:
    """fp32 (c, z) of tokens at ``position``, side by side."""
    wide = x.astype(jnp.float32)
    gate = linear(wide, weights.gate) + weights.ape[position % weights.ape.shape[0]]
    return jnp.concatenate([linear(wide, weights.kv), gate], axis=-1)


def pool_entries(
    ratio: int, pairs: Float[Array, "M 2C"], row: Int[Array, "A N s"]
) -> Float[Array, "A N E"]:
    """fp32 entries from the rows of (c, z) that each is pooled from; -1 names none."""
    there = row[..., None] >= 0
    value, gate = jnp.split(jnp.where(there, pairs[jnp.maximum(row, 0)], 0), 2, axis=-1)
    if ratio == OVERLAPPING_RATIO:
        value, gate = _halves(ratio, value), _halves(ratio, gate)
    # a finite floor, so that an entry pooled from nothing is a number and not NaN
    gate = jnp.where(there, gate, jnp.finfo(jnp.float32).min)
    return (jax.nn.softmax(gate, axis=-2) * value).sum(axis=-2)


def turn_entries(
    config: DeepseekV4Config, weights: Compressor, pooled: Float[Array, "*B E"], turn: Phases
) -> Float[Array, "*B E"]:
    """Pooled entries normed, and turned by the phases of where their windows start."""
    return rotate_tail(rms_norm(pooled, weights.norm, config.rms_norm_eps), turn)


def _halves(ratio: int, channels: Float[Array, "*B 2r 2E"]) -> Float[Array, "*B 2r E"]:
    """First channels of the window before, second channels of the entry's own window."""
    first, second = jnp.split(channels, 2, axis=-1)
    return jnp.concatenate([first[..., :ratio, :], second[..., ratio:, :]], axis=-2)
