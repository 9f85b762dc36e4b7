"""The probability that a score is measured against is that by which drafts are accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.confidence_ceiling import blocks, by_position
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
    p, q = (jax.nn.softmax(one.weights.logits / 0.7, axis=-1) for one in pair)
    possible = np.minimum(p, q).sum(axis=-1)
    overlap, confidence, _ = found
    assert len(overlap) > 400
    nearest = np.abs(overlap[..., None] - possible).min(axis=-1)
    assert nearest.max() < 1e-5
    heads = jax.nn.sigmoid(pair[1].weights.confidence)
    for position in range(BLOCK):
        apart = np.abs(confidence[:, position, None] - heads[position]).min(axis=-1)
        assert apart.max() < 1e-6


def test_drafts_are_accepted_as_often_as_their_probability_says(found):
    for row in by_position(*found):
        deviation = 0.5 / np.sqrt(row["reached"])
        assert row["accepted"] == pytest.approx(row["expected"], abs=4 * deviation)


def test_no_score_tells_drafts_apart_better_than_their_probability(found):
    for row in by_position(*found):
        for kind in ("conditional", "survival"):
            assert row[f"{kind}_auroc_probability"] > row[f"{kind}_auroc_head"]


def test_greedy_drafts_are_refused(pair):
    with pytest.raises(ValueError, match="temperature is 0"):
        blocks(*pair, [[1]], temperature=0.0, **HOW)
