"""One position of the walk in pure JAX: what the kernel must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.markov_sample.operands import Confidence, Position, Sample
from pallas_kernels.row_linear.reference import linear


def markov_sample(
    operands: Position, scores: Float[Array, "S G Vd"] | None, index: int, depth: int
) -> Sample:
    """Same arguments and result as `pallas_kernels.markov_sample.markov_sample`."""
    base, confidence = operands.base, None
    if operands.confidence is not None:
        confidence = confidence_logit(operands.confidence)
    logits = base[:, index] + linear(operands.ranked, operands.matrix, jnp.float32)
    if operands.keys is None:
        return Sample(jnp.argmax(logits, axis=-1).astype(jnp.int32), None, None, confidence)
    greedy = operands.temperature == 0
    score = logits / jnp.where(greedy, 1.0, operands.temperature)[:, None]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, score.shape[1:], jnp.float32))
    drawn = jnp.where(greedy[:, None], score, score + noise(operands.keys))
    column = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(score, column[:, None], axis=-1)[:, 0]
    if scores is None:
        scores = jnp.zeros((base.shape[0], depth, base.shape[2]), jnp.float32)
    return Sample(
        column,
        scores.at[:, index].set(score),
        chosen - jax.nn.logsumexp(score, axis=-1),
        confidence,
    )


def confidence_logit(head: Confidence) -> Float[Array, "S"]:
    """fp32 logit of a confidence head."""
    wide = head.hidden.astype(jnp.float32)
    if head.embedding is not None:
        wide = jnp.concatenate([wide, head.embedding.astype(jnp.float32)], axis=-1)
    logit = jnp.sum(wide * head.weight.astype(jnp.float32), axis=-1)
    return logit if head.bias is None else logit + head.bias.astype(jnp.float32)
