"""The lightning indexer: which compressed entries each token attends to (CSA layers).

score(p, w) = sum_h a_h relu(q_h . k_w), a = W_a x / sqrt(I J), over the index keys that a second,
narrow compressor makes. DeepSeek's code also turns queries and keys by a Hadamard matrix, which
leaves the product as it is, and rounds both to FP4 or FP8, which is left out here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.deepseek_v4.plan import Plan
from dspark_jax.models.deepseek_v4.rope import for_heads, rotate_tail
from dspark_jax.models.deepseek_v4.weights import Indexer
from dspark_jax.models.layers import linear
from pallas_kernels.indexer_logits.reference import index_scores


def choose_entries(
    config: DeepseekV4Config,
    weights: Indexer,
    keys: Float[Array, "M P I"],
    plan: Plan,
    x: Float[Array, "T D"],
    query_low: Float[Array, "T q"],
) -> Int[Array, "T K"]:
    """The entries of largest score of each token, best first, then -1; K at most ``index_topk``.

    Args:
        keys: index keys in their pages.
        x: normed input of the layer.
        query_low: normed low-rank query.
    """
    heads, width = config.index_n_heads, config.index_head_dim
    query = linear(query_low, weights.query).reshape(-1, heads, width)
    query = rotate_tail(query, for_heads(plan.turn_of(OVERLAPPING_RATIO)))
    weight = linear(x, weights.head_weight, jnp.float32) * (heads * width) ** -0.5
    packed = plan.batch.packed
    scores = packed.pack(
        index_scores(
            packed.unpack(query),
            packed.unpack(weight),
            _of_requests(keys, plan.entry_table, plan.batch.slots),
        )
    )
    return best_entries(scores, plan.ratios[OVERLAPPING_RATIO].seen, config.index_topk)


def best_entries(
    scores: Float[Array, "T K"], seen: Int[Array, "T"], count: int
) -> Int[Array, "T k"]:
    """The ``count`` best of the first ``seen`` entries, then -1, whatever the scores are (NaN).

    Among equal scores the later entry wins. Zeros are common, where no head likes a key, and the
    recorded reference settles them so.
    """
    total = scores.shape[1]
    entry = jnp.arange(total, dtype=jnp.int32)
    lowest = jnp.finfo(scores.dtype).min
    masked = jnp.where(entry < seen[:, None], jnp.maximum(scores, lowest), -jnp.inf)
    best = total - 1 - jax.lax.top_k(masked[:, ::-1], min(count, total))[1].astype(jnp.int32)
    return jnp.where(best < seen[:, None], best, -1)


def _of_requests(
    keys: Float[Array, "M P I"], entry_table: Int[Array, "S C"], slots: Int[Array, "A"]
) -> Float[Array, "A K I"]:
    """All index keys of each request in order; a page that it does not have holds zeros."""
    page = jnp.where(slots[:, None] >= 0, entry_table[jnp.maximum(slots, 0)], -1)
    page = jnp.where(page >= 0, page, keys.shape[0])
    found = jnp.take(keys, page, axis=0, mode="fill", fill_value=0)
    return found.reshape(slots.shape[0], -1, keys.shape[2])
