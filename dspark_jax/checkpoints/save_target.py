"""Targets of DeepSeek's families, written under the names of DeepSeek's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dspark_jax.checkpoints import deepseek_v4, deepseek_v32
from dspark_jax.checkpoints.deepseek_v4_named import deepseek_v4_fields, deepseek_v4_tensors
from dspark_jax.checkpoints.deepseek_v32_named import deepseek_v32_fields, deepseek_v32_tensors
from dspark_jax.checkpoints.tensors import check_tensors
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.text.text import Text


def save_target(
    config: Any,
    weights: Any,
    directory: Path | str,
    *,
    text: Text | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer; ``load_target`` reads them.

    Tensors keep the dtype they have. The folder is made if needed.

    Raises:
        ValueError: a target of another family, or weights that do not fit ``config``.
    """
    fields = target_fields(config)
    arrays = {
        name: np.ascontiguousarray(array) for name, array in _tensors(config, weights).items()
    }
    check_tensors(
        {name: array.shape for name, array in arrays.items()},
        target_shapes(config),
        "the target's weights",
    )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, {**fields, "eos_token_id": list(stop_token_ids) or None})
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    if text is not None:
        text.save(directory)


def write_config(directory: Path, fields: dict[str, Any]) -> None:
    """Write a ``config.json``."""
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def target_fields(config: Any) -> dict[str, Any]:
    """The contents of the ``config.json`` that DeepSeek would write for ``config``.

    Raises:
        ValueError: a target of another family.
    """
    if isinstance(config, DeepseekV4Config):
        return deepseek_v4_fields(config)
    if isinstance(config, DeepseekV32Config):
        return deepseek_v32_fields(config)
    raise ValueError(
        f"a target with a {type(config).__name__} is not written; written: DeepseekV32Config, "
        "DeepseekV4Config"
    )


def target_shapes(config: DeepseekV4Config | DeepseekV32Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is written."""
    if isinstance(config, DeepseekV4Config):
        return deepseek_v4.target_shapes(config)
    return deepseek_v32.target_shapes(config)


def _tensors(config: Any, weights: Any) -> dict[str, Any]:
    if isinstance(config, DeepseekV4Config):
        return deepseek_v4_tensors(weights)
    return deepseek_v32_tensors(config, weights)
