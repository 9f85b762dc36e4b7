"""Which positions of a verified block have a label, and which are trials."""

import numpy as np
import pytest

from dspark_jax.calibration.blocks import VerifiedBlocks, cumulative_survival
from dspark_jax.schedule.survival import survival


def blocks(accepted, verified, width=3):
    count = len(accepted)
    return VerifiedBlocks(np.zeros((count, width)), np.array(accepted), np.array(verified))


def test_only_verified_positions_have_a_label_and_only_reached_ones_are_trials():
    found = blocks(accepted=[3, 1, 1, 0], verified=[3, 3, 1, 0])
    assert found.labelled.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert found.survived.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert found.reached.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_positions_are_sparse_by_the_blocks_that_reach_them():
    found = blocks(accepted=[3, 1, 1, 0], verified=[3, 3, 1, 0])
    assert found.sparse(2).tolist() == [False, False, True]


@pytest.mark.parametrize(("accepted", "verified"), [(2, 1), (-1, 1), (3, 4)])
def test_counts_that_cannot_be_are_refused(accepted, verified):
    with pytest.raises(ValueError, match=f"block 1 has {accepted} accepted of {verified} verified"):
        blocks([0, accepted], [0, verified])


def test_survival_is_the_one_that_the_scheduler_computes():
    random = np.random.default_rng(0)
    logits = 4 * random.normal(size=(50, 7))
    temperatures = random.uniform(0.5, 2.0, 7)
    found = cumulative_survival(logits, temperatures)
    wanted = survival(np.float32(logits), np.broadcast_to(np.float32(temperatures), (50, 7)))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert (np.diff(found, axis=1) <= 0).all()


def test_a_confidence_that_is_not_a_number_counts_as_zero_from_there_on():
    found = VerifiedBlocks(np.array([[9.0, np.nan, 9.0]]), np.array([1]), np.array([3]))
    survival = cumulative_survival(found.logits, np.ones(3))
    assert survival[0, 0] > 0.9
    assert survival[0, 1:].tolist() == [0.0, 0.0]
