"""Temperatures by gradient descent on a proper score of the cumulative event."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from dspark_jax.calibration.blocks import MINIMUM_REACHED, VerifiedBlocks
from dspark_jax.calibration.sts import HIGHEST, LOWEST, Fit

Loss = Literal["nll", "brier"]

STEPS = 400
LEARNING_RATE = 0.05
SMALLEST = 1e-8
"""Probabilities are kept this far from 0 and 1."""


def fit_gradient(
    blocks: VerifiedBlocks, *, loss: Loss = "nll", minimum: int = MINIMUM_REACHED
) -> Fit:
    """All temperatures together, by Adam on the logarithms of the temperatures.

    The loss at position k is the mean negative log-likelihood, or the Brier score, of the
    cumulative product Π_{i<=k} σ(z_i / T_i) against "the first k drafts were accepted"; positions
    add up. Temperatures stay inside the range of the grid, so labels of one kind cannot drive
    them off.

    Positions that fewer than ``minimum`` blocks reach keep temperature 1.
    """
    shrunk = blocks.sparse(minimum)
    labelled = blocks.labelled
    logits = np.clip(blocks.logits, -1e4, 1e4)
    log_temperatures = _descend(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(blocks.survived),
        jnp.asarray(labelled),
        jnp.asarray(~shrunk),
        loss,
    )
    # The box is rounded in fp32; its ends belong to the grid.
    temperatures = np.clip(np.exp(np.float64(log_temperatures)), LOWEST, HIGHEST)
    return Fit(np.where(shrunk, 1.0, temperatures), shrunk)


@functools.partial(jax.jit, static_argnames="loss")
def _descend(
    logits: Float[Array, "N G"],
    survived: Bool[Array, "N G"],
    labelled: Bool[Array, "N G"],
    free: Bool[Array, "G"],
    loss: Loss,
) -> Float[Array, "G"]:
    count = jnp.maximum(labelled.sum(axis=0), 1)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))
    lowest, highest = float(np.log(LOWEST)), float(np.log(HIGHEST))

    def score(parameters: Float[Array, "G"]) -> Float[Array, ""]:
        log_product = jnp.cumsum(jax.nn.log_sigmoid(logits / jnp.exp(parameters)), axis=1)
        if loss == "brier":
            each = (jnp.exp(log_product) - survived) ** 2
        else:
            log_product = jnp.clip(log_product, float(np.log(SMALLEST)), -SMALLEST)
            each = -jnp.where(survived, log_product, jnp.log(-jnp.expm1(log_product)))
        return (jnp.where(labelled, each, 0.0).sum(axis=0) / count).sum()

    def step(carry: tuple[Array, optax.OptState], _: None) -> tuple[tuple[Array, Array], None]:
        parameters, memory = carry
        gradient = jnp.where(free, jax.grad(score)(parameters), 0.0)
        updates, memory = optimizer.update(gradient, memory)
        moved = optax.apply_updates(parameters, updates)
        return (jnp.clip(moved, lowest, highest), memory), None  # pyright: ignore

    start = jnp.zeros(logits.shape[1], jnp.float32)
    (parameters, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return parameters
