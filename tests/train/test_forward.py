"""The training forward: agreement with the reference, with inference, and in chunks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter import dspark
from train.draft_heads import frozen_logits
from train.drafters import training_weights
from train.forward import (
    block_logits,
    block_rows,
    draft_blocks,
    drafter_terms,
    map_anchors,
    supervised_first,
)
from train.initialize import initial_weights
from train.losses import LossConfig, dspark_loss

jitted_logits = jax.jit(block_logits, static_argnums=0)


def blocks_of(recorded):
    tensors = recorded.tensors
    blocks, _ = jax.jit(draft_blocks, static_argnums=0)(
        recorded.config,
        recorded.weights,
        recorded.weights.embed,
        recorded.batch,
        tensors["anchors"].astype(jnp.int32),
        tensors["block_keep"],
    )
    return blocks


def terms_of(recorded, weights, chunk=2):
    return jax.jit(drafter_terms, static_argnums=(0, 7, 8))(
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
    logits, confidence = jitted_logits(recorded.config, recorded.weights, head, blocks)
    # A dummy block sees nothing in the reference and itself here; no one reads either.
    keep = np.asarray(tensors["block_keep"])
    np.testing.assert_allclose(logits[keep], tensors["draft_logits"][keep], atol=2e-4)
    np.testing.assert_allclose(confidence[keep], tensors["confidence_logits"][keep], atol=2e-4)


EVERY_TERM = LossConfig(alpha_kl=0.3, alpha_lk=0.7)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _gradient(config, chunk, loss, weights, head_and_embed, batch, anchors, keep):
    def objective(weights):
        head, embed = head_and_embed
        terms = drafter_terms(config, weights, embed, head, batch, anchors, keep, loss, chunk)
        return terms.loss, terms.metrics

    return jax.value_and_grad(objective, has_aux=True)(weights)


def operands(recorded, chunk=2, loss=EVERY_TERM):
    return (
        recorded.config,
        chunk,
        loss,
        recorded.weights.replace(embed=None, lm_head=None),
        (recorded.weights.lm_head, recorded.weights.embed),
        recorded.batch,
        recorded.tensors["anchors"].astype(jnp.int32),
        recorded.tensors["block_keep"],
    )


def gradient_of(recorded, **changes):
    """Loss and metrics, and the gradient of all that is trained; one program for most tests."""
    return _gradient(*operands(recorded, **changes))


def assert_objective(recorded, loss, metrics):
    """Those that the reference recorded."""
    np.testing.assert_allclose(loss, recorded.metrics["loss"][0], rtol=2e-5)
    for name, ratio in metrics.items():
        found = [ratio.numerator, ratio.denominator]
        np.testing.assert_allclose(found, recorded.metrics[name], rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("recorded", ["dspark_gated", "dspark_rnn", "dflash_rank0"], indirect=True)
def test_the_whole_objective_equals_the_reference(recorded):
    assert_objective(recorded, *gradient_of(recorded, loss=LossConfig())[0])


def test_so_does_that_of_the_default_head_where_no_gradient_is_asked_for(vanilla):
    terms = terms_of(vanilla, vanilla.weights)
    assert_objective(vanilla, terms.loss, terms.metrics)


def test_chunks_change_neither_loss_nor_gradient(vanilla):
    whole, chunked = (gradient_of(vanilla, chunk=chunk) for chunk in (6, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole[0], chunked[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole[1], chunked[1])
    assert all(np.any(leaf != 0) for leaf in jax.device_get(jax.tree.leaves(whole[1])))


def test_gradients_formed_in_the_forward_pass_are_those_of_plain_differentiation(recorded):
    trained = recorded.weights.replace(embed=None, lm_head=None)
    head = recorded.weights.lm_head
    # terms see logits and no head: the other heads share the program of the test above
    every = recorded.config.markov_head_type == "vanilla" and recorded.config.markov_rank
    loss = EVERY_TERM if every else LossConfig()

    def plain(weights):
        tensors = recorded.tensors
        blocks, _ = draft_blocks(
            recorded.config,
            weights,
            recorded.weights.embed,
            recorded.batch,
            tensors["anchors"].astype(jnp.int32),
            tensors["block_keep"],
        )
        logits, confidence = block_logits(recorded.config, weights, head, blocks)
        teacher = frozen_logits(blocks.target_hidden, head)
        labels, mask = blocks.target_ids, blocks.mask
        return dspark_loss(logits, teacher, labels, confidence, mask, loss).loss

    expected, found = jax.jit(jax.grad(plain))(trained), gradient_of(recorded, loss=loss)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), expected, found)


def test_a_confidence_head_trains_the_backbone_and_a_detached_one_moves_nothing_but_itself(vanilla):
    """Held against a run without its loss; the reference does not detach what the head reads."""
    detached, silent, attached = (
        gradient_of(vanilla, loss=dataclasses.replace(EVERY_TERM, **changes))[1]
        for changes in ({"detach_confidence": True}, {"alpha_confidence": 0.0}, {})
    )
    assert jnp.any(attached.confidence.weight != 0)
    assert jnp.any(detached.confidence.weight != 0)
    without_head = [tree.replace(confidence=None) for tree in (detached, silent)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), *without_head)
    assert not np.allclose(attached.fc, silent.fc, atol=1e-7)


def test_whole_logits_are_never_held_when_chunked(vanilla):
    compiled = _gradient.lower(*operands(vanilla)).compile().as_text()
    assert "f32[28,160]" in compiled
    assert "f32[84,160]" not in compiled


def test_blocks_without_labels_cost_no_logits_and_change_nothing(vanilla):
    """The same two blocks, almost alone and among ten dummies: chunks of dummies are skipped."""
    only_first = jnp.asarray(np.arange(6)[None] < np.ones((2, 1)))
    few = dataclasses.replace(
        vanilla,
        tensors=vanilla.tensors
        | {
            "anchors": vanilla.tensors["anchors"][:, :2],
            "block_keep": only_first[:, :2],
        },
    )
    many = dataclasses.replace(vanilla, tensors=vanilla.tensors | {"block_keep": only_first})

    results = [gradient_of(case) for case in (few, many)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results)

    blocks = supervised_first(blocks_of(many), 1)
    assert blocks.mask[0, :, 0].tolist() == [True] * 2 + [False] * 10
    ones = map_anchors(lambda part: jnp.ones(part.mask.shape), blocks, 2)
    assert ones[0, :, 0].tolist() == [1.0] * 2 + [0.0] * 10


def test_a_chunk_that_does_not_divide_the_anchors_is_an_error(vanilla):
    blocks = blocks_of(vanilla)
    with pytest.raises(ValueError, match="anchor_chunk 4 does not divide the 6 anchors"):
        block_rows(
            vanilla.config, vanilla.weights, vanilla.weights.lm_head, blocks, LossConfig(), 4
        )


def test_training_logits_equal_those_of_inference_with_the_same_context(recorded):
    """A mask that is causal in the block, or context off by one, would show here."""
    config, weights, batch = recorded.config, recorded.weights, recorded.batch
    blocks = blocks_of(recorded)
    logits, confidence = jitted_logits(config, weights, weights.lm_head, blocks)
    rows = batch.tokens.shape[1]

    @jax.jit
    def infer(start, anchor, previous):
        """Context rows before ``start`` committed one by one, then the block walked."""
        position = jnp.arange(rows)
        slot = jnp.where(position < start, 0, 1)
        context = dspark.init_context(config, 1, rows, jnp.float32)
        context = dspark.commit_context(config, weights, context, batch.taps[0], slot, position)
        hidden = dspark.block_hidden(
            config, weights, weights.embed, context, anchor[None], start[None]
        )
        base = dspark.base_logits(config, weights, weights.lm_head, hidden)[0]
        state, drafted = dspark.start_walk(config, weights, 1), []
        for j in range(config.block_size):
            bias, state = dspark.walk(config, weights, state, hidden[:, j], previous[j][None])
            drafted.append(base[j] if bias is None else base[j] + bias[0])
        confident = dspark.confidences(config, weights, hidden, previous[None])
        assert confident is not None
        return jnp.stack(drafted), confident[0]

    for index in (0, 3):
        start = recorded.tensors["anchors"][0, index].astype(jnp.int32)
        drafted, confident = infer(start, batch.tokens[0, start], blocks.previous[0, index])
        np.testing.assert_allclose(logits[0, index], drafted, atol=1e-4)
        np.testing.assert_allclose(confidence[0, index], confident, atol=1e-4)


def test_a_new_and_deep_drafter_has_a_finite_loss_and_gradient_in_bf16(vanilla):
    deep = dataclasses.replace(vanilla.config, num_hidden_layers=2)
    case = dataclasses.replace(vanilla, config=deep)
    weights = initial_weights(deep, jax.random.key(0))

    def loss(weights):
        return terms_of(case, training_weights(deep, weights, jnp.bfloat16)).loss

    value, gradient = jax.jit(jax.value_and_grad(loss))(weights)
    assert jnp.isfinite(value)
    gradient = jax.device_get(gradient)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))
