"""Losses of one row of logits: no weights, no averages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_cross_entropy(
    draft_logits: Float[Array, "... Vd"], target_ids: Int[Array, "..."]
) -> Float[Array, "..."]:
    """``-log q(target)`` of each row, in fp32."""
    logits = draft_logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, target_ids[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


@jax.custom_vjp
def cross_entropy_and_l1(
    draft_logits: Float[Array, "... Vd"],
    target_logits: Float[Array, "... Vd"],
    target_ids: Int[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Cross entropy of the true token and ``sum |p - q|``, with no gradient to the teacher.

    p and q are the fp32 softmax of target and draft logits. The gradient is written by hand so
    that the backward pass needs the logits and three scalars a row, not p, q and their signs.
    Every pass over the logits counts: with many rows they are the largest arrays of a step.
    """
    return _cross_entropy_and_l1_forward(draft_logits, target_logits, target_ids)[0]


def _cross_entropy_and_l1_forward(draft_logits: Array, target_logits: Array, target_ids: Array):
    draft = draft_logits.astype(jnp.float32)
    target = target_logits.astype(jnp.float32)
    draft_norm = _logsumexp(draft)
    target_norm = _logsumexp(target)
    q = jnp.exp(draft - draft_norm[..., None])
    difference = q - jnp.exp(target - target_norm[..., None])
    # a sum, not a gather: the vocabulary may be spread over devices
    picked = jnp.sum(jnp.where(_is_column(target_ids, draft), draft, 0.0), axis=-1)
    l1 = jnp.sum(jnp.abs(difference), axis=-1)
    mean_sign = jnp.sum(q * jnp.sign(difference), axis=-1)
    residuals = (draft_logits, target_logits, target_ids, draft_norm, target_norm, mean_sign)
    return (draft_norm - picked, l1), residuals


def _cross_entropy_and_l1_backward(residuals: tuple, cotangents: tuple[Array, Array]):
    draft_logits, target_logits, target_ids, draft_norm, target_norm, mean_sign = residuals
    of_ce, of_l1 = (cotangent[..., None] for cotangent in cotangents)
    # behind a barrier p and q are new to the compiler, or it would keep those of the forward pass
    draft_norm, target_norm = jax.lax.optimization_barrier((draft_norm, target_norm))
    q = jnp.exp(draft_logits.astype(jnp.float32) - draft_norm[..., None])
    p = jnp.exp(target_logits.astype(jnp.float32) - target_norm[..., None])
    is_target = _is_column(target_ids, q)
    gradient = of_ce * (q - is_target) + of_l1 * q * (jnp.sign(q - p) - mean_sign[..., None])
    return gradient.astype(draft_logits.dtype), jnp.zeros_like(target_logits), None


def _logsumexp(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Over the last axis, in one pass where that is worth it: maximum and sum together.

    A CPU adds one after the other in such a pass, slowly, and over a large vocabulary loses digits.
    """
    usual = functools.partial(jax.nn.logsumexp, axis=-1)
    return jax.lax.platform_dependent(logits, cpu=usual, default=_one_pass_logsumexp)


def _one_pass_logsumexp(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Maximum and sum of exponentials together."""

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(one[0], other[0])
        # -inf less -inf is no number
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        return top, one[1] * jnp.exp(one[0] - shift) + other[1] * jnp.exp(other[0] - shift)

    begin = jnp.float32(-jnp.inf), jnp.float32(0.0)
    operands = logits, jnp.ones_like(logits)
    top, total = jax.lax.reduce(operands, begin, join, (logits.ndim - 1,))
    return top + jnp.log(total)


def _is_column(ids: Int[Array, "..."], like: Float[Array, "... V"]) -> Bool[Array, "... V"]:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1) == ids[..., None]


cross_entropy_and_l1.defvjp(_cross_entropy_and_l1_forward, _cross_entropy_and_l1_backward)


@jax.custom_vjp
def kl_divergence(
    draft_logits: Float[Array, "... Vd"], target_logits: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """``sum p log(p / q)`` in fp32, with no gradient to the teacher.

    The gradient, ``q - p``, is written by hand for the same reason as that of
    ``cross_entropy_and_l1``.
    """
    return _kl_forward(draft_logits, target_logits)[0]


def _kl_forward(draft_logits: Array, target_logits: Array):
    draft = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
    target = jax.nn.log_softmax(target_logits.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.exp(target) * (target - draft), axis=-1), (draft_logits, target_logits)


def _kl_backward(residuals: tuple[Array, Array], cotangent: Array):
    draft_logits, target_logits = residuals
    q = jax.nn.softmax(draft_logits.astype(jnp.float32), axis=-1)
    p = jax.nn.softmax(target_logits.astype(jnp.float32), axis=-1)
    gradient = cotangent[..., None] * (q - p)
    return gradient.astype(draft_logits.dtype), jnp.zeros_like(target_logits)


kl_divergence.defvjp(_kl_forward, _kl_backward)
