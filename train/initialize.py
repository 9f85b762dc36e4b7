"""A new drafter: its shapes from the target's, its weights at random."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.validate import check_fits
from dspark_jax.drafter.weights import ConfidenceHead, DrafterLayer, DrafterWeights, MarkovHead
from dspark_jax.models.config import DenseConfig
from train.config import DrafterSection

STANDARD_DEVIATION = 0.02
HEAD_WIDTH = 64
MLP_WIDTHS = 3
"""MLP width of a drafter over its hidden width, where the target has no layer to copy."""


def drafter_config(section: DrafterSection, loaded: LoadedTarget) -> DrafterConfig:
    """The drafter described by ``section`` for a target.

    Its layers have the shape of a dense target's. A sparse target has no layer of their kind: then
    heads are 64 wide, as many as fill the hidden width, and the MLP is three times as wide.

    Raises:
        DrafterMismatch: taps or heads that do not fit, a mask token that ends answers.
    """
    target = loaded.config
    config = DrafterConfig(
        block_size=section.block_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=section.num_hidden_layers,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        target_layer_ids=section.target_layer_ids,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_hidden_layers,
        mask_token_id=section.mask_token_id,
        markov_rank=section.markov_rank,
        markov_head_type=section.markov_head_type,
        enable_confidence_head=section.enable_confidence_head,
        confidence_head_with_markov=section.markov_rank > 0,
        **_layer_shape(target),
    )
    check_fits(config, target, {"stop": loaded.stop_token_ids})
    return config


def _layer_shape(target: Any) -> dict[str, Any]:
    """Fields of a draft layer that a dense target's layers decide."""
    copied = (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_scaling",
    )
    if isinstance(target, DenseConfig):
        return {name: getattr(target, name) for name in copied}
    heads = max(1, target.hidden_size // HEAD_WIDTH)
    shape = (MLP_WIDTHS * target.hidden_size, heads, heads, min(HEAD_WIDTH, target.hidden_size))
    return dict(zip(copied, (*shape, None), strict=True))


def initial_weights(config: DrafterConfig, key: Key[Array, ""]) -> DrafterWeights:
    """fp32 weights: matrices normal with deviation 0.02, norms one, biases zero."""
    keys = iter(jax.random.split(key, 8 * config.num_hidden_layers + 8))
    width, mlp, rank = config.hidden_size, config.intermediate_size, config.markov_rank
    query = config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim

    def matrix(*shape: int) -> Float[Array, "..."]:
        return STANDARD_DEVIATION * jax.random.normal(next(keys), shape, jnp.float32)

    def layer() -> DrafterLayer:
        return DrafterLayer(
            input_norm=jnp.ones(width),
            q=matrix(query, width),
            kv=matrix(keys_values, width),
            out=matrix(width, query),
            q_norm=jnp.ones(config.head_dim),
            k_norm=jnp.ones(config.head_dim),
            post_norm=jnp.ones(width),
            gate_up=matrix(2 * mlp, width),
            down=matrix(width, mlp),
        )

    def markov() -> MarkovHead:
        head = MarkovHead(w1=matrix(config.vocab_size, rank), w2=matrix(config.vocab_size, rank))
        if config.markov_head_type == "gated":
            gate = matrix(rank, width + rank)
            return dataclasses.replace(head, gate=gate, gate_bias=jnp.zeros(rank))
        if config.markov_head_type == "rnn":
            joint = matrix(3 * rank, 2 * rank + width)
            return dataclasses.replace(head, joint=joint, joint_bias=jnp.zeros(3 * rank))
        return head

    def confidence() -> ConfidenceHead:
        seen = width + rank if config.confidence_head_with_markov else width
        return ConfidenceHead(weight=matrix(seen), bias=jnp.zeros(()))

    return DrafterWeights(
        fc=matrix(width, len(config.target_layer_ids) * config.target_hidden_size),
        hidden_norm=jnp.ones(width),
        layers=tuple(layer() for _ in range(config.num_hidden_layers)),
        norm=jnp.ones(width),
        markov=markov() if rank else None,
        confidence=confidence() if config.enable_confidence_head else None,
    )
