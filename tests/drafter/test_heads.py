"""Sequential heads and confidence: by position, along a block, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter import dspark
from dspark_jax.drafter.backbone import block_hidden_from_context, context_features, context_kv
from dspark_jax.drafter.heads import vocabulary_logits
from dspark_jax.drafter.heads import walk_block as eager_walk_block

HEADS = ["vanilla", "gated", "rnn"]

walk_block = jax.jit(eager_walk_block, static_argnums=0)


def hidden_and_tokens(config, dtype=jnp.float32, blocks=3):
    random = np.random.default_rng(2)
    hidden = random.normal(size=(blocks, config.block_size, config.hidden_size))
    tokens = random.integers(0, config.vocab_size, hidden.shape[:2], np.int32)
    return jax.device_put((hidden.astype(dtype), tokens))


@functools.partial(jax.jit, static_argnums=0)
def walk_all(config, weights, hidden, previous):
    state = dspark.start_walk(config, weights, hidden.shape[0])
    biases = []
    for j in range(hidden.shape[1]):
        bias, state = dspark.walk(config, weights, state, hidden[:, j], previous[:, j])
        biases.append(bias)
    return jnp.stack(biases, axis=1), dspark.confidences(config, weights, hidden, previous)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("with_markov", [True, False])
def test_walking_by_position_equals_the_teacher_forced_block(make_drafter, head, with_markov):
    drafter = make_drafter(markov_head_type=head, confidence_head_with_markov=with_markov)
    hidden, previous = hidden_and_tokens(drafter.config)
    bias, confidence = walk_block(drafter.config, drafter.weights, hidden, previous)
    walked_bias, walked_confidence = walk_all(drafter.config, drafter.weights, hidden, previous)
    np.testing.assert_allclose(bias, walked_bias, atol=1e-6)
    np.testing.assert_allclose(confidence, walked_confidence, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_logits_and_confidence_are_fp32_whatever_the_weights(make_drafter, head):
    drafter = make_drafter(jnp.bfloat16, markov_head_type=head)
    hidden, previous = hidden_and_tokens(drafter.config, jnp.bfloat16)
    bias, confidence = walk_block(drafter.config, drafter.weights, hidden, previous)
    base = dspark.base_logits(drafter.config, drafter.weights, drafter.weights.lm_head, hidden)
    assert {bias.dtype, confidence.dtype, base.dtype} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "changes", [{"markov_head_type": head} for head in HEADS] + [{"markov_rank": 0}]
)
def test_the_best_of_a_position_is_that_of_base_logits_and_bias(make_drafter, changes):
    drafter = make_drafter(draft_vocab_size=20, **changes)
    config, weights = drafter.config, drafter.weights
    hidden, previous = hidden_and_tokens(config, blocks=9)
    borrowed = jnp.zeros((config.vocab_size, config.hidden_size))
    walk = best_walk = dspark.start_walk(config, weights, len(hidden))
    for j in range(2):
        operands = hidden[:, j], previous[:, j]
        bias, walk = dspark.walk(config, weights, walk, *operands)
        logits = dspark.base_logits(config, weights, borrowed, hidden[:, j])
        logits = logits if bias is None else logits + bias
        column, best_walk = dspark.best_position(config, weights, borrowed, best_walk, *operands)
        np.testing.assert_array_equal(column, logits.argmax(axis=-1))
        jax.tree.map(np.testing.assert_array_equal, best_walk, walk)


def test_many_greedy_requests_walk_without_logits_where_the_kernel_runs(make_drafter, monkeypatch):
    monkeypatch.setattr("pallas_kernels.best_linear.api.missing_hopper", lambda: None)
    sizes = {"draft_vocab_size": 256, "hidden_size": 64, "markov_rank": 64}
    weights = make_drafter(jnp.bfloat16, **sizes).weights
    assert dspark.walks_without_logits(weights, weights.lm_head, 32)
    assert not dspark.walks_without_logits(weights, weights.lm_head, 31)
    wide = jnp.tile(weights.lm_head, (1, 40))  # as wide as that of Qwen3-4B
    assert dspark.walks_without_logits(weights.replace(lm_head=wide), wide, 128)
    assert not dspark.walks_without_logits(weights.replace(lm_head=wide), wide, 127)
    weights = make_drafter(jnp.bfloat16, **sizes | {"markov_rank": 40}).weights
    assert not dspark.walks_without_logits(weights, weights.lm_head, 128)


def test_only_the_rnn_head_remembers_tokens_before_the_previous_one(make_drafter):
    for head in HEADS:
        drafter = make_drafter(markov_head_type=head)
        hidden, previous = hidden_and_tokens(drafter.config)
        other = previous.at[:, 0].set((previous[:, 0] + 1) % drafter.config.vocab_size)
        first, _ = walk_block(drafter.config, drafter.weights, hidden, previous)
        second, _ = walk_block(drafter.config, drafter.weights, hidden, other)
        assert bool(jnp.any(first[:, 2] != second[:, 2])) == (head == "rnn")
        assert jnp.any(first[:, 0] != second[:, 0])


def test_rank_zero_is_no_head(make_drafter):
    drafter = make_drafter(markov_rank=0, confidence_head_with_markov=False)
    hidden, previous = hidden_and_tokens(drafter.config)
    assert dspark.start_walk(drafter.config, drafter.weights, 3) is None
    bias, state = dspark.walk(drafter.config, drafter.weights, None, hidden[:, 0], previous[:, 0])
    assert bias is None
    assert state is None
    confidence = dspark.confidences(drafter.config, drafter.weights, hidden, previous)
    assert confidence is not None
    assert confidence.shape == previous.shape
    silent = make_drafter(confidence_head_with_markov=False)
    weights = silent.weights.replace(
        markov=silent.weights.markov.replace(w2=jnp.zeros_like(silent.weights.markov.w2))
    )
    zero, same = walk_block(silent.config, weights, hidden, previous)
    assert not zero.any()
    expected, wide = walk_block(drafter.config, drafter.weights, hidden, previous)
    assert expected is None
    assert wide.shape == same.shape


def test_a_drafter_without_confidence_head_reports_none(make_drafter):
    drafter = make_drafter(enable_confidence_head=False)
    hidden, previous = hidden_and_tokens(drafter.config)
    assert walk_block(drafter.config, drafter.weights, hidden, previous)[1] is None
    assert dspark.confidences(drafter.config, drafter.weights, hidden, previous) is None


def test_the_confidence_reads_the_ungated_embedding(make_drafter):
    vanilla = make_drafter(markov_head_type="vanilla")
    gated = make_drafter(markov_head_type="gated")
    weights = gated.weights.replace(
        markov=gated.weights.markov.replace(w1=vanilla.weights.markov.w1),
        confidence=vanilla.weights.confidence,
    )
    hidden, previous = hidden_and_tokens(vanilla.config)
    np.testing.assert_array_equal(
        walk_block(vanilla.config, vanilla.weights, hidden, previous)[1],
        walk_block(gated.config, weights, hidden, previous)[1],
    )


def test_one_row_of_bf16_logits_equals_the_same_row_among_others():
    random = np.random.default_rng(0)
    x, weight = (random.normal(size=(rows, 16)).astype(jnp.bfloat16) for rows in (4, 32))
    logits = vocabulary_logits(x, weight)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(vocabulary_logits(x[:1], weight), logits[:1], rtol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_gradients_reach_every_weight(make_drafter, head):
    drafter = make_drafter(markov_head_type=head, num_hidden_layers=1)
    config = drafter.config
    width = len(config.target_layer_ids) * config.target_hidden_size
    taps = np.float32(np.random.default_rng(1).normal(size=(1, 9, width)))
    tokens = jnp.array([[[1, 31, 31, 31], [2, 31, 31, 31]]])
    previous = jnp.array([[[1, 4, 5, 6], [2, 7, 8, 9]]])

    def total(weights):
        features = context_features(config, weights, taps)
        context = context_kv(config, weights, features, jnp.arange(9)[None])
        embedded = dspark.embed_tokens(weights, weights.embed, tokens)
        start = jnp.array([[0, 6]])
        hidden = block_hidden_from_context(config, weights, embedded, context, start)
        bias, confidence = walk_block(config, weights, hidden, previous)
        logits = dspark.base_logits(config, weights, weights.lm_head, hidden) + bias
        return jnp.sum(jax.nn.log_softmax(logits)[..., 3]) + jnp.sum(confidence**2)

    gradient = jax.jit(jax.grad(total))(drafter.weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(gradient)):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
