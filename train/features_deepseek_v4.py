"""DeepSeek-V4 over whole sequences, with gradients: the layers of ``models.deepseek_v4``.

Projections, streams, pooling and routing are the model's own. What differs is that nothing is
kept for later, and that attention is a mask over all keys of the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.deepseek_rope import Phases, for_heads, rotate_tail
from dspark_jax.models.deepseek_v4 import hyper_connections as mhc
from dspark_jax.models.deepseek_v4.attention import project_out, project_query, project_row
from dspark_jax.models.deepseek_v4.cache import span
from dspark_jax.models.deepseek_v4.compressor import pool_entries, token_pairs, turn_entries
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.entries import visible
from dspark_jax.models.deepseek_v4.moe import route
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.deepseek_v4.weights import (
    Attention,
    Compressor,
    DeepseekV4Weights,
    Indexer,
    Layer,
    Moe,
)
from dspark_jax.models.experts import expert
from dspark_jax.models.layers import linear, rms_norm
from pallas_kernels.indexer_logits.reference import index_scores
from train.sequence_attention import (
    attention_logits,
    attention_weights,
    choose_keys,
    indexer_loss,
    mix_values,
)
from train.sequence_experts import expert_load, sequence_experts
from train.sequence_output import LayerReport, SequenceOutput, collect


def sequence_forward(
    config: DeepseekV4Config,
    weights: DeepseekV4Weights,
    tokens: Int[Array, "B K"],
    real: Bool[Array, "B K"],
    taps: tuple[int, ...],
) -> SequenceOutput:
    """Causal forward of whole sequences from position 0; see ``SequenceOutput``.

    Layers are computed again for their gradients instead of kept.
    """
    hidden = jnp.take(weights.embed, tokens, axis=0)
    outputs, reports = {-1: hidden}, []
    streams = mhc.spread(config, hidden)
    for index, layer in enumerate(weights.layers):
        run = functools.partial(_layer, config, config.compress_ratios[index])
        streams, report = jax.checkpoint(run)(layer, tokens, real, streams)
        reports.append(report)
        if index in taps:
            outputs[index] = mhc.mean(streams)
    joined = mhc.joined(config, weights.stream_head, streams)
    final = rms_norm(joined, weights.norm, config.rms_norm_eps)
    return collect(outputs, taps, final, reports)


def _layer(
    config: DeepseekV4Config,
    ratio: int,
    layer: Layer,
    tokens: Int[Array, "B K"],
    real: Bool[Array, "B K"],
    streams: Float[Array, "B K n D"],
) -> tuple[Float[Array, "B K n D"], LayerReport]:
    attend = functools.partial(_attention, config, layer.attention, ratio, real=real)
    return run_layer(config, layer, attend, tokens, real, streams)


def run_layer(
    config: DeepseekV4Config,
    layer: Layer,
    attend: Callable[[Array], tuple[Array, Array | None]],
    tokens: Int[Array, "*B"],
    real: Bool[Array, "*B"],
    streams: Float[Array, "*B n D"],
) -> tuple[Float[Array, "*B n D"], LayerReport]:
    """A layer, or a stage of a drafter, around its attention.

    ``attend`` takes what the attention reads, normed, and gives its output and the loss of its
    indexer, None without one. Rows that are not ``real`` do not count as load of the experts.
    """
    seen, gates = mhc.read(config, layer.attention_mix, streams)
    attended, loss = attend(rms_norm(seen, layer.attention_norm, config.rms_norm_eps))
    streams = mhc.write(gates, streams, attended)
    seen, gates = mhc.read(config, layer.moe_mix, streams)
    normed = rms_norm(seen, layer.moe_norm, config.rms_norm_eps)
    fed, load = _experts(config, layer.moe, normed, tokens, real)
    return mhc.write(gates, streams, fed), LayerReport(indexer_loss=loss, expert_load=load)


def _experts(
    config: DeepseekV4Config,
    weights: Moe,
    x: Float[Array, "*B D"],
    tokens: Int[Array, "*B"],
    real: Bool[Array, "*B"],
) -> tuple[Float[Array, "*B D"], Float[Array, "X"] | None]:
    """The experts, and how they are loaded where the load can be steered."""
    flat, limit = x.reshape(-1, x.shape[-1]), config.swiglu_limit
    ids, weight = route(config, weights, flat, tokens.reshape(-1))
    out = sequence_experts(flat, ids, weight, weights.experts, limit)
    out = out + expert(flat, weights.shared_gate_up, weights.shared_down, limit)
    load = None
    if weights.bias is not None:
        load = expert_load(ids, real.reshape(-1), config.n_routed_experts)
    return out.reshape(x.shape), load


def _attention(
    config: DeepseekV4Config,
    weights: Attention,
    ratio: int,
    x: Float[Array, "B K D"],
    real: Bool[Array, "B K"],
) -> tuple[Float[Array, "B K D"], Float[Array, ""] | None]:
    """Attention output and the indexer's loss, None in a layer without one."""
    position = jnp.arange(x.shape[1], dtype=jnp.int32)
    turn = phases(config, position[None], compressed=ratio > 0)
    query_low, query = project_query(config, weights, x, turn)
    row = project_row(config, weights, x, turn)
    scale = config.head_dim**-0.5
    age = position[:, None] - position
    recent = ((age >= 0) & (age < config.sliding_window))[None]
    if weights.compressor is None:
        shown = attention_weights(attention_logits(query, row, scale), recent, weights.sink)
        return project_out(config, weights, mix_values(shown, row), turn), None

    entries = _entries(config, weights.compressor, x)
    keys = jnp.concatenate([row, entries], axis=1)
    logits = attention_logits(query, keys, scale)
    seen = visible(position, ratio)

    def weigh(entry: Bool[Array, "#B K N"]) -> Float[Array, "B H K M"]:
        known = jnp.broadcast_to(recent, (entry.shape[0], *recent.shape[1:]))
        return attention_weights(logits, jnp.concatenate([known, entry], axis=-1), weights.sink)

    every = (jnp.arange(entries.shape[1]) < seen[:, None])[None]
    loss = None
    if weights.indexer is None:
        shown = weigh(every)
    else:
        scores = _index_scores(config, weights.indexer, x, query_low, turn)
        shown = weigh(choose_keys(scores, seen, config.index_topk))
        teacher = weigh(every)[..., x.shape[1] :]
        loss = indexer_loss(teacher, scores, seen, real)
    return project_out(config, weights, mix_values(shown, keys), turn), loss


