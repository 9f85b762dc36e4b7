"""DeepSeek-V3.2 over whole sequences, with gradients: the layers of ``models.deepseek_v32``.

Attention is absorbed as in serving, and a mask over all rows of the sequence.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.deepseek_rope import for_heads, rotate_tail
from dspark_jax.models.deepseek_v32.attention import position_phases
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.indexer import Phases, index_key, rotate_head
from dspark_jax.models.deepseek_v32.moe import route
from dspark_jax.models.deepseek_v32.weights import Attention, DeepseekV32Weights, Layer, Mlp, Moe
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
    config: DeepseekV32Config,
    weights: DeepseekV32Weights,
    tokens: Int[Array, "B K"],
    real: Bool[Array, "B K"],
    taps: tuple[int, ...],
) -> SequenceOutput:
    """Causal forward of whole sequences from position 0; see ``SequenceOutput``.

    Layers are computed again for their gradients instead of kept.
    """
    hidden = jnp.take(weights.embed, tokens, axis=0)
    outputs, reports = {-1: hidden}, []
    run = jax.checkpoint(functools.partial(_layer, config))
    for index, layer in enumerate(weights.layers):
        hidden, report = run(layer, real, hidden)
        reports.append(report)
        outputs[index] = hidden
    final = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return collect(outputs, taps, final, reports)


def _layer(
    config: DeepseekV32Config,
    layer: Layer,
    real: Bool[Array, "B K"],
    hidden: Float[Array, "B K D"],
) -> tuple[Float[Array, "B K D"], LayerReport]:
    normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
    attended, loss = _attention(config, layer.attention, normed, real)
    hidden = hidden + attended
    normed = rms_norm(hidden, layer.ffn_norm, config.rms_norm_eps)
    fed, load = _feed_forward(config, layer.ffn, normed, real)
    return hidden + fed, LayerReport(indexer_loss=loss, expert_load=load)


def _feed_forward(
    config: DeepseekV32Config, weights: Mlp | Moe, x: Float[Array, "B K D"], real: Array
) -> tuple[Float[Array, "B K D"], Float[Array, "X"] | None]:
    """MLP or experts, and how the latter are loaded."""
    if isinstance(weights, Mlp):
        return expert(x, weights.gate_up, weights.down), None
    flat = x.reshape(-1, x.shape[-1])
    ids, weight = route(config, weights, flat)
    out = sequence_experts(flat, ids, weight, weights.experts)
    out = out + expert(flat, weights.shared.gate_up, weights.shared.down)
    return out.reshape(x.shape), expert_load(ids, real.reshape(-1), config.n_routed_experts)


def _attention(
    config: DeepseekV32Config,
    weights: Attention,
    x: Float[Array, "B K D"],
    real: Bool[Array, "B K"],
) -> tuple[Float[Array, "B K D"], Float[Array, ""]]:
    """Attention output and the indexer's loss."""
    batch, length = x.shape[:2]
    phases = position_phases(config, jnp.arange(length, dtype=jnp.int32))
    turn = (phases[0][None], phases[1][None])
    low, latent, key = jnp.split(
        linear(x, weights.narrow[: -config.index_head_dim]),
        [config.q_lora_rank, config.q_lora_rank + config.kv_lora_rank],
        axis=-1,
    )
    latent = rms_norm(latent, weights.latent_norm, config.rms_norm_eps)
    row = rotate_tail(jnp.concatenate([latent, key], axis=-1), turn)

    low = rms_norm(low, weights.query_norm, config.rms_norm_eps)
    heads, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    query = linear(low, weights.wide[: heads * width]).reshape(batch, length, heads, width)
    query, turning = jnp.split(query, [config.qk_nope_head_dim], axis=-1)
    query = jnp.einsum("bkhe,hec->bkhc", query, weights.key_up)
    query = rotate_tail(jnp.concatenate([query, turning], axis=-1), for_heads(turn))

    scores = _index_scores(config, weights, x, low, phases)
    seen = jnp.arange(1, length + 1, dtype=jnp.int32)
    logits = attention_logits(query, row, config.softmax_scale)
    shown = attention_weights(logits, choose_keys(scores, seen, config.index_topk))
    teacher = attention_weights(logits, (jnp.arange(length) < seen[:, None])[None])
    mixed = mix_values(shown, row[..., : config.kv_lora_rank])
    out = jnp.einsum("bkhc,huc->bkhu", mixed, weights.value_up).reshape(batch, length, -1)
    return linear(out, weights.out), indexer_loss(teacher, scores, seen, real)


def _index_scores(
    config: DeepseekV32Config,
    weights: Attention,
    x: Float[Array, "B K D"],
    low: Float[Array, "B K Q"],
    phases: Phases,
) -> Float[Array, "B K K"]:
    """Scores of all rows; the indexer learns and what it reads does not learn from it."""
    x, low = jax.lax.stop_gradient((x, low))
    heads, width = config.index_n_heads, config.index_head_dim
    projected = linear(x, weights.narrow[-width:])
    keys = jax.vmap(lambda one: index_key(weights.indexer, one, phases))(projected)
    query = linear(low, weights.wide[-heads * width :]).reshape(*x.shape[:2], heads, width)
    query = jax.vmap(lambda one: rotate_head(one, phases))(query)
    gate = linear(x.astype(jnp.float32), weights.indexer.head_weight) * (heads * width) ** -0.5
    return index_scores(query, gate, keys)
