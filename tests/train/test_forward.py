"""The training forward: agreement with the reference, with inference, and in chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter import dspark
from train.forward import (
    block_logits,
    block_rows,
    cast_backbone,
    draft_blocks,
    drafter_terms,
)
from train.initialize import initial_weights
from train.losses import LossConfig


def blocks_of(recorded):
    tensors = recorded.tensors
    return draft_blocks(
        recorded.config,
        recorded.weights,
        recorded.weights.embed,
        recorded.batch,
        tensors["anchors"].astype(jnp.int32),
        tensors["block_keep"],
    )


def terms_of(recorded, weights, chunk=6):
    return drafter_terms(
        recorded.config,
        weights,
        recorded.weights.embed,
        recorded.weights.lm_head,
        recorded.batch,
        recorded.tensors["anchors"].astype(jnp.int32),
        recorded.tensors["block_keep"],
        LossConfig(),
        chunk,
    )


def test_labels_and_logits_equal_the_reference(recorded):
    blocks = blocks_of(recorded)
    tensors, head = recorded.tensors, recorded.weights.lm_head
    np.testing.assert_array_equal(blocks.target_ids, tensors["target_ids"])
    np.testing.assert_array_equal(blocks.mask, tensors["eval_mask"])
    aligned = blocks.target_hidden @ head.T
    np.testing.assert_allclose(aligned, tensors["aligned_target_logits"], atol=2e-4)
    logits, confidence = block_logits(recorded.config, recorded.weights, head, blocks)
    # A dummy block sees nothing in the reference and itself here; no one reads either.
    keep = np.asarray(tensors["block_keep"])
    np.testing.assert_allclose(logits[keep], tensors["draft_logits"][keep], atol=2e-4)
    np.testing.assert_allclose(confidence[keep], tensors["confidence_logits"][keep], atol=2e-4)


@pytest.mark.parametrize("chunk", [6, 2])
def test_the_whole_objective_equals_the_reference(recorded, chunk):
    terms = terms_of(recorded, recorded.weights, chunk)
    np.testing.assert_allclose(terms.loss, recorded.metrics["loss"][0], rtol=2e-5)
    for name, ratio in terms.metrics.items():
        found = [ratio.numerator, ratio.denominator]
        np.testing.assert_allclose(found, recorded.metrics[name], rtol=2e-5, err_msg=name)


def test_chunks_change_neither_loss_nor_gradient(vanilla):
    def loss(weights, chunk):
        return terms_of(vanilla, weights, chunk).loss

    trained = vanilla.weights.replace(embed=None, lm_head=None)
    whole = jax.grad(loss)(trained, 6)
    chunked = jax.grad(loss)(trained, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, chunked)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(whole))


def test_whole_logits_are_never_held_when_chunked(vanilla):
    def loss(weights):
        return terms_of(vanilla, weights, 1).loss

    compiled = jax.jit(jax.grad(loss)).lower(vanilla.weights).compile().as_text()
    assert "f32[2,1,7,160]" in compiled
    assert "f32[2,6,7,160]" not in compiled


def test_a_chunk_that_does_not_divide_the_anchors_is_an_error(vanilla):
    blocks = blocks_of(vanilla)
    with pytest.raises(ValueError, match="anchor_chunk 4 does not divide the 6 anchors"):
        block_rows(vanilla.config, vanilla.weights, vanilla.weights.lm_head, blocks, 4)


def test_training_logits_equal_those_of_inference_with_the_same_context(recorded):
    """A mask that is causal in the block, or context off by one, would show here."""
    config, weights, batch = recorded.config, recorded.weights, recorded.batch
    blocks = blocks_of(recorded)
    logits, confidence = block_logits(config, weights, weights.lm_head, blocks)
    rows = batch.tokens.shape[1]
    for index in (0, 3):
        start = int(recorded.tensors["anchors"][0, index])
        context = dspark.init_context(config, 1, rows, jnp.float32)
        context = dspark.commit_context(
            config,
            weights,
            context,
            batch.taps[0, :start],
            jnp.zeros(start, jnp.int32),
            jnp.arange(start),
        )
        hidden = dspark.block_hidden(
            config,
            weights,
            weights.embed,
            context,
            batch.tokens[0, start : start + 1],
            jnp.array([start]),
        )
        base = dspark.base_logits(config, weights, weights.lm_head, hidden)
        state = dspark.start_walk(config, weights, 1)
        for slot in range(config.block_size):
            bias, confident, state = dspark.walk(
                config, weights, state, hidden[:, slot], blocks.previous[0, index, slot][None]
            )
            drafted = base[:, slot] if bias is None else base[:, slot] + bias
            np.testing.assert_allclose(logits[0, index, slot], drafted[0], atol=1e-4)
            np.testing.assert_allclose(confidence[0, index, slot], confident[0], atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_new_drafter_of_any_depth_has_a_finite_loss_and_gradient_in_bf16(vanilla, depth):
    deep = dataclasses.replace(vanilla.config, num_hidden_layers=depth)
    case = dataclasses.replace(vanilla, config=deep)
    weights = initial_weights(deep, jax.random.key(0))

    def loss(weights):
        return terms_of(case, cast_backbone(weights, jnp.bfloat16)).loss

    value, gradient = jax.value_and_grad(loss)(weights)
    assert jnp.isfinite(value)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))


def test_confidence_trains_the_backbone_as_well_as_its_head(vanilla):
    """The reference does not detach the features that the confidence head reads."""
    only = LossConfig(alpha_ce=0.0, alpha_l1=0.0)

    def loss(weights):
        return drafter_terms(
            vanilla.config,
            weights,
            vanilla.weights.embed,
            vanilla.weights.lm_head,
            vanilla.batch,
            vanilla.tensors["anchors"].astype(jnp.int32),
            vanilla.tensors["block_keep"],
            only,
            6,
        ).loss

    gradient = jax.grad(loss)(vanilla.weights)
    assert jnp.any(gradient.confidence.weight != 0)
    assert jnp.any(gradient.fc != 0)