def _entries(
    config: DeepseekV4Config, weights: Compressor, x: Float[Array, "B K D"]
) -> Float[Array, "B N E"]:
    """Every entry that the sequences close."""
    batch, length = x.shape[:2]
    ratio = weights.ape.shape[0]
    pairs = token_pairs(weights, x, jnp.arange(length))
    first = jnp.arange(length // ratio, dtype=jnp.int32) * ratio
    place = first[:, None] + jnp.arange(ratio - span(ratio), ratio, dtype=jnp.int32)
    start = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * length
    rows = jnp.where(place >= 0, start + place, -1)
    pooled = pool_entries(ratio, pairs.reshape(-1, pairs.shape[-1]), rows)
    turn = phases(config, first[None], compressed=True)
    return turn_entries(config, weights, pooled.astype(x.dtype), turn)


def _index_scores(
    config: DeepseekV4Config,
    weights: Indexer,
    x: Float[Array, "B K D"],
    query_low: Float[Array, "B K q"],
    turn: Phases,
) -> Float[Array, "B K N"]:
    """Scores of all entries; the indexer learns and what it reads does not learn from it."""
    x, query_low = jax.lax.stop_gradient((x, query_low))
    heads, width = config.index_n_heads, config.index_head_dim
    query = linear(query_low, weights.query).reshape(*x.shape[:2], heads, width)
    query = rotate_tail(query, for_heads(turn))
    weight = linear(x, weights.head_weight, jnp.float32) * (heads * width) ** -0.5
    return index_scores(query, weight, _entries(config, weights.compressor, x))
