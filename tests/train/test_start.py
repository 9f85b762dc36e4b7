"""Runs that begin with a drafter that exists."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.drafter import load_drafter, save_drafter
from train.initialize import drafter_config, initial_weights
from train.trainer import run_training


def trained(run, output, target, **training):
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, output=str(output), **training)
    )
    assert run_training(run, target)
    return str(output / "drafter")


def loaded(folder, target):
    return load_drafter(folder, (target.config, target.weights))


@pytest.fixture(scope="module")
def headless(shared_tiny_run, tiny_target, tmp_path_factory):
    """A drafter without confidence head; not the one that a run of this seed begins with."""
    section = dataclasses.replace(shared_tiny_run.drafter, enable_confidence_head=False)
    config = drafter_config(section, tiny_target)
    folder = tmp_path_factory.mktemp("headless")
    weights = initial_weights(config, jax.random.key(17))
    save_drafter(config, weights, folder, (tiny_target.config, tiny_target.weights))
    return str(folder)


def test_a_confidence_head_is_added_and_all_else_stays_to_the_bit(
    tiny_run, tiny_target, tmp_path, headless
):
    folder = trained(
        tiny_run,
        tmp_path / "with-head",
        tiny_target,
        start_from=headless,
        trainable="confidence_head",
        optimizer="muon",
        steps=3,
    )
    before, after = loaded(headless, tiny_target), loaded(folder, tiny_target)
    assert before.weights.confidence is None
    assert after.config.enable_confidence_head
    assert np.any(np.asarray(after.weights.confidence.bias) != 0)
    jax.tree.map(
        np.testing.assert_array_equal,
        before.weights,
        dataclasses.replace(after.weights, confidence=None),
    )


def test_fine_tuning_goes_on_where_the_drafter_stands(tiny_run, tiny_target, tmp_path, headless):
    section = dataclasses.replace(tiny_run.drafter, enable_confidence_head=False)
    run = dataclasses.replace(tiny_run, drafter=section)
    folder = trained(
        run, tmp_path / "more", tiny_target, start_from=headless, steps=1, learning_rate=1e-9
    )
    before, after = loaded(headless, tiny_target), loaded(folder, tiny_target)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before.weights, after.weights
    )


def test_a_drafter_of_another_shape_is_refused_before_the_run_exists(
    tiny_run, tiny_target, tmp_path, headless
):
    section = dataclasses.replace(tiny_run.drafter, block_size=3)
    run = dataclasses.replace(tiny_run, drafter=section)
    with pytest.raises(ValueError, match=r"has block_size = 4, the run describes 3"):
        trained(run, tmp_path / "other", tiny_target, start_from=headless)
    assert not Path(tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("training", "drafter", "message"),
    [
        ({}, {}, "training.start_from is not set"),
        ({"start_from": "x"}, {"enable_confidence_head": False}, "nothing to train"),
    ],
)
def test_a_confidence_head_needs_a_drafter_and_a_head(tiny_run, training, drafter, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(
            tiny_run,
            training=dataclasses.replace(
                tiny_run.training, trainable="confidence_head", **training
            ),
            drafter=dataclasses.replace(tiny_run.drafter, **drafter),
        )
