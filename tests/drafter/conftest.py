"""A small random drafter of any shape."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import ConfidenceHead, DrafterLayer, DrafterWeights, MarkovHead

BASE = DrafterConfig(
    block_size=4,
    vocab_size=32,
    draft_vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    target_layer_ids=(0, 2),
    target_hidden_size=12,
    num_target_layers=4,
    mask_token_id=31,
    markov_rank=5,
)


@dataclasses.dataclass(frozen=True)
class Drafter:
    config: DrafterConfig
    weights: DrafterWeights


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    def make(dtype: Any = jnp.float32, **changes: Any) -> Drafter:
        config = dataclasses.replace(BASE, **changes)
        random = np.random.default_rng(0)

        def put(values: np.ndarray) -> jax.Array:
            # cast on the host, where no shape is a program to compile
            return jax.device_put(values.astype(np.float32).astype(jnp.dtype(dtype)))

        def matrix(*shape: int) -> jax.Array:
            return put(random.normal(size=shape) * shape[-1] ** -0.5)

        def norm(width: int) -> jax.Array:
            return put(1 + 0.1 * random.normal(size=width))

        hidden, rank = config.hidden_size, config.markov_rank
        query = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        layers = tuple(
            DrafterLayer(
                input_norm=norm(hidden),
                q=matrix(query, hidden),
                kv=matrix(2 * kv, hidden),
                out=matrix(hidden, query),
                q_norm=norm(config.head_dim),
                k_norm=norm(config.head_dim),
                post_norm=norm(hidden),
                gate_up=matrix(2 * config.intermediate_size, hidden),
                down=matrix(hidden, config.intermediate_size),
            )
            for _ in range(config.num_hidden_layers)
        )
        gated = config.markov_head_type == "gated"
        rnn = config.markov_head_type == "rnn"
        markov = rank and MarkovHead(
            w1=matrix(config.vocab_size, rank),
            w2=matrix(config.draft_vocab_size, rank),
            gate=matrix(rank, hidden + rank) if gated else None,
            gate_bias=norm(rank) if gated else None,
            joint=matrix(3 * rank, 2 * rank + hidden) if rnn else None,
            joint_bias=norm(3 * rank) if rnn else None,
        )
        seen = hidden + (rank if config.confidence_head_with_markov else 0)
        taps = len(config.target_layer_ids) * config.target_hidden_size
        weights = DrafterWeights(
            fc=matrix(hidden, taps),
            hidden_norm=norm(hidden),
            layers=layers,
            norm=norm(hidden),
            markov=markov or None,
            confidence=(
                ConfidenceHead(weight=norm(seen), bias=norm(1)[0])
                if config.enable_confidence_head
                else None
            ),
            embed=matrix(config.vocab_size, hidden),
            lm_head=matrix(config.draft_vocab_size, hidden),
        )
        return Drafter(config, weights)

    return make
