"""The probability that a score is measured against is that by which drafts are accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.confidence_ceiling import Blocks, blocks, by_position
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.testing import markov

VOCAB, BLOCK = 9, 3
HOW = {"new_tokens": 60, "batch": 8}


@pytest.fixture(scope="module")
def pair():
    random = np.random.default_rng(0)
    table = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    target = markov.MarkovTargetWeights(2 * table(VOCAB, VOCAB))
    drafter = markov.MarkovDrafterWeights(target.logits + table(VOCAB, VOCAB), table(BLOCK, VOCAB))
    return (
        LoadedTarget(markov.MarkovTargetConfig(VOCAB), target, None, (), "table"),
        LoadedDrafter(markov.MarkovDrafterConfig(VOCAB, BLOCK), drafter, "drafting-table"),
    )


@pytest.fixture(scope="module")
def found(pair):
    prompts = [[1 + row % (VOCAB - 1)] * (1 + row % 4) for row in range(30)]
    return blocks(*pair, prompts, temperature=0.7, **HOW)


def test_a_block_is_scored_by_what_target_and_drafter_have_in_common(pair, found):
    """Of one and the same token before the draft, which nobody tells."""
    p, q = (jax.nn.softmax(one.weights.logits / 0.7, axis=-1) for one in pair)
    overlap = np.minimum(p, q).sum(axis=-1)
    heads = np.asarray(jax.nn.sigmoid(pair[1].weights.confidence))
    ratio = np.append(np.minimum(p / q, 1.0), np.ones((VOCAB, 1)), axis=1)
    assert len(found.accepted) > 400
    for position in range(BLOCK):
        apart = np.abs(found.overlap[:, position, None] - overlap)
        apart += np.abs(found.confidence[:, position, None] - heads[position])
        apart += np.abs(found.ratio[:, position, None, None] - ratio).min(axis=-1)
        assert apart.min(axis=-1).max() < 1e-5


def test_drafts_are_accepted_as_often_as_their_probability_says(found):
    rows = by_position(found)
    assert len(rows) == BLOCK
    for row in rows:
        deviation = 0.5 / np.sqrt(row["reached"])
        assert row["accepted"] == pytest.approx(row["expected"], abs=4 * deviation)
    chance = np.cumprod(found.ratio, axis=1).mean(axis=0)
    for position, expected in enumerate(chance):
        survived = (found.accepted > position).mean()
        assert survived == pytest.approx(expected, abs=2 / np.sqrt(len(found.accepted)))


def test_no_score_tells_drafts_apart_better_than_their_probability(found):
    for row in by_position(found):
        assert row["alone_ceiling"] > row["alone_head"]
        assert row["survival_ceiling"] > row["survival_head"]


def test_positions_that_no_block_reached_are_left_out():
    one = Blocks(*np.full((3, 4, 2), 0.5), np.array([0, 0, 1, 0]))
    assert [row["reached"] for row in by_position(one)] == [4, 1]


def test_greedy_drafts_are_refused(pair):
    with pytest.raises(ValueError, match="temperature is 0"):
        blocks(*pair, [[1]], temperature=0.0, **HOW)


def test_no_prompt_is_refused(pair):
    with pytest.raises(ValueError, match="no prompt is left"):
        blocks(*pair, [], temperature=1.0, **HOW)
