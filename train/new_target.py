"""A new target: its tensors at random, by DeepSeek's names."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dspark_jax.checkpoints.deepseek_v4_config import deepseek_v4_config
from dspark_jax.checkpoints.deepseek_v32_config import deepseek_v32_config
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.checkpoints.save_target import target_fields, target_shapes, write_config
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config

WIDTH_SCALE = 0.5
"""Deviation of a matrix at first, times the root of the width that it reads."""
MIX_SCALE = 0.1
"""How much of a stream's mixing depends on the token at first."""
KEPT = 2.0
"""Logit by which a stream is mixed with itself rather than with another at first."""
ZEROS = (".ape", ".attn_sink", ".gate.bias", ".k_norm.bias")
WRITES = (".wo.weight", ".wo_b.weight", ".w2.weight")
"""Matrices whose products are added to the residual streams."""


def check_model(config: DeepseekV4Config | DeepseekV32Config) -> None:
    """Refuse sizes that contradict each other, as a checkpoint with them would be refused.

    Raises:
        ValueError: names the section of the run's config and the field.
    """
    where = f"[{config.model_type}]"
    read = deepseek_v4_config if isinstance(config, DeepseekV4Config) else deepseek_v32_config
    read(target_fields(config), where)


def new_weights(config: DeepseekV4Config | DeepseekV32Config, seed: int, dtype: Any) -> Any:
    """Weights of a target before its first step, in the dtypes that ``load_target`` gives.

    They go through a checkpoint on the disk, so that the loader alone says how tensors become
    weights.
    """
    tensors = {
        name: _tensor(config, name, shape, np.random.default_rng([seed, number]))
        for number, (name, shape) in enumerate(sorted(target_shapes(config).items()))
    }
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), target_fields(config))
        save_file(tensors, Path(folder) / "model.safetensors")
        return load_target(folder, dtype).weights


def _tensor(
    config: DeepseekV4Config | DeepseekV32Config,
    name: str,
    shape: tuple[int, ...],
    random: np.random.Generator,
) -> np.ndarray:
    """Normal with deviation 1/2 over the root of the width read, norms one, biases zero.

    What writes to the residual streams is scaled down by the root of their number. Streams start
    as copies of each other, read alike and mostly kept, and differ by a little noise in how they
    are read and written.
    """
    if name.endswith("tid2eid"):
        scores = random.random((shape[0], config.n_routed_experts))
        return np.argsort(scores, axis=1)[:, : shape[1]].astype(np.int32)
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith(ZEROS):
        return np.zeros(shape, np.float32)
    if name.endswith(("hc_attn_base", "hc_ffn_base", "hc_head_base")):
        assert isinstance(config, DeepseekV4Config)
        return mixing_base(config.hc_mult, shape[0], random.standard_normal)
    if name.endswith(("hc_attn_scale", "hc_ffn_scale", "hc_head_scale")):
        return np.full(shape, MIX_SCALE, np.float32)
    deviation = WIDTH_SCALE * shape[-1] ** -0.5
    if name.endswith(WRITES):
        deviation *= (2 * config.num_hidden_layers) ** -0.5
    return deviation * random.standard_normal(shape, np.float32)


def mixing_base(streams: int, width: int, normal: Callable[[tuple[int, ...]], Any]) -> Any:
    """Biases of a stream mixture: read 1/n of each, write to all, keep each as it is.

    ``normal`` draws standard normal numbers of a shape, for a little noise.
    """
    read = np.full(streams, -math.log(max(streams - 1, 1e-3)))
    every = np.concatenate([read, np.zeros(streams), (KEPT * np.eye(streams)).reshape(-1)])
    noise = np.where(np.arange(width) < 2 * streams, 0.1, 0.0).astype(np.float32)
    return every[:width].astype(np.float32) + noise * normal((width,)).astype(np.float32)
