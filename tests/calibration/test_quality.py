"""Figures before and after STS, and the diagrams drawn of them."""

import numpy as np
import pytest

from dspark_jax.calibration.blocks import VerifiedBlocks
from dspark_jax.calibration.metrics import auroc
from dspark_jax.calibration.plots import draw_reliability
from dspark_jax.calibration.quality import measure


def test_a_temperature_leaves_the_order_of_conditional_scores_alone(synthetic):
    blocks = synthetic((2.0, 0.5, 1.4), 5000)
    for figures in measure(blocks, np.array([2.0, 0.5, 1.4])):
        assert figures.conditional_auroc_after == figures.conditional_auroc_before
        assert figures.conditional_auroc_before > 0.7


def test_conditional_scores_are_judged_among_the_blocks_that_reach_the_position(synthetic):
    blocks = synthetic((1.0, 1.0), 5000)
    reached = blocks.accepted >= 1
    wanted = auroc(blocks.logits[reached, 1], blocks.accepted[reached] >= 2)
    second = measure(blocks, np.ones(2))[1]
    assert second.reached == reached.sum()
    assert second.conditional_auroc_before == pytest.approx(wanted)


def test_figures_of_the_cumulative_event_count_every_labelled_block():
    blocks = VerifiedBlocks(np.zeros((4, 2)), np.array([2, 1, 0, 1]), np.array([2, 2, 2, 1]))
    first, second = measure(blocks, np.ones(2))
    assert (first.blocks, second.blocks) == (4, 3)
    assert first.observed == pytest.approx(3 / 4)
    assert first.ece_before == pytest.approx(1 / 4)
    assert second.predicted_before == pytest.approx(1 / 4)
    assert second.brier_before == pytest.approx((0.75**2 + 2 * 0.25**2) / 3)


def test_what_labels_do_not_define_is_none():
    blocks = VerifiedBlocks(np.zeros((2, 2)), np.array([1, 1]), np.array([1, 1]))
    first, second = measure(blocks, np.ones(2))
    assert first.auroc_before is None
    assert first.ece_before == pytest.approx(0.5)
    assert second.blocks == 0
    assert second.ece_before is None


def test_a_diagram_is_drawn_for_every_position_with_a_label(synthetic, tmp_path):
    blocks = synthetic((2.0, 0.5, 1.0, 1.0, 3.0), 500)
    blocks = VerifiedBlocks(blocks.logits, np.minimum(blocks.accepted, 4), np.full(500, 4))
    temperatures = np.array([2.0, 0.5, 1.0, 1.0, 1.0])
    path = tmp_path / "reliability.png"
    draw_reliability(blocks, temperatures, measure(blocks, temperatures), path, "toy")
    assert path.read_bytes().startswith(b"\x89PNG")
