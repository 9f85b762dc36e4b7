"""DeepSpec's drafter layout: flat config, embedding and head stored in full."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoints.drafter_config import head_fields, layer_fields
from dspark_jax.checkpoints.drafter_tensors import (
    EMBED,
    LM_HEAD,
    DrafterTensors,
    drafter_shapes,
    named_tensors,
    read_weights,
)
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import DrafterWeights


def read_deepspec(
    config: DrafterConfig, tensors: DrafterTensors, dtype: Any | None
) -> DrafterWeights:
    """Weights with their own embedding and head; ``ValueError`` names every faulty tensor."""
    table = (config.vocab_size, config.hidden_size)
    wanted = {**drafter_shapes(config), EMBED: table, LM_HEAD: table}
    return read_weights(config, tensors, wanted, dtype)


def deepspec_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The contents of a DeepSpec ``config.json``.

    Raises:
        ValueError: a pruned vocabulary or a sliding window, which the layout cannot express.
    """
    if config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"DeepSpec's layout holds whole vocabularies only, and this drafter drafts "
            f"{config.draft_vocab_size} of {config.vocab_size} tokens: write speculators instead"
        )
    if config.sliding_window is not None:
        raise ValueError(
            f"DeepSpec's layout has full attention only, and this drafter has a sliding window of "
            f"{config.sliding_window}: write speculators instead"
        )
    return {
        "architectures": ["Qwen3DSparkModel"],
        **layer_fields(config, dtype),
        **head_fields(config),
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "target_hidden_size": config.target_hidden_size,
    }


def deepspec_tensors(
    config: DrafterConfig, weights: DrafterWeights, embed: jax.Array, lm_head: jax.Array
) -> dict[str, np.ndarray]:
    """Every tensor of a DeepSpec file; ``embed`` and ``lm_head`` are the target's.

    They are stored, in the drafter's dtype, where the drafter brings none of its own.
    """
    dtype = weights.fc.dtype
    tensors = named_tensors(config, weights)
    for name, own, borrowed in (
        (EMBED, weights.embed, embed),
        (LM_HEAD, weights.lm_head, lm_head),
    ):
        tensors[name] = np.ascontiguousarray(borrowed.astype(dtype) if own is None else own)
    return tensors
