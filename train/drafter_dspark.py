"""The dense DSpark drafter (DFlash with rank 0) in training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.drafter.backbone import (
    block_hidden_from_context,
    context_features,
    context_kv,
)
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.dspark import embed_tokens
from dspark_jax.drafter.heads import rank_and_confidence
from dspark_jax.drafter.weights import DrafterWeights
from train.block_attention import attend_in_groups
from train.draft_heads import DraftHeads
from train.initialize import drafter_config, initial_weights

__all__ = [
    "SMALL_HEADS",
    "balanced",
    "block_hidden",
    "drafter_config",
    "heads",
    "initial_weights",
    "served",
]

SMALL_HEADS = ("markov", "confidence")


def served(weights: DrafterWeights, dtype: Any) -> DrafterWeights:
    """All of them in ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), weights)


def block_hidden(
    config: DrafterConfig,
    weights: DrafterWeights,
    embed: Float[Array, "V D"],
    taps: Float[Array, "B K nDt"],
    tokens: Int[Array, "B A G"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Float[Array, "B A G D"], tuple[()]]:
    """Final-normed hidden states; there are no experts."""
    features = context_features(config, weights, taps)
    position = jnp.broadcast_to(jnp.arange(taps.shape[1], dtype=jnp.int32), taps.shape[:2])
    hidden = block_hidden_from_context(
        config,
        weights,
        embed_tokens(weights, embed, tokens),
        context_kv(config, weights, features, position),
        anchors,
        attend=attend_in_groups,
    )
    return hidden, ()


def heads(
    config: DrafterConfig,
    weights: DrafterWeights,
    head: Float[Array, "Vd D"],
    hidden: Float[Array, "... G D"],
    previous: Int[Array, "... G"],
    *,
    detach: bool = False,
) -> DraftHeads:
    """Logits and confidence read the same hidden states."""
    if config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size} differs from vocab_size "
            f"{config.vocab_size}: training needs the full vocabulary"
        )
    ranked, confidence = rank_and_confidence(config, weights, hidden, previous, detach=detach)
    return DraftHeads(
        states=hidden,
        ranked=ranked,
        confidence=confidence,
        matrix=head if weights.lm_head is None else weights.lm_head,
        w2=None if weights.markov is None else weights.markov.w2,
    )


def balanced(weights: DrafterWeights, loads: tuple[Array, ...]) -> DrafterWeights:
    """As they are: there are no routers."""
    return weights
