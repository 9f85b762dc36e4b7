"""The DeepSeek-V4 drafter in training: stages at many anchors, its heads, the load of its experts.

A stage is a layer of ``features_deepseek_v4`` under an attention of its own. A block sees few rows,
the window before its anchor and itself, so they are gathered for each block: what that costs does
not grow with the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.drafter.deepseek_v4.dspark import context_features
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights
from dspark_jax.models.deepseek_v4 import hyper_connections as mhc
from dspark_jax.models.deepseek_v4.attention import project_out, project_query, project_row
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.rope import phases
from dspark_jax.models.deepseek_v4.weights import Attention, Layer
from dspark_jax.models.layers import rms_norm
from train.draft_heads import DraftHeads
from train.features_deepseek_v4 import run_layer
from train.initialize_deepseek_v4 import drafter_config, initial_weights
from train.sequence_attention import attention_logits, attention_weights, mix_values
from train.sequence_experts import balanced_bias
from train.sequence_output import LayerReport

__all__ = [
    "SMALL_HEADS",
    "balanced",
    "block_hidden",
    "drafter_config",
    "heads",
    "initial_weights",
    "served",
]

SMALL_HEADS = ("markov_w1", "markov_w2", "confidence")
EXACT = ("fn", "base", "scale", "sink", "router", "bias", "confidence")
"""Fields that are fp32 whatever the dtype of the rest (``models.deepseek_v4.weights``)."""


def served(weights: DeepseekV4DrafterWeights, dtype: Any) -> DeepseekV4DrafterWeights:
    """In ``dtype`` but for mixing, routing, sinks and the confidence head, as they are loaded."""

    def cast(path: Any, leaf: Array) -> Array:
        return leaf if path[-1].name in EXACT else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


def block_hidden(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    embed: Float[Array, "V D"],
    taps: Float[Array, "B K nD"],
    tokens: Int[Array, "B A G"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Float[Array, "B A G D"], tuple[Float[Array, "X"], ...]]:
    """Hidden states *before* the final norm, and the load of every stage's experts.

    Stages are computed again for their gradients instead of kept.
    """
    real = jnp.broadcast_to(keep[..., None], tokens.shape)
    main = context_features(config, weights, taps)
    embedded = jnp.take(embed, tokens, axis=0).astype(weights.main_proj.dtype)
    streams, loads = mhc.spread(config.target, embedded), []
    for stage in weights.stages:
        run = jax.checkpoint(functools.partial(_stage, config.target))
        streams, report = run(stage, main, tokens, anchors, real, streams)
        loads.append(report.expert_load)
    return mhc.joined(config.target, weights.stream_head, streams), tuple(loads)


def _stage(
    config: DeepseekV4Config,
    stage: Layer,
    main: Float[Array, "B K D"],
    tokens: Int[Array, "B A G"],
    anchors: Int[Array, "B A"],
    real: Bool[Array, "B A G"],
    streams: Float[Array, "B A G n D"],
) -> tuple[Float[Array, "B A G n D"], LayerReport]:
    def attend(x: Float[Array, "B A G D"]) -> tuple[Float[Array, "B A G D"], None]:
        return _attention(config, stage.attention, main, anchors, x), None

    return run_layer(config, stage, attend, tokens, real, streams)


def _attention(
    config: DeepseekV4Config,
    weights: Attention,
    main: Float[Array, "B K D"],
    anchors: Int[Array, "B A"],
    x: Float[Array, "B A G D"],
) -> Float[Array, "B A G D"]:
    """Every position of a block over the window of rows before its anchor and over the block."""
    batch, blocks, width = x.shape[:3]
    turn = phases(config, anchors[..., None] + jnp.arange(width), compressed=False)
    _, query = project_query(config, weights, x, turn)
    own = project_row(config, weights, x, turn)

    everywhere = phases(config, jnp.arange(main.shape[1])[None], compressed=False)
    context = project_row(config, weights, main, everywhere)
    size = config.sliding_window
    place = anchors[..., None] + jnp.arange(-size, 0)
    index = jnp.maximum(place, 0).reshape(batch, -1, 1)
    window = jnp.take_along_axis(context, index, axis=1).reshape(batch, blocks, size, -1)

    rows = jnp.concatenate([window, own], axis=2).reshape(batch * blocks, size + width, -1)
    shown = jnp.concatenate([place >= 0, jnp.ones((batch, blocks, width), bool)], axis=2)
    logits = attention_logits(query.reshape(-1, *query.shape[2:]), rows, config.head_dim**-0.5)
    share = attention_weights(logits, shown.reshape(-1, 1, size + width), weights.sink)
    mixed = mix_values(share, rows).reshape(query.shape)
    return project_out(config, weights, mixed, turn)


def heads(
    config: DeepseekV4DrafterConfig,
    weights: DeepseekV4DrafterWeights,
    head: Float[Array, "V D"],
    hidden: Float[Array, "... G D"],
    previous: Int[Array, "... G"],
    *,
    detach: bool = False,
) -> DraftHeads:
    """Logits read the hidden states after the final norm, the confidence reads them before it."""
    embedding = jnp.take(weights.markov_w1, previous, axis=0)
    seen = jnp.concatenate([hidden.astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1)
    if detach:
        seen = jax.lax.stop_gradient(seen)
    return DraftHeads(
        states=rms_norm(hidden, weights.norm, config.target.rms_norm_eps),
        ranked=embedding,
        confidence=jnp.sum(seen * weights.confidence, axis=-1),
        matrix=head,
        w2=weights.markov_w2,
    )


def balanced(
    weights: DeepseekV4DrafterWeights, loads: tuple[Float[Array, "X"], ...]
) -> DeepseekV4DrafterWeights:
    """Router biases moved against the load."""

    def steer(stage: Layer, load: Float[Array, "X"]) -> Layer:
        assert stage.moe.bias is not None
        moe = dataclasses.replace(stage.moe, bias=balanced_bias(stage.moe.bias, load))
        return dataclasses.replace(stage, moe=moe)

    return dataclasses.replace(weights, stages=tuple(map(steer, weights.stages, loads)))
