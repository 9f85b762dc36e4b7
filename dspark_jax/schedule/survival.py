"""Survival probabilities of drafted positions, from confidence logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

AGING_RATE = 1 / 32
"""Share of the distance to 1 that an unrefreshed confidence covers in one step."""


def calibrate(
    confidence_logits: Float[Array, "S G"], temperatures: Float[Array, "S G"]
) -> Float[Array, "S G"]:
    """Conditional acceptance ĉ_j = σ(logit_j / T_j) in fp32: accepted, given all before it were.

    ``temperatures`` are the STS temperatures of each request, all above 0. A NaN logit counts
    as 0, never as certain.
    """
    scaled = confidence_logits.astype(jnp.float32) / temperatures.astype(jnp.float32)
    return jnp.where(jnp.isnan(scaled), 0.0, jax.nn.sigmoid(scaled))


def running_product(confidence: Float[Array, "S G"]) -> Float[Array, "S G"]:
    """Survival a_j = Π_{i≤j} ĉ_i, non-increasing in j; a NaN confidence counts as 0."""
    confidence = jnp.where(jnp.isnan(confidence), 0.0, confidence)
    # An associative scan may round a later product above an earlier one; left to right cannot.
    product = confidence[:, 0]
    columns = [product]
    for position in range(1, confidence.shape[1]):
        product = product * confidence[:, position]
        columns.append(product)
    return jnp.stack(columns, axis=1)


def survival(
    confidence_logits: Float[Array, "S G"], temperatures: Float[Array, "S G"]
) -> Float[Array, "S G"]:
    """Calibrated survival of every drafted position, fp32 (DSpark paper, section 3).

    NaN confidences give 0 from their position on.
    """
    return running_product(calibrate(confidence_logits, temperatures))


def remember(
    confidence: Float[Array, "S G"],
    known: Float[Array, "S G"],
    refreshed: Bool[Array, "S G"],
    smoothing: float,
) -> Float[Array, "S G"]:
    """What is known of a request's confidences after one more step; decides later budgets.

    One block says little of the next: a running mean, with weight ``smoothing`` for the newest,
    foretells its survivals better. Confidences that this step did not measure drift toward 1: a
    position that no step drafts would otherwise keep its last bad value for ever. With the rate of
    1/32 a step half of the distrust is gone after 22 steps, so it is probed again. The drift
    knows nothing of draft tokens, so every policy stays as exact as it was.
    """
    confidence = jnp.where(jnp.isnan(confidence), 0.0, confidence)
    mixed = known + smoothing * (confidence - known)
    return jnp.where(refreshed, mixed, known + AGING_RATE * (1.0 - known))
