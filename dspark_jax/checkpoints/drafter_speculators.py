"""speculators' drafter layout: nested config, pruned vocabularies, borrowed embedding and head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter_config import (
    SPECULATORS_LAYER_OFFSET,
    head_fields,
    layer_fields,
)
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

DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
VERSION = "0.9.0"
ARCHITECTURE_OF_TARGET = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


def read_speculators(
    config: DrafterConfig, tensors: DrafterTensors, target: Any, dtype: Any | None
) -> DrafterWeights:
    """Weights whose embedding and head are None where the file leaves them to the target.

    ``d2t`` holds offsets (target id = column + d2t[column]) and ``t2d`` marks the target ids
    that have a column; the weights hold absolute ids.

    Raises:
        ValueError: any missing, unknown or misshapen tensor, all in one message; or a
            vocabulary map that contradicts itself.
    """
    found = tensors.shapes
    pruned = config.draft_vocab_size != config.vocab_size
    wanted = drafter_shapes(config)
    hints = []
    if EMBED in found or not _fits(config, target):
        wanted[EMBED] = (config.vocab_size, config.hidden_size)
        if EMBED not in found:
            hints.append(
                f"the embedding cannot be borrowed: the drafter wants "
                f"{[config.vocab_size, config.hidden_size]}, the target has "
                f"{[target.vocab_size, target.hidden_size]}"
            )
    if LM_HEAD in found or pruned or not _fits(config, target):
        wanted[LM_HEAD] = (config.draft_vocab_size, config.hidden_size)
        if LM_HEAD not in found:
            hints.append(
                f"the head cannot be borrowed: the drafter wants {config.draft_vocab_size} rows, "
                f"the target has {target.vocab_size}"
            )
    if pruned or DRAFT_TO_TARGET in found or TARGET_TO_DRAFT in found:
        wanted[DRAFT_TO_TARGET] = (config.draft_vocab_size,)
        wanted[TARGET_TO_DRAFT] = (config.vocab_size,)
        if DRAFT_TO_TARGET not in found:
            hints.append(
                f"without d2t nothing says which {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens are drafted"
            )
    try:
        weights = read_weights(config, tensors, wanted, dtype)
    except ValueError as error:
        raise ValueError("; ".join([str(error), *hints])) from error
    if DRAFT_TO_TARGET not in wanted:
        return weights
    ids = _absolute_ids(config, tensors)
    return dataclasses.replace(weights, draft_to_target=jnp.asarray(ids) if pruned else None)


def speculators_config(
    config: DrafterConfig, dtype: str, target: Any, target_name: str
) -> dict[str, Any]:
    """The contents of a speculators ``config.json`` for serving with ``target_name``."""
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": [ARCHITECTURE_OF_TARGET[target.model_type]],
            },
        },
        "aux_hidden_state_layer_ids": [
            layer + SPECULATORS_LAYER_OFFSET for layer in config.target_layer_ids
        ],
        **head_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "sample_from_anchor": True,
        "sliding_window_non_causal": config.sliding_window is not None,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(config, dtype),
    }


def speculators_tensors(
    config: DrafterConfig, weights: DrafterWeights, embed: jax.Array, lm_head: jax.Array
) -> dict[str, np.ndarray]:
    """Every tensor of a speculators file; ``embed`` and ``lm_head`` are the target's.

    An embedding or a head that equals the target's bit for bit is left out.
    """
    tensors = named_tensors(config, weights)
    for name, own, borrowed in (
        (EMBED, weights.embed, embed),
        (LM_HEAD, weights.lm_head, lm_head),
    ):
        if own is not None and not np.array_equal(own, borrowed):
            tensors[name] = np.ascontiguousarray(own)
    if weights.draft_to_target is not None:
        ids = np.asarray(weights.draft_to_target, np.int64)
        mask = np.zeros(config.vocab_size, bool)
        mask[ids] = True
        tensors[DRAFT_TO_TARGET] = ids - np.arange(ids.size)
        tensors[TARGET_TO_DRAFT] = mask
    return tensors


def _fits(config: DrafterConfig, target: Any) -> bool:
    """Whether the target's tables have the shape this drafter needs."""
    return (config.vocab_size, config.hidden_size) == (target.vocab_size, target.hidden_size)


def _absolute_ids(config: DrafterConfig, tensors: DrafterTensors) -> np.ndarray:
    """Target id of every draft column, checked against the mask."""
    offset, mask = tensors.read(DRAFT_TO_TARGET), tensors.read(TARGET_TO_DRAFT)
    ids = np.arange(config.draft_vocab_size) + offset
    inside = (ids >= 0) & (ids < config.vocab_size)
    if not inside.all():
        raise ValueError(
            f"{tensors.where}: d2t maps column {int(np.argmin(inside))} to token "
            f"{int(ids[~inside][0])}; the vocabulary has 0 to {config.vocab_size - 1}"
        )
    listed = np.zeros(config.vocab_size, bool)
    listed[ids] = True
    if listed.sum() != ids.size:
        raise ValueError(
            f"{tensors.where}: d2t maps {ids.size} columns to only {int(listed.sum())} tokens"
        )
    if not np.array_equal(listed, mask.astype(bool)):
        differing = np.flatnonzero(listed != mask.astype(bool))
        raise ValueError(
            f"{tensors.where}: d2t and t2d disagree on {differing.size} tokens, first on "
            f"{int(differing[0])}"
        )
    return ids.astype(np.int32)
