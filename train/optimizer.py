"""Optimizers of training jobs: warm-up, cosine to zero, global-norm clipping; AdamW or Muon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

Optimizer = Literal["adamw", "muon"]

WARMUP_FRACTION = 0.04
CLIP_NORM = 1.0
MUON_RMS = 0.2
"""Size of a Muon update: that of a typical AdamW update, so both take one learning rate."""


def learning_rate_schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear from 0 to ``peak`` over the first 4 % of ``steps``, then cosine to 0."""
    warmup = max(1, math.ceil(WARMUP_FRACTION * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=peak, warmup_steps=warmup, decay_steps=max(steps, warmup + 1)
    )


def drafter_optimizer(
    schedule: optax.Schedule, optimizer: Optimizer = "adamw"
) -> optax.GradientTransformation:
    """A drafter's optimizer; "muon" is for its backbone's matrices."""
    return clipped_optimizer(schedule, optimizer, _backbone_matrices)


def clipped_optimizer(
    schedule: optax.Schedule, optimizer: Optimizer, matrices: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Clip the global gradient norm to 1, then step.

    "adamw" has DeepSpec's constants (betas .9/.999, no weight decay). "muon" orthogonalises
    the updates of what ``matrices`` marks; heads, norms and vectors still take AdamW.
    """
    if optimizer == "adamw":
        step = optax.adamw(schedule, weight_decay=0.0)
    else:
        step = optax.contrib.muon(
            schedule, consistent_rms=MUON_RMS, muon_weight_dimension_numbers=matrices
        )
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), step)


def _backbone_matrices(weights: Any) -> Any:
    """A tree like ``weights`` that marks what Muon updates; None elsewhere."""

    def mark(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 else None, tree
        )

    unmarked = jax.tree.map(lambda _: None, weights)
    return dataclasses.replace(unmarked, fc=mark(weights.fc), layers=mark(weights.layers))
