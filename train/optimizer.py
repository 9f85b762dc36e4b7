"""AdamW with DeepSpec's constants: warm-up, cosine to zero, global-norm clipping."""

from __future__ import annotations

import math

import optax

WARMUP_FRACTION = 0.04
CLIP_NORM = 1.0


def learning_rate_schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear from 0 to ``peak`` over the first 4 % of ``steps``, then cosine to 0."""
    warmup = max(1, math.ceil(WARMUP_FRACTION * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=peak, warmup_steps=warmup, decay_steps=max(steps, warmup + 1)
    )


def drafter_optimizer(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clip the global gradient norm to 1, then AdamW (betas .9/.999, no weight decay)."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adamw(schedule, weight_decay=0.0)
    )
