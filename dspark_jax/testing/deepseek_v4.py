"""A DeepSeek-V4 small enough for tests: random tensors under real names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dspark_jax.checkpoints.deepseek_v4 import target_shapes
from dspark_jax.checkpoints.deepseek_v4_named import deepseek_v4_fields
from dspark_jax.checkpoints.drafter_deepseek_v4 import (
    deepseek_v4_drafter_fields,
    drafter_shapes,
)
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config

TOY = DeepseekV4Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
    qk_rope_head_dim=4,
    q_lora_rank=12,
    o_groups=2,
    o_lora_rank=8,
    compress_ratios=(4, 8),
    sliding_window=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    num_hash_layers=1,
    routed_scaling_factor=1.5,
    swiglu_limit=1.0,
    hc_mult=2,
    hc_sinkhorn_iters=4,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    compress_rope_theta=1000.0,
    compress_yarn=Yarn(4.0, 32, 32.0, 1.0),
    max_position_embeddings=256,
)


def toy_config(**changes: Any) -> DeepseekV4Config:
    """A CSA layer and an HCA layer, with other fields where asked."""
    return dataclasses.replace(TOY, **changes)


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], *, experts: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """fp32 tensors of these shapes at scales where every part of the network tells.

    Args:
        shapes: by DeepSeek's names.
        experts: routed experts; the tables of hash layers name distinct ones.
    """
    random = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("tid2eid"):
            ids = np.argsort(random.random((shape[0], experts)), axis=1)
            return ids[:, : shape[1]].astype(np.int64)
        if name.endswith("norm.weight"):
            return (1 + 0.2 * random.normal(size=shape)).astype(np.float32)
        if len(shape) == 1 or name.endswith(".ape"):
            return (0.7 * random.normal(size=shape)).astype(np.float32)
        scale = 1.0 if name.startswith("embed") else 1.5 * shape[-1] ** -0.5
        return (scale * random.normal(size=shape)).astype(np.float32)

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def deepseek_fields(config: DeepseekV4Config) -> dict[str, Any]:
    """The ``config.json`` that DeepSeek would write for it."""
    return {**deepseek_v4_fields(config), "eos_token_id": None}


def save_pair(folder: Path, drafter: DeepseekV4DrafterConfig) -> None:
    """A checkpoint of a drafter and its target, as DeepSeek ships it, that often agree.

    Both are nearly tables over the last token. The drafter's Markov rank must be the width of
    the target.
    """
    config = drafter.target
    shapes = target_shapes(config) | drafter_shapes(drafter)
    tensors = random_tensors(shapes, experts=config.n_routed_experts)
    for name, value in tensors.items():
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            # what a sub-layer writes to the streams
            value[2:4] -= 2.0
    embed, last = tensors["embed.weight"], f"mtp.{drafter.stages - 1}."
    tensors[f"{last}markov_head.markov_w1.weight"] = embed / embed.std(axis=1, keepdims=True)
    tensors[f"{last}markov_head.markov_w2.weight"] = tensors["head.weight"].copy()
    tensors[f"{last}norm.weight"] *= 0.2
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(deepseek_v4_drafter_fields(drafter)))
