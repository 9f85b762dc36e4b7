"""Latent attention (MLA) in its absorbed form over the rows that the indexer chooses.

A token caches one vector for all heads, the latent c and a rotated key r. With the matrices of
keys and values moved to the other side of the products, a head attends to it directly:

    s = scale ((W_K^T q) . c + q_r . r),   o = W_V sum_j softmax(s)_j c_j

(DeepSeek-V2 report, section 2.1 and appendix C; V3.2 report, section 2.1.) Position turns
neighbouring pairs (2i, 2i + 1) of q_r and r.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_rope import frequencies, rotate_tail
from dspark_jax.models.deepseek_v32.cache import LayerCache, write_rows
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.indexer import Phases, choose_rows, index_key
from dspark_jax.models.deepseek_v32.places import Places
from dspark_jax.models.deepseek_v32.weights import Attention
from dspark_jax.models.layers import linear, rms_norm
from pallas_kernels.sparse_mla import Selection, sparse_mla


def position_phases(config: DeepseekV32Config, position: Int[Array, "T"]) -> Phases:
    """fp32 cosines and sines of each token, for attention and indexer alike."""
    frequency = frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    angle = position[:, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def attention(
    config: DeepseekV32Config,
    weights: Attention,
    rows: LayerCache,
    places: Places,
    phases: Phases,
    x: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], LayerCache, Float[Array, "T"]]:
    """Write the rows of the batch, choose, attend.

    Args:
        rows: the cache of this layer.
        x: normed input.

    Returns:
        The output, the cache of this layer, and each token's margin (``choose_rows``).
    """
    low, latent, key, index = _split(
        linear(x, weights.narrow),
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    latent = rms_norm(latent, weights.latent_norm, config.rms_norm_eps)
    row = rotate_tail(jnp.concatenate([latent, key], axis=-1), phases)
    rows = LayerCache(
        latent=write_rows(rows.latent, places.page, places.offset, row),
        index=write_rows(
            rows.index, places.page, places.offset, index_key(weights.indexer, index, phases)
        ),
    )

    heads, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    low = rms_norm(low, weights.query_norm, config.rms_norm_eps)
    query, index_query = _split(linear(low, weights.wide), heads * width)
    chosen, margin = choose_rows(
        config,
        weights.indexer,
        rows.index,
        places,
        x,
        index_query.reshape(-1, config.index_n_heads, config.index_head_dim),
        phases,
    )
    query, turning = _split(query.reshape(-1, heads, width), config.qk_nope_head_dim)
    query = jnp.concatenate([jnp.einsum("the,hec->thc", query, weights.key_up), turning], axis=-1)
    query = rotate_tail(query, (phases[0][:, None], phases[1][:, None]))
    attended, _ = sparse_mla(
        query.astype(rows.latent.dtype),
        Selection(
            rows.latent,
            places.ids(rows.latent, chosen),
            jnp.minimum(places.position + 1, chosen.shape[1]),
        ),
        sm_scale=config.softmax_scale,
        value_width=config.kv_lora_rank,
    )
    out = jnp.einsum("thc,huc->thu", attended.astype(x.dtype), weights.value_up)
    return linear(out.reshape(x.shape[0], -1), weights.out), rows, margin


def _split(values: Array, *widths: int) -> list[Array]:
    """Pieces of the last axis of these widths, and what is left."""
    ends = [sum(widths[: count + 1]) for count in range(len(widths))]
    return jnp.split(values, ends, axis=-1)
