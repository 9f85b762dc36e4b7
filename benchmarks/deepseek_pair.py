"""SIMULATION: a target shaped as DeepSeek-V4-Flash, cut to a few layers, and its own drafter.

Weights are random and drawn on the device. What the pair says is replayed
(``benchmarks.replayed_pair``) from blocks whose drafts are accepted by chance: every block has an
ease p from a beta distribution, each of its drafts is right with probability p if those before it
are, and the confidence head says exactly p.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replayed_pair import (
    ReplayedDrafterConfig,
    ReplayedDrafterWeights,
    ReplayedTargetConfig,
)
from dspark_jax.checkpoints.deepseek_v4 import (
    Shapes,
    Tensors,
    read_layer,
    read_stream_head,
    target_shapes,
)
from dspark_jax.checkpoints.drafter_deepseek_v4 import drafter_shapes
from dspark_jax.decode.step import Weights
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import DeepseekV4Weights
from dspark_jax.models.experts import Experts

BLOCKS = 8192
EASE = (3.0, 1.0)
"""Of the beta distribution: five drafts are accepted to a length of 3.65, bonus token included."""

FLASH = DeepseekV4DrafterConfig(
    DeepseekV4Config(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=3,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        compress_ratios=(0, 4, 128),
        sliding_window=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        num_hash_layers=1,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        compress_yarn=Yarn(16.0, 65536, 32.0, 1.0),
        max_position_embeddings=1 << 20,
    ),
    block_size=5,
    target_layer_ids=(0, 1, 2),
    mask_token_id=128799,
    markov_rank=256,
)
"""Published: 43 layers (2 with a window alone, 21 CSA, 20 HCA; 3 hashed), 256 experts, taps 40 to
42. Here: one layer of each kind, the first one hashed, and a quarter of the experts."""

TINY = DeepseekV4DrafterConfig(
    dataclasses.replace(
        FLASH.target,
        vocab_size=512,
        hidden_size=32,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=4,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        compress_ratios=(0, 4, 8),
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        hc_sinkhorn_iters=2,
    ),
    block_size=3,
    target_layer_ids=(2,),
    mask_token_id=511,
    markov_rank=8,
)
"""To try programs with."""

PAIRS = {"v4-flash": FLASH, "tiny": TINY}


class RandomTensors(Tensors):
    """Tensors of these shapes by DeepSeek's names, drawn instead of read."""

    def __init__(self, shapes: Shapes, seed: int, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)
        self._shapes = shapes
        self._key = jax.random.key(seed, impl="rbg")
        self._drawn = 0

    def matrix(self, *names: str) -> jax.Array:
        """``x.weight`` of every name, one below the other; norms are ones."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        if len(shapes[0]) == 1:
            return jnp.ones(shapes[0], self.dtype)
        return self._normal((sum(shape[0] for shape in shapes), shapes[0][1]), self.dtype)

    def exact(self, name: str) -> jax.Array:
        """A tensor in fp32."""
        return self._normal(self._shapes[name], jnp.float32)

    def table(self, name: str, limit: int) -> jax.Array:
        """Distinct experts of each token."""
        tokens, count = self._shapes[name]
        return (jnp.arange(tokens, dtype=jnp.int32)[:, None] * 7 + jnp.arange(count)) % limit

    def experts(self, prefix: str, count: int) -> Experts:
        """All routed experts of a layer."""
        width, hidden = self._shapes[f"{prefix}0.w1.weight"]
        return Experts(
            gate_up=self._normal((count, 2 * width, hidden), self.dtype),
            down=self._normal((count, hidden, width), self.dtype),
        )

    def _normal(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        self._drawn += 1
        key = jax.random.fold_in(self._key, self._drawn)
        return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5


def replayed(
    config: DeepseekV4DrafterConfig,
) -> tuple[ReplayedTargetConfig, ReplayedDrafterConfig]:
    """The pair as a decode step takes it."""
    blocks = min(BLOCKS, config.vocab_size)
    return ReplayedTargetConfig(config.target, blocks), ReplayedDrafterConfig(config)


@functools.partial(jax.jit, static_argnums=0)
def random_weights(config: DeepseekV4DrafterConfig) -> Weights:
    """bf16 weights of both, and blocks to replay."""
    target = config.target
    own = RandomTensors(target_shapes(target), 0, jnp.bfloat16)
    layers = tuple(
        read_layer(target, own, f"layers.{index}.", ratio, hashed=index < target.num_hash_layers)
        for index, ratio in enumerate(target.compress_ratios)
    )
    decoder = DeepseekV4Weights(
        embed=own.matrix("embed"),
        layers=layers,
        stream_head=read_stream_head(own, ""),
        norm=own.matrix("norm"),
        head=own.matrix("head"),
    )
    mtp = RandomTensors(drafter_shapes(config), 1, jnp.bfloat16)
    last = f"mtp.{config.stages - 1}."
    drafter = DeepseekV4DrafterWeights(
        main_proj=mtp.matrix("mtp.0.main_proj"),
        main_norm=mtp.matrix("mtp.0.main_norm"),
        stages=tuple(
            read_layer(target, mtp, f"mtp.{index}.", 0, hashed=False)
            for index in range(config.stages)
        ),
        stream_head=read_stream_head(mtp, last),
        norm=mtp.matrix(f"{last}norm"),
        markov_w1=mtp.matrix(f"{last}markov_head.markov_w1"),
        markov_w2=mtp.matrix(f"{last}markov_head.markov_w2"),
        confidence=mtp.exact(f"{last}confidence_head.proj.weight")[0],
    )
    logits, accepted = chance_blocks(min(BLOCKS, config.vocab_size), config.block_size)
    return Weights(decoder, ReplayedDrafterWeights(drafter, logits, accepted))


def chance_blocks(count: int, drafts: int) -> tuple[jax.Array, jax.Array]:
    """Confidence logits ``[N, G]`` of blocks, and how many drafts of each are accepted ``[N]``."""
    random = np.random.default_rng(0)
    ease = np.clip(random.beta(*EASE, size=(count, 1)), 1e-4, 1 - 1e-4)
    right = random.uniform(size=(count, drafts)) < ease
    logits = np.broadcast_to(np.log(ease / (1 - ease)), right.shape)
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    return jnp.asarray(logits, jnp.float32), jnp.asarray(accepted, jnp.int32)
