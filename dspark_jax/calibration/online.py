"""STS that learns while it serves: decayed histograms, a likelihood fit, a prior to lean on.

Everything is pure and of fixed shape, so an engine may keep the state on the device and update
it inside its step. A trial of position j is a block whose earlier drafts were all accepted and
whose draft j was verified; its label is conditional, so trimmed windows do no harm here.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.calibration.blocks import MINIMUM_REACHED, VerifiedBlocks
from dspark_jax.calibration.sts import Fit

LOGIT_BINS = 16
LOGIT_RANGE = 8.0
"""Logits are counted in bins of equal width on [-8, 8]; larger ones fall into the last."""

GRID = np.geomspace(0.125, 8.0, 49)
DECAY = 0.999
"""What a count keeps at every update."""

PRIOR = 64.0
"""Trials that the prior is worth: the pooled fit for a position, identity for the pooled fit."""

BATCH = 64
"""Blocks an update takes when a recorded stream is replayed."""


class OnlineSTS(flax.struct.PyTreeNode):
    """Decayed counts by position and logit bin, fp32.

    Attributes:
        trials: times a draft was tried with a logit in this bin.
        accepted: how many of those were accepted.
        logit_sum: sum of their logits.
    """

    trials: Float[Array, "G bins"]
    accepted: Float[Array, "G bins"]
    logit_sum: Float[Array, "G bins"]


def fresh(block_size: int) -> OnlineSTS:
    """No trial yet: every temperature is 1. Start over with this after a warm-up."""
    empty = lambda: jnp.zeros((block_size, LOGIT_BINS), jnp.float32)  # noqa: E731
    return OnlineSTS(trials=empty(), accepted=empty(), logit_sum=empty())


@jax.jit
def observe(
    state: OnlineSTS,
    logits: Float[Array, "S G"],
    accepted: Int[Array, "S"],
    verified: Int[Array, "S"],
) -> OnlineSTS:
    """Decay the counts and add the blocks of one step.

    Args:
        state: counts so far.
        logits: uncalibrated confidence logits; a NaN makes no trial.
        accepted: drafts accepted of each block.
        verified: drafts that have a label (0 for an idle slot).
    """
    positions = jnp.arange(1, logits.shape[1] + 1)[None]
    tried = (positions <= verified[:, None]) & (positions <= accepted[:, None] + 1)
    tried &= ~jnp.isnan(logits)
    values = jnp.where(tried, jnp.clip(logits, -LOGIT_RANGE, LOGIT_RANGE), 0.0)
    width = 2 * LOGIT_RANGE / LOGIT_BINS
    which = ((values + LOGIT_RANGE) / width).astype(jnp.int32).clip(0, LOGIT_BINS - 1)
    member = jax.nn.one_hot(which, LOGIT_BINS) * tried[..., None]
    won = member * (positions <= accepted[:, None])[..., None]
    return OnlineSTS(
        trials=DECAY * state.trials + member.sum(axis=0),
        accepted=DECAY * state.accepted + won.sum(axis=0),
        logit_sum=DECAY * state.logit_sum + (member * values[..., None]).sum(axis=0),
    )


@jax.jit
def temperatures(state: OnlineSTS) -> Float[Array, "G"]:
    """STS temperatures now, inside the grid and above 0.

    log T_j is the position's own best on the grid by likelihood, pulled toward the best of all
    positions pooled as if that were worth 64 trials, and that one toward 0 likewise.
    """
    pooled = jax.tree.map(lambda counts: counts.sum(axis=0, keepdims=True), state)
    shared = _weight(pooled) * _best(pooled)
    weight = _weight(state)
    return jnp.exp(weight * _best(state) + (1 - weight) * shared)


def _weight(state: OnlineSTS) -> Float[Array, "P"]:
    """Trust in a row's own fit, by its trials."""
    trials = state.trials.sum(axis=1)
    return trials / (trials + PRIOR)


def _best(state: OnlineSTS) -> Float[Array, "P"]:
    """Log temperature of highest likelihood of each row; among equals the one nearest to 0."""
    candidates = np.log(GRID)
    candidates = candidates[np.argsort(np.abs(candidates), kind="stable")]
    mean = state.logit_sum / jnp.maximum(state.trials, 1e-9)
    scaled = mean[:, None] / jnp.exp(jnp.asarray(candidates, jnp.float32))[None, :, None]
    likelihood = state.accepted[:, None] * jax.nn.log_sigmoid(scaled)
    rejected = state.trials - state.accepted
    likelihood += rejected[:, None] * jax.nn.log_sigmoid(-scaled)
    chosen = jnp.argmax(likelihood.sum(axis=-1), axis=1)
    return jnp.asarray(candidates, jnp.float32)[chosen]


def fit_online(blocks: VerifiedBlocks, *, minimum: int = MINIMUM_REACHED) -> Fit:
    """The temperatures after the blocks have streamed by, in their order, 64 an update.

    Positions that fewer than ``minimum`` blocks reach keep temperature 1.
    """
    missing = -len(blocks) % BATCH
    logits = np.pad(np.float32(blocks.logits), ((0, missing), (0, 0)))
    accepted, verified = (
        np.pad(counts, (0, missing)) for counts in (blocks.accepted, blocks.verified)
    )
    steps = (
        jnp.asarray(logits.reshape(-1, BATCH, blocks.block_size)),
        jnp.asarray(accepted.reshape(-1, BATCH)),
        jnp.asarray(verified.reshape(-1, BATCH)),
    )

    def step(state: OnlineSTS, batch: tuple[Array, Array, Array]) -> tuple[OnlineSTS, None]:
        return observe(state, *batch), None

    state, _ = jax.lax.scan(step, fresh(blocks.block_size), steps)
    shrunk = blocks.sparse(minimum)
    return Fit(np.where(shrunk, 1.0, np.asarray(temperatures(state), np.float64)), shrunk)
