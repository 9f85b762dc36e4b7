"""The drafter's objective, every term and metric as a numerator and a denominator."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from train.row_losses import cross_entropy_and_l1, kl_divergence, token_cross_entropy

DENOMINATOR_FLOOR = 1e-6
LK_DECAY = 3.0
"""How fast LK-hybrid turns from KL to TV as acceptance grows."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the objective (paper section 3, DeepSpec's defaults).

    Slot j of a block weighs ``exp(-j / decay)``. The L1 term is ``sum |p - q|``, twice the
    total variation, KL is from the target to the draft. LK-hybrid (arXiv 2602.23881) is
    ``l KL + (1 - l) TV`` with ``l = exp(-3 acceptance)`` taken as a constant. ``alpha_confidence``
    is ignored by a drafter without a confidence head; ``detach_confidence`` keeps the gradient of
    that head out of what it reads.
    """

    decay: float = 4.0
    alpha_ce: float = 0.1
    alpha_l1: float = 0.9
    alpha_kl: float = 0.0
    alpha_lk: float = 0.0
    alpha_confidence: float = 1.0
    detach_confidence: bool = False

    @property
    def needs_kl(self) -> bool:
        """Whether a term of the objective is made of the KL divergence."""
        return self.alpha_kl > 0 or self.alpha_lk > 0


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
    with a confidence head, ``confidence_{loss,abs_error,bias,cumprod_bias}``. ``expert_loads``
    are those of a drafter's layers that have experts.
    """

    loss: Float[Array, ""]
    metrics: dict[str, Ratio]
    expert_loads: tuple[Float[Array, "X"], ...] = ()


@flax.struct.dataclass
class Rows:
    """What the objective needs to know of each draft row; no vocabulary axis is left.

    ``ce`` is the draft's cross entropy of the true token, ``l1`` is ``sum |p - q|``.
    ``l1`` is None when there is no teacher, ``kl`` when no term needs it. ``weighted`` is their
    sum under weights and alphas when that sum brings its own gradient; None: it is taken here.
    """

    ce: Float[Array, "B A G"]
    l1: Float[Array, "B A G"] | None
    kl: Float[Array, "B A G"] | None = None
    confidence_logits: Float[Array, "B A G"] | None = None
    weighted: Float[Array, ""] | None = None


def position_weights(mask: Bool[Array, "B A G"], decay: float) -> Float[Array, "B A G"]:
    """``exp(-j / decay)`` where the slot is supervised, 0 elsewhere."""
    slots = jnp.arange(mask.shape[-1], dtype=jnp.float32)
    return jnp.exp(-slots / decay) * mask


def vocabulary_rows(
    draft_logits: Float[Array, "B A G Vd"],
    target_logits: Float[Array, "B A G Vd"],
    target_ids: Int[Array, "B A G"],
    config: LossConfig,
) -> Rows:
    """The figures of each row that ``config`` asks for, without confidence."""
    ce, l1 = cross_entropy_and_l1(draft_logits, target_logits, target_ids)
    kl = kl_divergence(draft_logits, target_logits) if config.needs_kl else None
    return Rows(ce=ce, l1=l1, kl=kl)


def row_objective(rows: Rows, config: LossConfig) -> Float[Array, "B A G"]:
    """The vocabulary terms of each row under their alphas, position weights left out."""
    objective = config.alpha_ce * rows.ce
    if rows.l1 is None:
        return objective
    objective += config.alpha_l1 * rows.l1
    if rows.kl is None:
        return objective
    return objective + config.alpha_kl * rows.kl + config.alpha_lk * _lk_hybrid(rows.l1, rows.kl)


def _lk_hybrid(l1: Float[Array, "B A G"], kl: Float[Array, "B A G"]) -> Float[Array, "B A G"]:
    distance = 0.5 * l1
    blend = jnp.exp(-LK_DECAY * jax.lax.stop_gradient(1.0 - distance))
    return blend * kl + (1.0 - blend) * distance


def combine(rows: Rows, mask: Bool[Array, "B A G"], config: LossConfig) -> Terms:
    """The objective and its metrics from per-row figures (DeepSpec's normalisation).

    Every term is divided by the sum of position weights of the whole batch given here, so a
    batch cut into micro-batches weighs its micro-batches equally, whatever their token counts.

    Raises:
        ValueError: a term that needs a teacher has a weight, and there is none.
    """
    weights = position_weights(mask, config.decay)
    total = jnp.sum(weights)

    def mean(values: Array) -> Ratio:
        return Ratio(jnp.sum(values * weights), total)

    metrics = {"ce_loss": mean(rows.ce)}
    confidence = jnp.zeros(())
    if rows.l1 is None:
        _need_no_teacher(rows, config)
    else:
        acceptance = jax.lax.stop_gradient(1.0 - 0.5 * rows.l1)
        metrics |= {"l1_loss": mean(rows.l1)} | _acceptance_metrics(acceptance, mask)
        if rows.kl is not None:
            metrics |= {"kl_loss": mean(rows.kl), "lk_loss": mean(_lk_hybrid(rows.l1, rows.kl))}
        if rows.confidence_logits is not None:
            logits = rows.confidence_logits.astype(jnp.float32)
            metrics |= _confidence_metrics(logits, acceptance, weights)
            confidence = config.alpha_confidence * metrics["confidence_loss"].numerator
    vocabulary = rows.weighted
    if vocabulary is None:
        vocabulary = jnp.sum(weights * row_objective(rows, config))
    return Terms(loss=(vocabulary + confidence) / (total + DENOMINATOR_FLOOR), metrics=metrics)


def _need_no_teacher(rows: Rows, config: LossConfig) -> None:
    alphas = {name: getattr(config, name) for name in ("alpha_l1", "alpha_kl", "alpha_lk")}
    if rows.confidence_logits is not None:
        alphas["alpha_confidence"] = config.alpha_confidence
    if asking := [f"{name} = {value}" for name, value in alphas.items() if value]:
        raise ValueError(
            f"{' and '.join(asking)} need target logits, and none were given: pass them or set "
            "these to 0"
        )


def _acceptance_metrics(
    acceptance: Float[Array, "B A G"], mask: Bool[Array, "B A G"]
) -> dict[str, Ratio]:
    """Acceptance by slot, and the expected accepted length with the bonus token."""
    metrics = {
        f"accept_rate@{slot}": Ratio(
            jnp.sum((acceptance * mask)[..., slot]),
            jnp.sum(mask[..., slot], dtype=jnp.float32),
        )
        for slot in range(mask.shape[-1])
    }
    blocks = jnp.sum(mask[..., 0], dtype=jnp.float32)
    survival = jnp.cumprod(acceptance * mask, axis=-1)
    return metrics | {"tau_probabilistic": Ratio(blocks + jnp.sum(survival), blocks)}


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
        rows = Rows(ce=token_cross_entropy(draft_logits, target_ids), l1=None)
    else:
        rows = vocabulary_rows(draft_logits, target_logits, target_ids, config)
    return combine(dataclasses.replace(rows, confidence_logits=confidence_logits), mask, config)
