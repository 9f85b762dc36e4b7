"""A new DeepSeek-V4 drafter: stages of its target's shape, weights at random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.drafter.deepseek_v4.config import (
    STORED,
    DeepseekV4DrafterConfig,
    check_fits_v4,
)
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights
from dspark_jax.drafter.validate import DrafterMismatch
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import (
    Attention,
    HyperConnection,
    Layer,
    Moe,
    StreamHead,
)
from dspark_jax.models.experts import Experts
from train.config import DeepseekV4DrafterSection
from train.new_target import MIX_SCALE, WIDTH_SCALE, mixing_base

HEAD_DEVIATION = 0.02
"""Of the Markov tables and the confidence head, as in a dense drafter."""


def drafter_config(
    section: DeepseekV4DrafterSection, loaded: LoadedTarget
) -> DeepseekV4DrafterConfig:
    """The drafter described by ``section`` for a target.

    Raises:
        DrafterMismatch: a target of another family, taps that do not fit, a mask token that ends
            answers.
    """
    where, target = "[deepseek_v4_drafter]", loaded.config
    if not isinstance(target, DeepseekV4Config):
        raise DrafterMismatch(
            f"{where} describes layers of the kind that a DeepSeek-V4 target has, and "
            f"{loaded.name} has a {type(target).__name__}: describe a drafter for it in [drafter]"
        )
    config = DeepseekV4DrafterConfig(
        target=target,
        block_size=section.block_size,
        target_layer_ids=section.target_layer_ids,
        mask_token_id=section.mask_token_id,
        markov_rank=section.markov_rank,
    )
    try:
        check_fits_v4(config, target, loaded.stop_token_ids, named={name: name for name in STORED})
    except DrafterMismatch as error:
        raise DrafterMismatch(f"{where}: {error}") from error
    return config


def initial_weights(
    config: DeepseekV4DrafterConfig, key: Key[Array, ""]
) -> DeepseekV4DrafterWeights:
    """fp32 weights, scaled as those of a new target (``new_target``).

    Matrices have deviation 1/2 over the root of the width read, those that write to the streams
    less by the root of their number; norms are one, sinks and router biases zero.
    """
    target, depth = config.target, config.stages
    keys = iter(jax.random.split(key, 16 * depth + 8))
    width, streams, inner = target.hidden_size, target.hc_mult, target.moe_intermediate_size
    heads = target.num_attention_heads * target.head_dim
    low, experts = target.o_groups * target.o_lora_rank, target.n_routed_experts

    def normal(shape: tuple[int, ...]) -> Float[Array, "..."]:
        return jax.random.normal(next(keys), shape, jnp.float32)

    def matrix(*shape: int) -> Float[Array, "..."]:
        return WIDTH_SCALE * shape[-1] ** -0.5 * normal(shape)

    def writing(*shape: int) -> Float[Array, "..."]:
        return (2 * depth) ** -0.5 * matrix(*shape)

    def mixture() -> HyperConnection:
        count = (2 + streams) * streams
        return HyperConnection(
            fn=matrix(count, streams * width),
            base=mixing_base(streams, count, normal),
            scale=jnp.full(3, MIX_SCALE, jnp.float32),
        )

    def attention() -> Attention:
        return Attention(
            query_a=matrix(target.q_lora_rank, width),
            query_norm=jnp.ones(target.q_lora_rank),
            query_b=matrix(heads, target.q_lora_rank),
            kv=matrix(target.head_dim, width),
            kv_norm=jnp.ones(target.head_dim),
            sink=jnp.zeros(target.num_attention_heads),
            out_a=matrix(low, heads // target.o_groups),
            out_b=writing(width, low),
            compressor=None,
            indexer=None,
        )

    def moe() -> Moe:
        return Moe(
            router=matrix(experts, width),
            bias=jnp.zeros(experts),
            expert_of_token=None,
            experts=Experts(
                gate_up=matrix(experts, 2 * inner, width), down=writing(experts, width, inner)
            ),
            shared_gate_up=matrix(2 * inner, width),
            shared_down=writing(width, inner),
        )

    def stage() -> Layer:
        return Layer(
            attention_mix=mixture(),
            attention_norm=jnp.ones(width),
            attention=attention(),
            moe_mix=mixture(),
            moe_norm=jnp.ones(width),
            moe=moe(),
        )

    table = (config.vocab_size, config.markov_rank)
    return DeepseekV4DrafterWeights(
        main_proj=matrix(width, depth * width),
        main_norm=jnp.ones(width),
        stages=tuple(stage() for _ in range(depth)),
        stream_head=StreamHead(
            fn=matrix(streams, streams * width),
            base=mixing_base(streams, streams, normal),
            scale=jnp.full(1, MIX_SCALE, jnp.float32),
        ),
        norm=jnp.ones(width),
        markov_w1=HEAD_DEVIATION * normal(table),
        markov_w2=HEAD_DEVIATION * normal(table),
        confidence=HEAD_DEVIATION * normal((width + config.markov_rank,)),
    )
