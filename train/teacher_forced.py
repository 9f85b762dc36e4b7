"""Teacher-forced quality of a drafter: expected accepted length, acceptance by position."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from train.anchors import sample_anchors
from train.data import TokenDataset, fit_to_length, sequential_batches
from train.draft_heads import frozen_logits
from train.drafters import FAMILIES
from train.features import check_sequences, target_features
from train.forward import (
    Blocks,
    Sequences,
    block_logits,
    draft_blocks,
    map_anchors,
    supervised_first,
)
from train.row_losses import cross_entropy_and_l1

BATCH = 16
CHUNK = 8


@dataclasses.dataclass(frozen=True)
class Quality:
    """Teacher-forced figures of a drafter on one dataset, at one temperature.

    Attributes:
        temperature: 0 counts greedy matches, above it acceptance is 1 - TV.
        data_temperature: temperature the documents were sampled at.
        expected_length: mean over blocks of 1 + the sum of running products of acceptance.
        conditional_acceptance: by position, among blocks accepted up to it.
        acceptance: by position, mean over all supervised slots.
        blocks: number of blocks counted.
    """

    temperature: float
    data_temperature: float
    expected_length: float
    conditional_acceptance: tuple[float, ...]
    acceptance: tuple[float, ...]
    blocks: int


def teacher_forced(
    drafter: LoadedDrafter,
    target: LoadedTarget,
    dataset: TokenDataset,
    *,
    temperature: float,
    length: int,
    num_anchors: int = 64,
    seed: int = 0,
    between: Callable[[], None] | None = None,
) -> Quality:
    """Measure on up to ``num_anchors`` blocks of each document's first ``length`` tokens.

    Previous tokens are the document's own, as in training, so no decoding runs.

    Args:
        temperature: 0 counts greedy matches, above it acceptance is 1 - TV.
        length: tokens of each document that are used.
        num_anchors: blocks of a document at most.
        seed: of the choice of blocks.
        between: called after each batch.

    Raises:
        ValueError: documents of another target; a negative temperature; a target or drafter
            without a training forward.
    """
    check_supported(target, drafter)
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; wanted 0 (greedy) or more")
    if dataset.manifest["target"] != target.name:
        raise ValueError(
            f"the documents were written by target {dataset.manifest['target']!r}, "
            f"the drafter is measured on {target.name!r}"
        )
    fitted = fit_to_length(dataset, length, 2)
    sums = np.zeros((4, drafter.config.block_size))
    key = jax.random.key(seed)
    batches = sequential_batches(fitted, batch_size=BATCH, length=length)
    for number, batch in enumerate(batches):
        sums += jax.device_get(
            _acceptance_sums(
                drafter.config,
                target.config,
                temperature,
                num_anchors,
                drafter.weights,
                target.weights,
                jnp.asarray(batch["tokens"]),
                jnp.asarray(batch["loss_mask"]),
                jax.random.fold_in(key, number),
            )
        )
        if between is not None:
            between()
    accepted, slots, survived, reached = sums
    return Quality(
        temperature=temperature,
        data_temperature=float(dataset.manifest["temperature"]),
        expected_length=float(1 + survived.sum() / slots[0]),
        conditional_acceptance=tuple((survived / np.maximum(reached, 1e-9)).tolist()),
        acceptance=tuple((accepted / np.maximum(slots, 1)).tolist()),
        blocks=int(slots[0]),
    )


def check_supported(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """Refuse a pair that only decodes.

    Raises:
        ValueError: names what has no training forward.
    """
    remedy = "set evaluation.teacher_forced to false"
    check_sequences(target, remedy)
    if type(drafter.config) not in FAMILIES:
        raise ValueError(
            "teacher-forced figures need a drafter with a "
            f"{' or a '.join(kind.__name__ for kind in FAMILIES)}, this one has a "
            f"{type(drafter.config).__name__}: {remedy}"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _acceptance_sums(
    config: Any,
    target: Any,
    temperature: float,
    num_anchors: int,
    weights: Any,
    target_weights: Any,
    tokens: Int[Array, "B K"],
    loss_mask: Bool[Array, "B K"],
    key: Array,
) -> Float[Array, "4 G"]:
    """By position: acceptance, slots, survival, and survival of the slots before (supervised)."""
    taps, last_hidden = target_features(target, target_weights, tokens, config.target_layer_ids)
    batch = Sequences(tokens=tokens, loss_mask=loss_mask, taps=taps, last_hidden=last_hidden)
    anchors, keep = sample_anchors(key, loss_mask, num_anchors)
    blocks, _ = draft_blocks(config, weights, target_weights.embed, batch, anchors, keep)
    blocks = supervised_first(blocks, 1)
    head = target_weights.head

    def accept(part: Blocks) -> Float[Array, "1 a G"]:
        draft, _ = block_logits(config, weights, head, part)
        truth = frozen_logits(part.target_hidden.astype(head.dtype), head)
        if temperature == 0:
            return (jnp.argmax(draft, axis=-1) == jnp.argmax(truth, axis=-1)).astype(jnp.float32)
        _, l1 = cross_entropy_and_l1(draft / temperature, truth / temperature, part.target_ids)
        return 1 - 0.5 * l1

    acceptance = map_anchors(accept, blocks, BATCH * math.gcd(CHUNK, num_anchors)) * blocks.mask
    survival = jnp.cumprod(acceptance, axis=-1)
    before = jnp.concatenate([jnp.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
    figures = (acceptance, blocks.mask, survival, before * blocks.mask)
    return jnp.stack([jnp.sum(figure, axis=(0, 1), dtype=jnp.float32) for figure in figures])
