"""Optimizers of training jobs: warm-up, cosine to zero, global-norm clipping; AdamW or Muon."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import optax
from jaxtyping import Array

Optimizer = Literal["adamw", "muon"]

WARMUP_FRACTION = 0.04
CLIP_NORM = 1.0
MUON_RMS = 0.2
"""Size of a Muon update: that of a typical AdamW update, so both take one learning rate."""
BACKBONES = ("fc", "layers", "main_proj", "stages")
"""Fields of weights, of targets and drafters, whose matrices Muon updates."""


def learning_rate_schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear from 0 to ``peak`` over the first 4 % of ``steps``, then cosine to 0."""
    warmup = max(1, math.ceil(WARMUP_FRACTION * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=peak, warmup_steps=warmup, decay_steps=max(steps, warmup + 1)
    )


def clipped_optimizer(
    schedule: optax.Schedule, optimizer: Optimizer = "adamw"
) -> optax.GradientTransformation:
    """Clip the global gradient norm to 1, then step.

    "adamw" has DeepSpec's constants (betas .9/.999, no weight decay). "muon" orthogonalises
    the updates of a backbone's matrices; tables, heads, norms and vectors still take AdamW.
    """
    if optimizer == "adamw":
        step = optax.adamw(schedule, weight_decay=0.0)
    else:
        step = optax.contrib.muon(
            schedule, consistent_rms=MUON_RMS, muon_weight_dimension_numbers=backbone_matrices
        )
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), step)


def backbone_matrices(weights: Any) -> Any:
    """A tree like ``weights`` that marks what Muon updates; None elsewhere.

    Experts are a stack of matrices.
    """

    def mark(path: Any, leaf: Array) -> Any:
        # mixtures of streams and gates of compressors are vectors by position, not matrices
        if path[0].name not in BACKBONES or leaf.ndim < 2 or path[-1].name in ("fn", "ape"):
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(mark, weights)
