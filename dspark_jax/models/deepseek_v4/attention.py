"""Attention of DeepSeek-V4: a window of raw rows and compressed entries in one softmax.

One vector a token is key and value of all heads. As it carries its own rotation, the output is
turned back at the position of the query. Heads leave through groups of low-rank matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_rope import Phases, for_heads, rotate_tail
from dspark_jax.models.deepseek_v4 import ring
from dspark_jax.models.deepseek_v4.cache import LayerCache
from dspark_jax.models.deepseek_v4.compressor import compress
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.indexer import choose_entries
from dspark_jax.models.deepseek_v4.plan import Plan
from dspark_jax.models.deepseek_v4.weights import Attention
from dspark_jax.models.layers import linear, rms_norm
from pallas_kernels.sparse_mla import Selection, sparse_mla


def attention(
    config: DeepseekV4Config,
    weights: Attention,
    layer: LayerCache,
    plan: Plan,
    x: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], LayerCache]:
    """Write the rows of the batch into the layer's cache, then attend; ``x`` is normed."""
    compressor, indexer = weights.compressor, weights.indexer
    ratio = 0 if compressor is None else compressor.ape.shape[0]
    turn = plan.turn_of(ratio)
    with jax.named_scope("projections"):
        query_low, query = project_query(config, weights, x, turn)
        row = project_row(config, weights, x, turn)
    window, readable = ring.extend(plan.window, layer.window, plan.batch, row)
    entries, compressed, index = None, layer.compressed, layer.index
    if compressor is not None:
        assert compressed is not None
        with jax.named_scope("compressors"):
            compressed = compress(config, compressor, compressed, plan, x)
        if indexer is None:
            chosen = all_entries(plan, ratio)
        else:
            assert index is not None
            with jax.named_scope("compressors"):
                index = compress(config, indexer.compressor, index, plan, x)
            chosen = choose_entries(config, indexer, index.entries, plan, x, query_low)
        count = jnp.minimum(plan.ratios[ratio].seen, chosen.shape[1])
        entries = compressed.entries, plan.entry_rows(ratio, chosen), count
    with jax.named_scope("sparse_attention"):
        attended = _attend(config, weights, plan, query, readable, entries)
    with jax.named_scope("projections"):
        out = project_out(config, weights, attended, turn)
    return out, LayerCache(window, compressed, index)


def project_query(
    config: DeepseekV4Config, weights: Attention, x: Float[Array, "*B D"], turn: Phases
) -> tuple[Float[Array, "*B q"], Float[Array, "*B H E"]]:
    """The low-rank query, which the indexer reads too, and the normed and turned heads."""
    low = rms_norm(linear(x, weights.query_a), weights.query_norm, config.rms_norm_eps)
    heads = linear(low, weights.query_b).reshape(*x.shape[:-1], -1, config.head_dim)
    wide = heads.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps)
    return low, rotate_tail(wide.astype(x.dtype), for_heads(turn))


def project_row(
    config: DeepseekV4Config, weights: Attention, x: Float[Array, "*B D"], turn: Phases
) -> Float[Array, "*B E"]:
    """The vector that is key and value of a token."""
    return rotate_tail(rms_norm(linear(x, weights.kv), weights.kv_norm, config.rms_norm_eps), turn)


def project_out(
    config: DeepseekV4Config, weights: Attention, attended: Float[Array, "*B H E"], turn: Phases
) -> Float[Array, "*B D"]:
    """Undo the rotation of the values, then two matrices, the first one a group of heads."""
    back = rotate_tail(attended, for_heads(turn), inverse=True)
    groups = back.reshape(*back.shape[:-2], config.o_groups, -1)
    matrices = weights.out_a.reshape(config.o_groups, config.o_lora_rank, -1)
    low = jnp.einsum("...gi,goi->...go", groups, matrices)
    return linear(low.reshape(*low.shape[:-2], -1), weights.out_b)


def all_entries(plan: Plan, ratio: int) -> Int[Array, "T K"]:
    """Every entry that each token sees, then -1; K is what a slot's pages hold, or 1."""
    most = plan.table.shape[1] * plan.page_tokens // ratio
    entry = jnp.arange(max(most, 1), dtype=jnp.int32)
    return jnp.where(entry < plan.ratios[ratio].seen[:, None], entry, -1)


def _attend(
    config: DeepseekV4Config,
    weights: Attention,
    plan: Plan,
    query: Float[Array, "T H E"],
    readable: list[Float[Array, "M Q E"]],
    entries: tuple[Float[Array, "M P E"], Int[Array, "T K"], Int[Array, "T"]] | None,
) -> Float[Array, "T H E"]:
    """Each part of the batch over the rings that it reads, and over listed entries of a pool."""
    packed, attended = plan.batch.packed, []
    counts = packed.split(plan.window_count)
    chosen: list[Selection | None] = [None] * len(counts)
    if entries is not None:
        pool, *lists = entries
        listed = zip(*map(packed.split, lists), strict=True)
        chosen = [Selection(pool, *one) for one in listed]
    for some, rings, rows, count, extra in zip(
        packed.split(query), readable, plan.window_rows, counts, chosen, strict=True
    ):
        out, _ = sparse_mla(
            some,
            Selection(rings, rows, count),
            extra,
            sm_scale=config.head_dim**-0.5,
            sinks=weights.sink,
            value_width=config.head_dim,
        )
        attended.append(out)
    return packed.join(attended)
