"""Attention over whole sequences at once: every token's scores of every key, then a mask.

Serving gathers the rows that each token attends to. Training has all queries of a sequence at
hand, and reads a key once for all of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.top_k import top_k


def attention_logits(
    query: Float[Array, "B K H W"], keys: Float[Array, "B M W"], scale: float
) -> Float[Array, "B H K M"]:
    """fp32 scores of the one key that all heads share."""
    product = jnp.einsum("bkhw,bmw->bhkm", query, keys, preferred_element_type=jnp.float32)
    return product * scale


def attention_weights(
    logits: Float[Array, "B H K M"],
    shown: Bool[Array, "#B K M"],
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B H K M"]:
    """Softmax of the scores that are shown; a sink is a score without a value."""
    logits = jnp.where(shown[:, None], logits, -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    sink = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]


def mix_values(
    weights: Float[Array, "B H K M"], values: Float[Array, "B M U"]
) -> Float[Array, "B K H U"]:
    """The weighted values, in their dtype."""
    mixed = jnp.einsum(
        "bhkm,bmu->bhku",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return jnp.swapaxes(mixed.astype(values.dtype), 1, 2)


def choose_keys(
    scores: Float[Array, "B K M"], seen: Int[Array, "K"], count: int
) -> Bool[Array, "#B K M"]:
    """Which of the first ``seen`` keys each token attends to: the ``count`` of highest score.

    A choice has no gradient: ``indexer_loss`` teaches the scores.
    """
    batch, length, total = scores.shape
    if total <= count:
        return (jnp.arange(total) < seen[:, None])[None]
    flat = jax.lax.stop_gradient(scores).reshape(-1, total)
    best = top_k(flat, jnp.tile(seen, batch), count)
    token = jnp.arange(batch * length)[:, None]
    chosen = jnp.zeros(flat.shape, bool)
    chosen = chosen.at[token, jnp.where(best >= 0, best, total)].set(True, mode="drop")
    return chosen.reshape(scores.shape)


def indexer_loss(
    weights: Float[Array, "B H K M"],
    scores: Float[Array, "B K M"],
    seen: Int[Array, "K"],
    real: Bool[Array, "B K"],
) -> Float[Array, ""]:
    """KL divergence from what the heads attend to, to the softmax of the indexer's scores.

    The heads' weights of a key are added up and normalised over the keys that a token sees, all of
    them, as in the dense stage of DeepSeek-V3.2's report (section 2.1.1, equation 3). They are a
    teacher and get no gradient. Mean over ``real`` tokens.
    """
    visible = jnp.arange(scores.shape[-1]) < seen[:, None]
    teacher = jnp.where(visible, jax.lax.stop_gradient(weights).sum(axis=1), 0)
    teacher = teacher / jnp.maximum(teacher.sum(axis=-1, keepdims=True), 1e-20)
    # a finite floor: a token that sees no key has no divergence, and its gradient is no NaN
    student = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    student = jax.nn.log_softmax(student, axis=-1)
    divergence = jax.scipy.special.xlogy(teacher, teacher) - teacher * student
    divergence = jnp.where(visible, divergence, 0).sum(axis=-1)
    return (divergence * real).sum() / jnp.maximum(real.sum(), 1)
