"""The lightning indexer: which rows each token attends to.

    score(t, s) = sum_h a_h(t) relu(q_h(t) . k(s)),   a = W_a x / sqrt(J I)

(DeepSeek-V3.2 report, equation 1). Queries and keys carry their position in the **first** R
numbers, halves split, unlike the attention itself. DeepSeek's code also turns both by a Hadamard
matrix, which leaves the product as it is, and rounds them to fp8, which is left out here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.places import Places
from dspark_jax.models.deepseek_v32.weights import Indexer
from dspark_jax.models.layers import linear, rotate
from pallas_kernels.indexer_logits import Batch, indexer_logits
from pallas_kernels.top_k import top_k

KEY_NORM_EPS = 1e-6

Phases = tuple[Float[Array, "T R/2"], Float[Array, "T R/2"]]


def index_key(
    weights: Indexer, projected: Float[Array, "T I"], phases: Phases
) -> Float[Array, "T I"]:
    """The key of each token: layer norm in fp32, then position."""
    wide = projected.astype(jnp.float32)
    wide -= wide.mean(axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + KEY_NORM_EPS)
    normed = wide * weights.key_norm.astype(jnp.float32) + weights.key_bias.astype(jnp.float32)
    return rotate_head(normed.astype(projected.dtype)[:, None], phases)[:, 0]


def choose_rows(
    config: DeepseekV32Config,
    weights: Indexer,
    keys: Float[Array, "N P I"],
    places: Places,
    x: Float[Array, "T D"],
    query: Float[Array, "T J I"],
    phases: Phases,
) -> tuple[Int[Array, "T K"], Float[Array, "T"]]:
    """Rows of its request that each token attends to, ascending, then -1; and its margin.

    A token sees the rows up to itself. Where a slot cannot hold more than ``index_topk`` of them
    all are taken and nothing is scored.

    Args:
        keys: index keys, those of this batch already written.
        x: normed input of the layer.
        query: index queries without position.

    Returns:
        The rows, and how far the lowest score among them lies above the highest of the rows left
        out: +inf where none is, 0 where the choice was a tie, which the later row wins here.
    """
    seen = places.position + 1
    columns = 1 if places.table is None else places.table.shape[1]
    capacity = columns * keys.shape[1]
    if capacity <= config.index_topk:
        row = jnp.arange(capacity, dtype=jnp.int32)
        return jnp.where(row < seen[:, None], row, -1), jnp.full(seen.shape, jnp.inf)
    query = rotate_head(query, phases)
    weight = linear(x.astype(jnp.float32), weights.head_weight)
    weight *= (config.index_n_heads * config.index_head_dim) ** -0.5
    packed = places.packed
    scores = packed.join(
        indexer_logits(some, gate, keys, Batch(part.row, places.pages_of(part), shown))
        for part, some, gate, shown in zip(
            packed.parts, *map(packed.split, (query, weight, seen)), strict=True
        )
    )
    best = top_k(scores, seen, config.index_topk)
    return best, _margin(scores, seen, best)


def rotate_head(x: Float[Array, "T J I"], phases: Phases) -> Float[Array, "T J I"]:
    """Turn the first R numbers of each vector, pairs (i, i + R/2)."""
    turned, rest = jnp.split(x, [2 * phases[0].shape[-1]], axis=-1)
    return jnp.concatenate([rotate(turned, *phases), rest], axis=-1)


def _margin(
    scores: Float[Array, "T K"], seen: Int[Array, "T"], best: Int[Array, "T k"]
) -> Float[Array, "T"]:
    chosen = jnp.take_along_axis(scores, jnp.maximum(best, 0), axis=1)
    lowest = jnp.where(best >= 0, chosen, jnp.inf).min(axis=1)
    left = jnp.where(jnp.arange(scores.shape[1]) < seen[:, None], scores, -jnp.inf)
    token = jnp.arange(scores.shape[0])[:, None]
    left = left.at[token, jnp.where(best >= 0, best, scores.shape[1])].set(-jnp.inf, mode="drop")
    return lowest - left.max(axis=1)
