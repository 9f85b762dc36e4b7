"""The lightning indexer: which compressed entries each token attends to (CSA layers).

score(p, w) = sum_h a_h relu(q_h . k_w), a = W_a x / sqrt(I J), over the index keys that a second,
narrow compressor makes. DeepSeek's code also turns queries and keys by a Hadamard matrix, which
leaves the product as it is, and rounds both to FP4 or FP8, which is left out here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_rope import for_heads, rotate_tail
from dspark_jax.models.deepseek_v4.config import OVERLAPPING_RATIO, DeepseekV4Config
from dspark_jax.models.deepseek_v4.plan import Plan
from dspark_jax.models.deepseek_v4.weights import Indexer
from dspark_jax.models.layers import linear
from pallas_kernels.indexer_logits import Batch, indexer_logits
from pallas_kernels.top_k import top_k


def choose_entries(
    config: DeepseekV4Config,
    weights: Indexer,
    keys: Float[Array, "M P I"],
    plan: Plan,
    x: Float[Array, "T D"],
    query_low: Float[Array, "T q"],
) -> Int[Array, "T K"]:
    """The entries of largest score of each token, ascending, then -1; K at most ``index_topk``.

    Among equal scores the later entry wins. Zeros are common, where no head likes a key, and the
    recorded reference settles them so.

    Args:
        keys: index keys in their pages.
        x: normed input of the layer.
        query_low: normed low-rank query.
    """
    heads, width = config.index_n_heads, config.index_head_dim
    with jax.named_scope("projections"):
        query = linear(query_low, weights.query).reshape(-1, heads, width)
        query = rotate_tail(query, for_heads(plan.turn_of(OVERLAPPING_RATIO)))
        weight = linear(x, weights.head_weight, jnp.float32) * (heads * width) ** -0.5
    seen = plan.ratios[OVERLAPPING_RATIO].seen
    packed = plan.batch.packed
    with jax.named_scope("indexer"):
        scores = packed.join(
            indexer_logits(some, gate, keys, Batch(part.packed.row, plan.pages_of(part), shown))
            for part, some, gate, shown in zip(
                plan.batch.parts, *map(packed.split, (query, weight, seen)), strict=True
            )
        )
    with jax.named_scope("top_k"):
        return top_k(scores, seen, config.index_topk)
