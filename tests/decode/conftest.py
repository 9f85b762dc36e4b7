"""A small random target and a small random drafter that is right about half of the time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.step import Weights
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import ConfidenceHead, DrafterLayer, DrafterWeights, MarkovHead
from dspark_jax.models.config import DenseConfig
from dspark_jax.models.weights import DenseLayer, DenseWeights

TARGET = DenseConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=256,
)
DRAFTER = DrafterConfig(
    block_size=7,
    vocab_size=97,
    draft_vocab_size=97,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=12,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    target_layer_ids=(-1, 0),
    target_hidden_size=32,
    num_target_layers=2,
    mask_token_id=96,
    markov_rank=32,
)
LAYER_SCALE = 0.12
"""How much a layer adds to the embedding: the smaller, the more often the drafter is right."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    target: DenseConfig
    drafter: DrafterConfig
    weights: Weights


@functools.cache
def _make_pair(**changes: Any) -> Pair:
    fields = {field.name for field in dataclasses.fields(DenseConfig)}
    config = dataclasses.replace(TARGET, **{k: v for k, v in changes.items() if k in fields})
    draft = dataclasses.replace(DRAFTER, **{k: v for k, v in changes.items() if k not in fields})
    random = np.random.default_rng(0)

    def matrix(*shape: int, scale: float = 1.0) -> jax.Array:
        # made on the host, where no shape is a program to compile
        values = scale * random.normal(size=shape) * shape[-1] ** -0.5
        return jax.device_put(values.astype(np.float32))

    def norm(width: int) -> jax.Array:
        return jax.device_put((1 + 0.1 * random.normal(size=width)).astype(np.float32))

    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    target = DenseWeights(
        embed=matrix(config.vocab_size, width, scale=width**0.5),
        layers=tuple(
            DenseLayer(
                input_norm=norm(width),
                qkv=matrix(heads + 2 * groups, width, scale=2.0),
                out=matrix(width, heads, scale=LAYER_SCALE),
                post_norm=norm(width),
                gate_up=matrix(2 * config.intermediate_size, width),
                down=matrix(width, config.intermediate_size, scale=LAYER_SCALE),
                q_norm=norm(config.head_dim) if config.qk_norm else None,
                k_norm=norm(config.head_dim) if config.qk_norm else None,
            )
            for _ in range(config.num_hidden_layers)
        ),
        norm=norm(width),
        lm_head=matrix(config.vocab_size, width, scale=3.0),
    )
    query = draft.num_attention_heads * draft.head_dim
    keys = draft.num_key_value_heads * draft.head_dim
    hidden, rank = draft.hidden_size, draft.markov_rank
    drafter = DrafterWeights(
        fc=matrix(hidden, len(draft.target_layer_ids) * width),
        hidden_norm=norm(hidden),
        layers=tuple(
            DrafterLayer(
                input_norm=norm(hidden),
                q=matrix(query, hidden),
                kv=matrix(2 * keys, hidden),
                out=matrix(hidden, query),
                q_norm=norm(draft.head_dim),
                k_norm=norm(draft.head_dim),
                post_norm=norm(hidden),
                gate_up=matrix(2 * draft.intermediate_size, hidden),
                down=matrix(hidden, draft.intermediate_size),
            )
            for _ in range(draft.num_hidden_layers)
        ),
        norm=0.1 * norm(hidden),
        # a target of few and weak layers is nearly a table over its last token: draft from that
        markov=MarkovHead(
            w1=target.embed / jnp.std(target.embed, axis=-1, keepdims=True), w2=target.head
        ),
        confidence=ConfidenceHead(
            weight=matrix(hidden + rank, scale=20.0), bias=jnp.asarray(1.0, jnp.float32)
        ),
    )
    return Pair(config, draft, Weights(target, drafter))


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Pair]:
    """A pair with fields of either config changed; the same pair for the same changes."""
    return _make_pair
