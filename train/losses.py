"""DeepSpec's drafter objective, every term and metric as a numerator and a denominator."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DENOMINATOR_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the objective (paper section 3, DeepSpec's defaults).

    Slot j of a block weighs ``exp(-j / decay)``. The L1 term is ``sum |p - q|``, twice the
    total variation. ``alpha_confidence`` is ignored by a drafter without a confidence head.
    """

    decay: float = 4.0
    alpha_ce: float = 0.1
    alpha_l1: float = 0.9
    alpha_confidence: float = 1.0


@flax.struct.dataclass
class Ratio:
    """A sum and what it is divided by: ratios of several batches add before they divide."""

    numerator: Float[Array, ""]
    denominator: Float[Array, ""]

    def value(self) -> Float[Array, ""]:
        """The quotient; 0 when nothing was counted."""
        return self.numerator / jnp.maximum(self.denominator, DENOMINATOR_FLOOR)


@flax.struct.dataclass
class Terms:
    """The scalar objective and DeepSpec's metrics under their own names.

    ``metrics`` holds ``accept_rate@j``, ``tau_probabilistic``, ``ce_loss``, ``l1_loss`` and,
    with a confidence head, ``confidence_{loss,abs_error,bias,cumprod_bias}``.
    """

    loss: Float[Array, ""]
    metrics: dict[str, Ratio]


@flax.struct.dataclass
class Rows:
    """What the objective needs to know of each draft row; no vocabulary axis is left.

    ``ce`` is the draft's cross entropy of the true token, ``l1`` is ``sum |p - q|``.
    ``l1`` is None when there is no teacher. ``weighted`` is the sum of both under their weights
    and alphas when that sum brings its own gradient; None: it is taken here.
    """

    ce: Float[Array, "B A G"]
    l1: Float[Array, "B A G"] | None
    confidence_logits: Float[Array, "B A G"] | None
    weighted: Float[Array, ""] | None = None


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
    """
    return _cross_entropy_and_l1_forward(draft_logits, target_logits, target_ids)[0]


def _cross_entropy_and_l1_forward(draft_logits: Array, target_logits: Array, target_ids: Array):
    draft = draft_logits.astype(jnp.float32)
    target = target_logits.astype(jnp.float32)
    draft_norm = jax.nn.logsumexp(draft, axis=-1)
    target_norm = jax.nn.logsumexp(target, axis=-1)
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
    q = jnp.exp(draft_logits.astype(jnp.float32) - draft_norm[..., None])
    p = jnp.exp(target_logits.astype(jnp.float32) - target_norm[..., None])
    is_target = _is_column(target_ids, q)
    gradient = of_ce * (q - is_target) + of_l1 * q * (jnp.sign(q - p) - mean_sign[..., None])
    return gradient.astype(draft_logits.dtype), jnp.zeros_like(target_logits), None


def _is_column(ids: Int[Array, "..."], like: Float[Array, "... V"]) -> Bool[Array, "... V"]:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1) == ids[..., None]


cross_entropy_and_l1.defvjp(_cross_entropy_and_l1_forward, _cross_entropy_and_l1_backward)


def position_weights(mask: Bool[Array, "B A G"], decay: float) -> Float[Array, "B A G"]:
    """``exp(-j / decay)`` where the slot is supervised, 0 elsewhere."""
    slots = jnp.arange(mask.shape[-1], dtype=jnp.float32)
    return jnp.exp(-slots / decay) * mask


def combine(rows: Rows, mask: Bool[Array, "B A G"], config: LossConfig) -> Terms:
    """The objective and its metrics from per-row figures (DeepSpec's normalisation).

    Every term is divided by the sum of position weights of the whole batch given here, so a
    batch cut into micro-batches weighs its micro-batches equally, whatever their token counts.
    """
    weights = position_weights(mask, config.decay)
    total = jnp.sum(weights)
    blocks = jnp.sum(mask[..., 0], dtype=jnp.float32)
    metrics = {"ce_loss": Ratio(jnp.sum(rows.ce * weights), total)}
    vocabulary, confidence = config.alpha_ce * metrics["ce_loss"].numerator, jnp.zeros(())
    if rows.l1 is not None:
        acceptance = jax.lax.stop_gradient(1.0 - 0.5 * rows.l1)
        metrics["l1_loss"] = Ratio(jnp.sum(rows.l1 * weights), total)
        vocabulary += config.alpha_l1 * metrics["l1_loss"].numerator
        for slot in range(mask.shape[-1]):
            metrics[f"accept_rate@{slot}"] = Ratio(
                jnp.sum((acceptance * mask)[..., slot]),
                jnp.sum(mask[..., slot], dtype=jnp.float32),
            )
        survival = jnp.cumprod(acceptance * mask, axis=-1)
        metrics["tau_probabilistic"] = Ratio(blocks + jnp.sum(survival), blocks)
        if rows.confidence_logits is not None:
            logits = rows.confidence_logits.astype(jnp.float32)
            metrics |= _confidence_metrics(logits, acceptance, weights)
            confidence = config.alpha_confidence * metrics["confidence_loss"].numerator
    elif config.alpha_l1 or (config.alpha_confidence and rows.confidence_logits is not None):
        raise ValueError(
            f"alpha_l1 = {config.alpha_l1} and alpha_confidence = {config.alpha_confidence} need "
            "target logits, and none were given: pass them or set both to 0"
        )
    if rows.weighted is not None:
        vocabulary = rows.weighted
    return Terms(loss=(vocabulary + confidence) / (total + DENOMINATOR_FLOOR), metrics=metrics)


def _confidence_metrics(
    logits: Float[Array, "B A G"],
    acceptance: Float[Array, "B A G"],
    weights: Float[Array, "B A G"],
) -> dict[str, Ratio]:
    """Cross entropy against the acceptance probability, and how far the confidence is off it."""
    confidence = jax.nn.sigmoid(logits)
    cross_entropy = jax.nn.softplus(logits) - logits * acceptance
    error = confidence - acceptance
    cumulative = jnp.cumprod(confidence, axis=-1) - jnp.cumprod(acceptance, axis=-1)
    sums = {
        "confidence_loss": cross_entropy,
        "confidence_abs_error": jnp.abs(error),
        "confidence_bias": error,
        "confidence_cumprod_bias": cumulative,
    }
    total = jnp.sum(weights)
    return {name: Ratio(jnp.sum(value * weights), total) for name, value in sums.items()}


def dspark_loss(
    draft_logits: Float[Array, "B A G Vd"],
    target_logits: Float[Array, "B A G Vd"] | None,
    target_ids: Int[Array, "B A G"],
    confidence_logits: Float[Array, "B A G"] | None,
    mask: Bool[Array, "B A G"],
    config: LossConfig,
) -> Terms:
    """DeepSpec's objective on whole logits; ``target_logits`` None is cross entropy alone.

    Raises:
        ValueError: without target logits while a term that needs them has a weight.
    """
    if target_logits is None:
        ce, l1 = token_cross_entropy(draft_logits, target_ids), None
    else:
        ce, l1 = cross_entropy_and_l1(draft_logits, target_logits, target_ids)
    return combine(Rows(ce=ce, l1=l1, confidence_logits=confidence_logits), mask, config)
