"""The objective: agreement with the reference, gradients, extremes, normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import (
    DENOMINATOR_FLOOR,
    LossConfig,
    Rows,
    combine,
    dspark_loss,
    position_weights,
    row_objective,
    vocabulary_rows,
)
from train.row_losses import cross_entropy_and_l1

loss_of = jax.jit(dspark_loss, static_argnums=5)


def of(recorded, config=None, **changed):
    tensors = recorded.tensors | changed
    return loss_of(
        tensors["draft_logits"],
        tensors["aligned_target_logits"],
        tensors["target_ids"],
        tensors["confidence_logits"],
        tensors["eval_mask"],
        config or LossConfig(),
    )


def test_every_numerator_and_denominator_equals_the_reference(recorded):
    terms = of(recorded)
    assert set(terms.metrics) | {"loss"} == set(recorded.metrics)
    np.testing.assert_allclose(terms.loss, recorded.metrics["loss"][0], rtol=2e-5)
    for name, ratio in terms.metrics.items():
        found = [ratio.numerator, ratio.denominator]
        np.testing.assert_allclose(found, recorded.metrics[name], rtol=2e-5, err_msg=name)


def rows_example(rows=6, vocabulary=11):
    random = np.random.default_rng(0)
    draft, target = random.normal(size=(2, rows, vocabulary)).astype(np.float32)
    return (
        jnp.asarray(draft),
        jnp.asarray(target),
        jnp.asarray(random.integers(0, vocabulary, rows)),
    )


def value_and_gradient(loss, logits):
    return jax.jit(jax.value_and_grad(loss))(logits)


def test_the_hand_written_gradient_is_that_of_the_plain_formula():
    draft, target, ids = rows_example()
    weight = jnp.arange(1.0, 7.0)

    def plain(logits):
        q, p = jax.nn.softmax(logits), jax.nn.softmax(target)
        ce = -jnp.log(q[jnp.arange(6), ids])
        return jnp.sum(weight * ce + 0.5 * weight**2 * jnp.abs(p - q).sum(-1))

    def ours(logits):
        ce, l1 = cross_entropy_and_l1(logits, target, ids)
        return jnp.sum(weight * ce + 0.5 * weight**2 * l1)

    (found, slope), (wanted, true_slope) = (value_and_gradient(f, draft) for f in (ours, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(slope, true_slope, atol=1e-5)


def test_kl_and_lk_hybrid_are_their_formulas_and_so_are_their_gradients():
    draft, target, ids = rows_example()
    config = LossConfig(alpha_ce=0.0, alpha_l1=0.0, alpha_kl=0.5, alpha_lk=2.0)

    def plain(logits):
        q, p = jax.nn.softmax(logits), jax.nn.softmax(target)
        kl = jnp.sum(p * jnp.log(p / q), axis=-1)
        tv = 1 - jnp.minimum(p, q).sum(-1)
        blend = jnp.exp(-3 * jax.lax.stop_gradient(1 - tv))
        return jnp.sum(0.5 * kl + 2.0 * (blend * kl + (1 - blend) * tv))

    def ours(logits):
        return jnp.sum(row_objective(vocabulary_rows(logits, target, ids, config), config))

    (found, slope), (wanted, true_slope) = (value_and_gradient(f, draft) for f in (ours, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(slope, true_slope, atol=1e-5)
    np.testing.assert_allclose(value_and_gradient(ours, target)[0], 0.0, atol=1e-5)


def test_no_gradient_reaches_the_teacher(vanilla):
    def loss(target_logits):
        return of(vanilla, aligned_target_logits=target_logits).loss

    gradient = jax.grad(loss)(vanilla.tensors["aligned_target_logits"])
    assert jnp.all(gradient == 0)


def test_the_acceptance_that_confidence_learns_takes_no_gradient(vanilla):
    only_confidence = LossConfig(alpha_ce=0.0, alpha_l1=0.0, alpha_confidence=1.0)

    def loss(draft_logits):
        return of(vanilla, only_confidence, draft_logits=draft_logits).loss

    assert jnp.all(jax.grad(loss)(vanilla.tensors["draft_logits"]) == 0)


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_confidence_loss_stays_finite_at_extreme_logits(vanilla, extreme):
    def loss(logits):
        return of(vanilla, confidence_logits=logits).loss

    logits = jnp.full_like(vanilla.tensors["confidence_logits"], extreme)
    value, gradient = jax.value_and_grad(loss)(logits)
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(gradient))


def test_cross_entropy_alone_needs_neither_teacher_nor_confidence_head(vanilla):
    config = LossConfig(alpha_ce=1.0, alpha_l1=0.0, alpha_confidence=0.0)
    terms = of(vanilla, config, aligned_target_logits=None, confidence_logits=None)
    ce = vanilla.metrics["ce_loss"]
    np.testing.assert_allclose(terms.loss, ce[0] / ce[1], rtol=2e-5)
    assert set(terms.metrics) == {"ce_loss"}


def test_a_drafter_without_confidence_head_has_no_confidence_term(vanilla):
    terms = of(vanilla, confidence_logits=None)
    metrics = vanilla.metrics
    expected = (0.1 * metrics["ce_loss"][0] + 0.9 * metrics["l1_loss"][0]) / metrics["l1_loss"][1]
    np.testing.assert_allclose(terms.loss, expected, rtol=2e-5)


def test_a_missing_teacher_that_the_weights_need_is_an_error(vanilla):
    with pytest.raises(ValueError, match=r"alpha_l1 = 0.9"):
        of(vanilla, aligned_target_logits=None)


def test_masked_slots_change_nothing(vanilla):
    mask = vanilla.tensors["eval_mask"]
    noise = 100.0 * jax.random.normal(jax.random.key(1), mask.shape)
    draft = vanilla.tensors["draft_logits"]
    draft = jnp.where(mask[..., None], draft, draft + noise[..., None] * jnp.arange(160))
    confidence = jnp.where(mask, vanilla.tensors["confidence_logits"], noise)
    plain, noisy = of(vanilla), of(vanilla, draft_logits=draft, confidence_logits=confidence)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, noisy)


def example(batch, seed):
    random = np.random.default_rng(seed)
    shape = (batch, 3, 4)
    kept = random.integers(1, 5, shape[:2])
    rows = Rows(
        ce=np.float32(5 * random.uniform(size=shape)),
        l1=np.float32(2 * random.uniform(size=shape)),
        confidence_logits=np.float32(random.normal(size=shape)),
    )
    return rows, np.arange(4) < kept[..., None]


combined = jax.jit(combine, static_argnums=2)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_each_micro_batch_is_divided_by_its_own_weight_sum(micro):
    """DeepSpec's rule: micro-batches weigh equally; summed ratios give the global mean."""
    rows, mask = example(8, 0)
    whole = combined(rows, mask, LossConfig())
    parts = [
        combined(jax.tree.map(lambda x: x[i : i + micro], rows), mask[i : i + micro], LossConfig())  # noqa: B023
        for i in range(0, 8, micro)
    ]
    sums = jax.tree.map(lambda *x: sum(x), *[part.metrics for part in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, whole.metrics)

    totals = [
        float(position_weights(jnp.asarray(mask[i : i + micro]), 4.0).sum()) + DENOMINATOR_FLOOR
        for i in range(0, 8, micro)
    ]
    losses = np.array([float(part.loss) for part in parts])
    np.testing.assert_allclose(np.average(losses, weights=totals), whole.loss, rtol=1e-5)
    assert abs(losses.mean() - float(whole.loss)) > 1e-5


def test_an_empty_batch_has_loss_zero():
    rows, mask = example(2, 0)
    terms = combined(rows, np.zeros_like(mask), LossConfig())
    assert terms.loss == 0
    assert all(ratio.value() == 0 for ratio in terms.metrics.values())


def test_a_large_vocabulary_costs_no_digits():
    logits = 4 * np.random.default_rng(0).normal(size=(2, 2**17)).astype(np.float32)
    found = cross_entropy_and_l1(jnp.asarray(logits), jnp.zeros_like(logits), jnp.zeros(2, int))[0]
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(
        found, np.log(np.exp(wide).sum(axis=1)) - wide[:, 0], rtol=0, atol=1e-5
    )
