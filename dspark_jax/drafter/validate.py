"""Checks that a drafter is sound and fits its target, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.drafter.config import DrafterConfig

HEAD_TYPES = ("vanilla", "gated", "rnn")


class DrafterMismatch(ValueError):
    """A drafter that contradicts itself or its target; the message holds both values."""


def check_config(config: DrafterConfig) -> None:
    """Raise ``DrafterMismatch`` listing everything in ``config`` that contradicts itself."""
    faults = []
    if config.block_size < 1:
        faults.append(f"block_size is {config.block_size}; it must be at least 1")
    if config.num_hidden_layers < 1:
        faults.append(f"num_hidden_layers is {config.num_hidden_layers}; it must be at least 1")
    if config.markov_rank < 0:
        faults.append(f"markov_rank is {config.markov_rank}; it must be 0 (no head) or more")
    if config.markov_head_type not in HEAD_TYPES:
        faults.append(
            f"markov_head_type is {config.markov_head_type!r}; known are {', '.join(HEAD_TYPES)}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        faults.append(
            f"num_attention_heads is {config.num_attention_heads}; it must be a multiple of "
            f"num_key_value_heads, {config.num_key_value_heads}"
        )
    reads_embedding = config.enable_confidence_head and config.confidence_head_with_markov
    if config.markov_rank == 0 and reads_embedding:
        faults.append(
            "confidence_head_with_markov is true but markov_rank is 0: there is no Markov "
            "embedding for the confidence head to read"
        )
    if config.sliding_window is not None and config.sliding_window < 1:
        faults.append(f"sliding_window is {config.sliding_window}; it must be at least 1")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        faults.append(
            f"draft_vocab_size is {config.draft_vocab_size}; it must lie between 1 and "
            f"vocab_size, {config.vocab_size}"
        )
    if not config.target_layer_ids:
        faults.append("target_layer_ids is empty; at least one tap is needed")
    if len(set(config.target_layer_ids)) < len(config.target_layer_ids):
        faults.append(f"target_layer_ids {list(config.target_layer_ids)} names a layer twice")
    last = config.num_target_layers - 1
    for layer in config.target_layer_ids:
        if layer == last:
            faults.append(
                f"target_layer_ids contains {layer}, the final layer of a target with "
                f"{config.num_target_layers} layers; its output is only known after the final "
                f"norm, so taps must lie between -1 and {last - 1}"
            )
        elif not -1 <= layer < last:
            faults.append(
                f"target_layer_ids contains {layer}; a target with {config.num_target_layers} "
                f"layers allows -1 to {last - 1}"
            )
    if not 0 <= config.mask_token_id < config.vocab_size:
        faults.append(
            f"mask_token_id is {config.mask_token_id}; the embedding has rows 0 to "
            f"{config.vocab_size - 1} (vocab_size)"
        )
    _raise(faults)


def check_fits(
    config: DrafterConfig, target: Any, reserved: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Raise ``DrafterMismatch`` unless the drafter can draft for ``target``.

    Args:
        config: the drafter.
        target: a target config with ``num_hidden_layers``, ``hidden_size``, ``vocab_size``.
        reserved: ids that must not serve as mask token, by the name of their role, for
            example ``{"eos": (2,), "pad": (0,)}``. A text may contain such an id.
    """
    check_config(config)
    faults = []
    for name, drafter_value, target_value in (
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if drafter_value != target_value:
            faults.append(f"the drafter's {name} is {drafter_value}, the target has {target_value}")
    for role, ids in (reserved or {}).items():
        if config.mask_token_id in ids:
            faults.append(
                f"mask_token_id is {config.mask_token_id}, which is also the {role} token; it "
                "must be a reserved id that no text produces"
            )
    _raise(faults)


def check_block_size(requested: int, trained: int) -> None:
    """Raise ``ValueError`` unless 1 <= ``requested`` <= ``trained``."""
    if not 1 <= requested <= trained:
        raise ValueError(
            f"block size {requested} was asked for, but the drafter was trained with "
            f"{trained}: choose 1 to {trained}"
        )


def _raise(faults: list[str]) -> None:
    if faults:
        raise DrafterMismatch("; ".join(faults))
